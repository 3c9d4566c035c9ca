"""The command that makes a figure from many runs. Importing this module imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgegossip.cli.command import Command, default_folder, parse, show_help
from edgegossip.cli.commands import print_report
from edgegossip.cli.options import ClusterOptions, ManyRunsOptions
from edgegossip.contract.errors import DataError, Interrupted, TrainingError, UsageError
from edgegossip.recipes.call import Call
from edgegossip.recipes.registry import load_study
from edgegossip.report.live import LiveView
from edgegossip.report.study_page import write_study_report
from edgegossip.runs.parallel import AtOnce
from edgegossip.runs.study import Row, Study, run_study


@dataclass(frozen=True, kw_only=True)
class StudyOptions(ClusterOptions):
    """Options for a study.

    Args:
        only: Part of the study to run, e.g. a task of edgegossip/speedup; by default all parts.
        runs: Runs to carry out, e.g. epoch-gossip edge-gossip; by default all. With `--resume`,
            omitted runs can be added later.
    """

    only: str | None = None
    runs: tuple[str, ...] = ()


def study_command(arguments: list[str]) -> int:
    """`edgegossip study`."""
    if arguments and arguments[0] in ("-h", "--help"):
        show_help("study", "STUDY", StudyOptions)
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(
            "study needs a name, such as edgegossip/fig3 (in a clone of the repository, "
            "edgegossip list has all), or FILE.py:NAME"
        )
    name, *words = arguments
    command = parse("study", StudyOptions, Call(name, load=load_study), words)
    options, study = command.options, command.call.result()
    if options.only is not None:
        study = study.only(options.only)
    study = study.with_runs(options.runs) if options.runs else study
    carry_out(study, command, at_once=options.at_once)
    return 0


def carry_out(
    study: Study, command: Command[Any, Any], *, at_once: AtOnce | None = None
) -> dict[str, Row]:
    """Run the unfinished cells of a study, draw its report, and return all rows.

    Args:
        study: The study.
        command: The command, whose options are `ManyRunsOptions`.
        at_once: As in `run_study`.

    Raises:
        TrainingError: If a cell has failed.
    """
    options: ManyRunsOptions = command.options
    out = options.out or default_folder(study.name)
    try:
        with LiveView() as view, command.how_to_resume(out):
            rows = run_study(
                study,
                out=out,
                resume=options.resume,
                command=command.record,
                num_threads=options.threads,
                num_processes=options.num_processes,
                at_once=at_once,
                progress=view,
            )
    except (Interrupted, DataError):
        write_study_report(out)  # what there is so far is worth looking at
        raise
    print_report(write_study_report(out))
    if failed := [cell.name for cell in study.cells if cell.name not in rows]:
        raise TrainingError(
            f"{len(failed)} of {len(study.cells)} cells failed, the first of them {failed[0]}; "
            "the report says why, and --resume tries them again"
        )
    return rows
