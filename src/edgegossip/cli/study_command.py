"""The command that makes a figure from many runs. Importing this module imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from edgegossip.cli.commands import default_folder, how_to_resume, print_report, repeatable
from edgegossip.cli.options import ClusterOptions, ManyRunsOptions, parse, show_help
from edgegossip.contract.errors import DataError, Interrupted, TrainingError, UsageError
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
    options, study = _parse(arguments)
    carry_out(study, options, "study", arguments, at_once=options.at_once)
    return 0


def carry_out(
    study: Study,
    options: ManyRunsOptions,
    command: str,
    arguments: list[str],
    *,
    at_once: AtOnce | None = None,
) -> dict[str, Row]:
    """Run the unfinished cells of a study, draw its report, and return all rows.

    Args:
        study: The study.
        options: Options of the command.
        command: Name of the command.
        arguments: Command-line arguments after the command.
        at_once: As in `run_study`.

    Raises:
        TrainingError: If a cell has failed.
    """
    out = options.out or default_folder(study.name)
    try:
        with LiveView() as view, how_to_resume(command, arguments, out):
            rows = run_study(
                study,
                out=out,
                resume=options.resume,
                command=repeatable(command, arguments),
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


def _parse(arguments: list[str]) -> tuple[StudyOptions, Study]:
    if arguments and arguments[0] in ("-h", "--help"):
        show_help("study", "STUDY", StudyOptions)
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(
            "study needs a name, such as edgegossip/fig3 (in a clone of the repository, "
            "edgegossip list has all), or FILE.py:NAME"
        )
    name, *rest = arguments
    options, study = parse(f"edgegossip study {name}", StudyOptions, load_study(name), rest)
    if options.only is not None:
        study = study.only(options.only)
    return options, study.with_runs(options.runs) if options.runs else study
