"""Turning a run folder into figures and one self-contained HTML page."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, TemplateError
from markupsafe import Markup, escape

from edgegossip.contract.errors import RunFolderError, UsageError
from edgegossip.machine.energy import BUSY_WATTS, IDLE_WATTS
from edgegossip.machine.files import write_whole
from edgegossip.report.claims import claim_rows
from edgegossip.report.figures import metric_pictures
from edgegossip.report.folder import ReportData, Run, read_folder
from edgegossip.report.log import AVERAGED, mean_waiting
from edgegossip.report.prose import disagreements, highlights, notices, story
from edgegossip.report.servers import commit_pictures, commit_rows, server_words
from edgegossip.report.stages import stage_pictures, stage_rows
from edgegossip.report.style import Picture, run_colors
from edgegossip.report.timeline import kept_sentence, timeline_pictures
from edgegossip.report.trust import trust_pictures
from edgegossip.report.units import (
    capitalized,
    data_size,
    energy,
    listing,
    metric_value,
    number,
    percent,
    seconds,
    times,
    written,
)
from edgegossip.runs.describe import role_words
from edgegossip.runs.results import Results, framed

REPORT = "report.html"
FIGURES = "figures"
DRAWING_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    TemplateError,
)
"""Errors that drawing invalid values can raise."""
_CODE = re.compile("`([^`]+)`")
_FACTS = {
    "recipe": "Recipe",
    "command": "Command",
    "seed": "Seed",
    "num_train": "Training samples",
    "wall_started": "Started",
}
"""Labels of the fields of a header that identify the experiment."""
# A topology may list all its edges; this many characters identify it without filling the page.
MAX_SETTING = 160


@dataclass(frozen=True, slots=True)
class PlatformGroup:
    """Workers of one role on equal platforms."""

    ranks: str
    role: str
    throughput: float | None
    platform: Mapping[str, Any]


def write_report(folder: Path | str) -> Path:
    """Write `figures/*.png`, `figures/*.svg` and `report.html` into a run folder.

    Args:
        folder: Folder of a run or a comparison, which may have been interrupted.

    Returns:
        Path of the page, which is self-contained and makes no requests.

    Raises:
        RunFolderError: If the folder has no run or cannot be written to, or a file is damaged.
    """
    folder = Path(folder)
    try:
        contents = read_folder(folder)
        colors = run_colors([run.name for run in contents.runs], contents.baseline)
        curves = list(metric_pictures(contents, colors))
        commits = list(commit_pictures(contents, colors))
        stages = list(stage_pictures(contents, colors))
        trust = list(trust_pictures(contents))
        timelines = list(timeline_pictures(contents, colors))
        page = render_page(contents, colors, curves, commits, stages, timelines, trust)
    except DRAWING_ERRORS as error:
        raise RunFolderError(
            f"what {folder} holds cannot be drawn ({error!r:.300}); a file in it is damaged - "
            "run the experiment again"
        ) from error
    return write_page(folder, page, [*curves, *commits, *stages, *trust, *timelines])


def write_page(folder: Path, page: str, pictures: Sequence[Picture]) -> Path:
    """Write a page and the files of its pictures; return the page's path.

    Raises:
        RunFolderError: If a file cannot be written.
    """
    try:
        (folder / FIGURES).mkdir(exist_ok=True)
        for picture in pictures:
            write_whole(folder / FIGURES / f"{picture.name}.png", picture.png)
            write_whole(folder / FIGURES / f"{picture.name}.svg", picture.svg)
        write_whole(folder / REPORT, page.encode())
    except OSError as error:
        raise RunFolderError(
            f"cannot write {error.filename or folder} ({error.strerror}); the results are "
            "complete without it: make room, or copy their folder elsewhere, and report it "
            "again"
        ) from error
    return folder / REPORT


def render_page(
    folder: ReportData,
    colors: Mapping[str, str],
    curves: list[Picture],
    commits: list[Picture],
    stages: list[Picture],
    timelines: list[Picture],
    trust: Sequence[Picture] = (),
) -> str:
    """Fill in the template; all data is escaped."""
    header, rows = folder.runs[0].log.header, commit_rows(folder)
    return template("page.html").render(
        folder=folder,
        metric=folder.metric,
        others=folder.runs[0].log.metrics[1:],
        colors=colors,
        story=story(folder),
        notices=notices(folder),
        disagreements=disagreements(folder),
        highlights=highlights(folder),
        waiting={run.name: mean_waiting(run.trainers) for run in folder.runs},
        has_kept=any(run.summary.kept_value is not None for run in folder.runs),
        has_energy=any(run.summary.joules is not None for run in folder.runs),
        has_use=any(run.summary.goodput is not None for run in folder.runs),
        default_watts=(IDLE_WATTS, BUSY_WATTS),
        has_ratios=any(run.summary.bytes_ratio_same_graph for run in folder.runs),
        curves=curves,
        commits=commits,
        commit_rows=rows,
        claim_rows=claim_rows(folder),
        servers=server_words([row.run for row in rows]),
        stages=stages,
        trust=trust,
        stage_rows=stage_rows(folder),
        model=" or ".join(dict.fromkeys(run.log.model for run in folder.runs)),
        has_own_models=any(run.log.model == AVERAGED for run in folder.runs),
        timelines=timelines,
        is_balanced=any(kept_sentence(run) for run in folder.runs if run.workers),
        platforms=platform_groups(folder.runs[0]),
        has_roles=len(set(folder.runs[0].log.roles)) > 1,
        facts={
            label: header[key] for key, label in _FACTS.items() if header.get(key) is not None
        }
        | _device(header),
    )


def template(name: str, *, autoescape: bool = True, **filters: Callable[..., str]) -> Template:
    """Load a template with the report's filters and further ones."""
    environment = Environment(
        loader=PackageLoader("edgegossip", "report"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "number": number,
        "percent": percent,
        "of_metric": metric_value,
        "capitalized": capitalized,
        "seconds": seconds,
        "data_size": data_size,
        "energy": energy,
        "times": times,
        "written": written,
        "setting": setting_text,
        "data_uri": lambda picture: (
            f"data:image/svg+xml;base64,{base64.b64encode(picture.svg).decode()}"
        ),
        # Names in backticks are shown as code.
        "with_code": lambda text: Markup(_CODE.sub(r"<code>\1</code>", str(escape(text)))),
        **filters,
    }
    return environment.get_template(name)


def _device(header: Mapping[str, Any]) -> dict[str, str]:
    """The device of a simulated run; workers on real machines each have their own."""
    match header:
        case {"driver": "network"}:
            return {}
        case {"task": {"torch_device": str() as device}}:
            return {"Device": device}
    return {}


def platform_groups(run: Run) -> list[PlatformGroup]:
    """Group the workers of a run by role and platform."""
    groups: dict[tuple[str, str], list[int]] = {}
    platforms, roles = run.log.header["platforms"], run.log.roles
    for rank, platform in enumerate(platforms):
        key = (roles[rank], json.dumps(platform, sort_keys=True))
        groups.setdefault(key, []).append(rank)
    is_measured = run.log.header.get("driver") == "network"
    return [
        PlatformGroup(
            listing([str(rank) for rank in ranks]),
            role_words(role),
            # Nothing was measured for a worker that has not trained.
            None
            if is_measured and ranks[0] not in run.speeds
            else platforms[ranks[0]]["throughput"],
            platforms[ranks[0]],
        )
        for (role, _), ranks in groups.items()
    ]


def setting_text(value: Any) -> Markup:  # noqa: ANN401 - whatever JSON holds
    """A setting as text; only the first `MAX_SETTING` characters until a reader opens it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= MAX_SETTING:
        return escape(text)
    opened = Markup('<details class="rest"><summary>{}\u2026</summary>{}</details>')
    return opened.format(text[:MAX_SETTING], text)


# Notebooks.


class Report:
    """Draws the report of a run or a comparison; a notebook shows it as the output of a cell.

    Args:
        run: Results of a run, or the folder of a run or a comparison.
        height: Height in a notebook, in pixels.

    Attributes:
        page: Path of the page.

    Raises:
        UsageError: If the results have no folder.
        RunFolderError: See `write_report`.
    """

    def __init__(self, run: Results | Path | str, *, height: int = 640) -> None:
        folder = run.folder if isinstance(run, Results) else Path(run)
        if folder is None:
            raise UsageError("these results have no folder, so there is no report of them")
        self.page = write_report(folder)
        self._height = height

    def __repr__(self) -> str:
        return f"Report({str(self.page.parent)!r})"

    def _repr_html_(self) -> str | None:
        return framed(self.page, self._height)
