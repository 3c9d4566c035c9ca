"""The command that makes a figure from many runs; importing this imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from edgegossip.cli.commands import default_folder, repeatable
from edgegossip.core.errors import UsageError
from edgegossip.experiments.registry import STUDIES, load_study
from edgegossip.experiments.runner import Interrupted
from edgegossip.experiments.study import Study, run_study
from edgegossip.report.live import LiveView
from edgegossip.report.study import write_study_report


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """How to do a study.

    Args:
        out: Its folder; by default runs/STUDY/STAMP.
        resume: Go on with the study in `out`; what is done there is not done again.
        threads: Of the compute pool; by default one a core. No effect on results.
        only: The one part of the study to do, e.g. a task of edgegossip/speedup; by default
            all.
    """

    out: Path | None = None
    resume: bool = False
    threads: int | None = None
    only: str | None = None

    def __post_init__(self) -> None:
        if self.out == Path():
            raise ValueError("out must be a folder of its own, got an empty name or '.'")
        if self.threads is not None and self.threads < 0:
            raise ValueError(f"threads must be at least 0, got {self.threads}")
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out DIR, the folder of the interrupted study")


def study_command(arguments: list[str]) -> int:
    """`edgegossip study`."""
    options, study = _parse(arguments)
    if options.only is not None:
        study = study.only(options.only)
    out = options.out or default_folder(study.name)
    try:
        with LiveView() as view:
            run_study(
                study,
                out=out,
                resume=options.resume,
                command=repeatable("study", arguments),
                num_threads=options.threads,
                progress=view,
            )
    except (Interrupted, KeyboardInterrupt):
        write_study_report(out)
        raise
    print(f"report: {write_study_report(out)}")
    return 0


def _parse(arguments: list[str]) -> tuple[StudyOptions, Study]:
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(f"study needs a name: one of {', '.join(STUDIES)}")
    name, *rest = arguments
    make_study = load_study(name)

    def parsed(options: StudyOptions, study: Any) -> tuple[StudyOptions, Study]:  # noqa: ANN401
        return options, study

    # The study is known only now, so tyro is told here that its arguments are ours too.
    parsed.__annotations__ = {
        "options": Annotated[StudyOptions, tyro.conf.arg(name="")],
        "study": Annotated[Any, tyro.conf.arg(name="", constructor=make_study)],
    }
    try:
        return tyro.cli(
            parsed,
            prog=f"edgegossip study {name}",
            description=make_study.__doc__,
            args=rest,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
