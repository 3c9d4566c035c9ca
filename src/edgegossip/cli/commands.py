"""The commands for training and reports. Importing this module imports torch."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgegossip.cli.options import ClusterOptions, Options, TrackOptions
from edgegossip.cli.printing import log_to_console
from edgegossip.cli.recipe import parse_recipe, pick
from edgegossip.contract.errors import (
    Interrupted,
    RunFolderError,
    TrainingError,
    UsageError,
    without_password,
)
from edgegossip.report import units
from edgegossip.report.export import export
from edgegossip.report.live import LiveView
from edgegossip.report.page import write_report
from edgegossip.report.study_page import write_study_report
from edgegossip.runs.comparison import compare
from edgegossip.runs.experiment import Batched, Comparison, Experiment, batched
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run
from edgegossip.runs.study import STUDY


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options, TrackOptions):
    """Options for running a recipe.

    Args:
        only: Algorithm to run if the recipe is a comparison; by default its baseline.
        batched: Train small dense models together, which is several times faster with many
            workers but changes the last bits of the result. "auto" does so with 64 workers or
            more.
    """

    only: str | None = None
    batched: Batched = "auto"


@dataclass(frozen=True, kw_only=True)
class CompareOptions(RunOptions, ClusterOptions):
    """Options for running a whole comparison."""


def run_command(arguments: list[str], *, is_comparison: bool) -> int:
    """`edgegossip run` and `edgegossip compare`."""
    command = "compare" if is_comparison else "run"
    kind = CompareOptions if is_comparison else RunOptions
    name, options, chosen = parse_recipe(command, kind, arguments)
    # A recipe file's colon and slashes make no good folder name.
    out = options.out or default_folder(name.rpartition(":")[2])
    settings: dict[str, Any] = {
        "out": out,
        "resume": options.resume,
        "recipe": name,
        "command": repeatable(command, arguments),
        "num_threads": options.threads,
        "trackers": options.trackers,
    }
    try:
        with LiveView() as view, how_to_resume(command, arguments, out):
            if is_comparison:
                comparison = _require_comparison(name, chosen, options.only)
                experiments = {
                    each: batched(experiment, options.batched)
                    for each, experiment in comparison.experiments.items()
                }
                comparison = replace(comparison, experiments=experiments)
                assert isinstance(options, CompareOptions)
                # Other processes do not know recipes that a file defines.
                number = 1 if ":" in name else options.num_processes
                results = compare(
                    comparison,
                    num_processes=number,
                    at_once=options.at_once,
                    progress=view,
                    **settings,
                )
            else:
                experiment = batched(pick(name, chosen, options.only), options.batched)
                results = {experiment.run_name: run(experiment, progress=view, **settings)}
    except (Interrupted, TrainingError):
        with suppress(KeyboardInterrupt, RunFolderError):  # perhaps no run has begun
            write_report(out)  # what there is so far is worth looking at
        raise
    print_table(results)
    print_report(write_report(out))
    return 0


def default_folder(name: str) -> Path:
    """Default folder of results, named after the recipe or study and the time."""
    return Path("runs", name, datetime.now().strftime("%Y-%m-%d-%H%M%S"))


def repeatable(command: str, arguments: list[str]) -> str:
    """The command without passwords and without options that do not affect results.

    >>> repeatable("worker", ["quickstart", "--telemetry", "redis://me:secret@box:6379/0"])
    'edgegossip worker quickstart --telemetry redis://box:6379/0'
    """
    free = ("out", "threads", "processes", "resume", "pool", "ray-address", "track")
    kept = without(arguments, *free)
    return shlex.join(["edgegossip", command, *_without_passwords(kept)])


def _without_passwords(arguments: list[str]) -> list[str]:
    return [without_password(each) if "://" in each else each for each in arguments]


@contextmanager
def how_to_resume(command: str, arguments: list[str], out: Path) -> Iterator[None]:
    """Add to an interruption's message the command that resumes the work.

    >>> with how_to_resume("run", ["quickstart", "--lr", "0.1"], Path("runs/a")):
    ...     raise Interrupted("interrupted at 3 virtual seconds; ...")
    Traceback (most recent call last):
    edgegossip.contract.errors.Interrupted: interrupted at 3 virtual seconds; runs/a holds \
everything so far; to continue: edgegossip run quickstart --lr 0.1 --resume --out runs/a
    """
    try:
        yield
    except Interrupted as error:
        given = _without_passwords(without(arguments, "out", "resume"))
        again = shlex.join(["edgegossip", command, *given, "--resume", "--out", str(out)])
        when = str(error).partition(";")[0]
        raise Interrupted(
            f"{when}; {out} holds everything so far; to continue: {again}"
        ) from error


def without(arguments: list[str], *options: str) -> list[str]:
    """The arguments without these options and their values.

    >>> without(["quickstart", "--out", "x", "--seed=1", "--no-resume"], "out", "resume")
    ['quickstart', '--seed=1']
    """
    kept: list[str] = []
    is_kept = True
    for argument in arguments:
        if argument.startswith("--") or argument == "-n":
            name = argument.partition("=")[0].lstrip("-").removeprefix("no-")
            is_kept = name.replace("_", "-") not in options
        if is_kept:
            kept.append(argument)
    return kept


def report_command(arguments: list[str]) -> int:
    """`edgegossip report`."""
    log_to_console()
    folder = tyro.cli(report_folder, prog="edgegossip report", args=arguments)
    write = write_study_report if (folder / STUDY).exists() else write_report
    print(f"report: {write(folder)}")
    return 0


def report_folder(folder: tyro.conf.Positional[Path]) -> Path:
    """Redraw the figures and report.html of a run folder.

    Args:
        folder: Folder of a run, a comparison or a study.
    """
    return folder


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a run as a folder for the Hugging Face hub: model, config and model card.

    Args:
        folder: Folder of a run or a comparison.
        out: Folder to write; by default `export` in the folder of the run.
        only: Run to export if the folder holds a comparison.
    """

    folder: tyro.conf.Positional[Path]
    out: Path | None = None
    only: str | None = None


def export_command(arguments: list[str]) -> int:
    """`edgegossip export`."""
    log_to_console()
    options = tyro.cli(ExportOptions, prog="edgegossip export", args=arguments)
    print(f"exported: {export(options.folder, options.out, only=options.only)}")
    return 0


def _require_comparison(
    name: str, chosen: Experiment | Comparison, only: str | None
) -> Comparison:
    if isinstance(chosen, Experiment):
        raise UsageError(f"recipe {name!r} is a single run; use: edgegossip run {name}")
    if only is not None:
        raise UsageError(f"compare runs everything; use: edgegossip run {name} --only {only}")
    return chosen


def print_report(page: Path) -> None:
    """Print the path of the report, and the time since the command began."""
    waited = time.time() - psutil.Process().create_time()
    print(f"report: {page} ({units.seconds(waited)} from the command to here)")


def print_table(results: dict[str, Results]) -> None:
    """Print a table with one line for each run."""
    table = Table(box=None, padding=(0, 1))  # fits 80 columns
    names = {result.metric.name for result in results.values()}
    metric = names.pop() if len(names) == 1 else "metric"
    for column in ("run", metric, "worst worker", "sent", "time", "wall"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for name, result in results.items():
        table.add_row(
            escape(name),
            units.metric_value(result.final_value, result.metric, 2),
            units.metric_value(result.metric.worst(result.worker_values), result.metric, 2),
            units.data_size(result.history[-1].bytes_sent),
            units.seconds(result.virtual_seconds),
            units.seconds(result.wall_seconds),
        )
    # Where rich cannot tell the width, as in a pipe, it assumes 80 columns and cuts the names.
    Console(width=None if sys.stdout.isatty() else 120).print(table)
