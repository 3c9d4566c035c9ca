"""The commands for training and reports. Importing this module imports torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgegossip.cli.command import Command, parse_recipe
from edgegossip.cli.options import ClusterOptions, KeepOptions, Options, TrackOptions
from edgegossip.cli.printing import log_to_console, warn
from edgegossip.contract.errors import (
    EdgeGossipError,
    Interrupted,
    RunFolderError,
    TrainingError,
    UsageError,
)
from edgegossip.plan.machines import read_machines
from edgegossip.plan.planning import on_machines
from edgegossip.recipes.call import RecipeCall
from edgegossip.report import units
from edgegossip.report.live import LiveView
from edgegossip.runs.batching import Batched, batched
from edgegossip.runs.comparison import compare
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.fit import misfits_of_simulation
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run
from edgegossip.runs.study import STUDY


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options, TrackOptions, KeepOptions):
    """Options for running a recipe.

    Args:
        only: Algorithm to run if the recipe is a comparison; by default its baseline.
        batched: Train the workers' models together, which is several times faster for small
            models, and on a GPU, but changes the last bits of the result. "auto" does so on a
            CPU with 64 or more workers, unless their steps are too long to be faster so.
        final_average: At the end, let all workers exchange their models, so that each ends with
            the mean of all.
    """

    only: str | None = None
    batched: Batched = "auto"
    final_average: bool = False

    def applied_to(self, experiment: Experiment) -> Experiment:
        experiment = super().applied_to(experiment)
        try:
            return replace(experiment, final_average=True) if self.final_average else experiment
        except ValueError as error:
            raise UsageError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class CompareOptions(RunOptions, ClusterOptions):
    """Options for running a whole comparison.

    Args:
        runs: Runs to carry out, e.g. gosgd edge-gossip; by default all.
        machines: TOML file with a [[machine]] table for each machine, as for `edgegossip plan`:
            simulate these instead of the recipe's. Speeds relative to this machine are measured
            anew, so only those in samples per second can be resumed.
    """

    runs: tuple[str, ...] = ()
    machines: Path | None = None


def run_command(arguments: list[str]) -> int:
    """`edgegossip run`."""
    command = parse_recipe("run", RunOptions, arguments)
    options = command.options
    made = options.applied_to(command.call.experiment(options.only))
    command.call.require_used(made)
    experiment = batched(made, options.batched)
    warn_of(misfits_of_simulation(experiment))
    return _print_results(
        command,
        lambda settings: {experiment.run_name: run(experiment, **settings)},
    )


def compare_command(arguments: list[str]) -> int:
    """`edgegossip compare`."""
    command = parse_recipe("compare", CompareOptions, arguments)
    options, name = command.options, command.call.name
    machines = options.machines
    comparison = command.call.make()
    if isinstance(comparison, Experiment):
        raise UsageError(f"recipe {name!r} is a single run; use: edgegossip run {name}")
    if (only := options.only) is not None:
        raise UsageError(f"compare runs everything; use: edgegossip run {name} --only {only}")
    if machines is not None:
        comparison = on_machines(command.call, read_machines(machines))
    comparison = comparison.with_runs(options.runs) if options.runs else comparison
    experiments = {
        each: batched(options.applied_to(experiment), options.batched)
        for each, experiment in comparison.experiments.items()
    }
    comparison = replace(comparison, experiments=experiments)
    command.call.require_used(*experiments.values())
    warn_of(chain.from_iterable(map(misfits_of_simulation, experiments.values())))
    # Other processes do not know recipes that a file defines.
    number = 1 if ":" in name else options.num_processes
    return _print_results(
        command,
        lambda settings: compare(
            comparison, num_processes=number, at_once=options.at_once, **settings
        ),
    )


def _print_results(
    command: Command[Any, RecipeCall], train: Callable[[dict[str, Any]], dict[str, Results]]
) -> int:
    """Train with the settings that all runs have, and print what came of it."""
    options: RunOptions = command.options
    out = options.out or command.default_folder
    try:
        with LiveView() as view, command.how_to_resume(out):
            results = train(
                {
                    "out": out,
                    "resume": options.resume,
                    "recipe": command.call.name,
                    "command": command.record,
                    "num_threads": options.threads,
                    "trackers": options.trackers,
                    "progress": view,
                }
            )
    except (Interrupted, TrainingError):
        with suppress(KeyboardInterrupt, RunFolderError):  # perhaps no run has begun
            write_report(out)  # what there is so far is worth looking at
        raise
    print_table(results)
    print_report(write_report(out))
    return 0


def warn_of(misfits: Iterable[str]) -> None:
    """Print why a run may not fit on this machine, before it begins."""
    for line in misfits:
        warn(line)


def report_command(arguments: list[str]) -> int:
    """`edgegossip report`."""
    log_to_console()
    folder = tyro.cli(report_folder, prog="edgegossip report", args=arguments)
    from edgegossip.report.study_page import write_study_report

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
    from edgegossip.report.export import export

    log_to_console()
    options = tyro.cli(ExportOptions, prog="edgegossip export", args=arguments)
    print(f"exported: {export(options.folder, options.out, only=options.only)}")
    return 0


def write_report(folder: Path) -> Path:
    """Draw the report of a folder; only here, a command needs matplotlib."""
    try:
        from edgegossip.report.page import write_report as write
    except ModuleNotFoundError as error:
        raise EdgeGossipError(
            f"a report needs {error.name}, which a light install leaves out; {folder} is "
            "complete: copy it to a machine with everything, and run edgegossip report there"
        ) from error
    return write(folder)


def print_report(page: Path) -> None:
    """Print the path of the report, and the time since the command began."""
    waited = time.time() - psutil.Process().create_time()
    print(f"report: {page} (finished in {units.seconds(waited)})")


def print_table(results: dict[str, Results]) -> None:
    """Print a table with one line for each run."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    names = {result.metric.name for result in results.values()}
    metric = names.pop() if len(names) == 1 else "metric"
    has_best = any(result.best is not None for result in results.values())
    chosen = ["by validation"] if has_best else []
    titles = ("run", metric, *chosen, "worst\nworker", "goodput", "compute\nused", "sent")
    for title in (*titles, "energy", "node\ntime", "time", "wall"):  # fits 80 columns
        table.add_column(title, justify="left" if title == "run" else "right", no_wrap=True)
    for name, result in results.items():
        use = result.history[-1].use
        best = None if result.best is None else result.best.value
        table.add_row(
            escape(name),
            units.metric_value(result.final_value, result.metric, 2),
            *([units.metric_value(best, result.metric, 2)] if has_best else []),
            units.metric_value(result.metric.worst(result.worker_values), result.metric, 2),
            units.percent(None if use is None else use.goodput, is_in_column=True),
            units.percent(None if use is None else use.compute_used, is_in_column=True),
            units.data_size(result.history[-1].bytes_sent),
            units.energy(result.history[-1].joules),
            units.seconds(None if use is None else use.node_seconds),
            units.seconds(result.virtual_seconds),
            units.seconds(result.wall_seconds),
        )
    # Where rich cannot tell the width, as in a pipe, it assumes 80 columns and cuts the names.
    Console(width=None if sys.stdout.isatty() else 120).print(table)
