"""Stages over time: how much each worked, what queued before it, how good its gradients are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from edgegossip.core.protocol import Rank
from edgegossip.report.folder import ReportData, Run
from edgegossip.report.log import Noted
from edgegossip.report.stages import (
    COSINE,
    StageRow,
    stage_notes,
    stage_rows,
    steady_state,
    worked_shares,
)
from edgegossip.report.style import MUTED, WAITING, Picture, figure_style, new_figure, render
from edgegossip.report.units import number, percent

NUM_POINTS = 240
"""Points of a line: more would not be seen."""
NUM_MEANS = 30
"""Points of a line through what scatters."""
PIECES_PER_BIN = 4
MAX_BINS = 40


def stage_pictures(folder: ReportData, colors: Mapping[str, str]) -> Iterator[Picture]:
    """Draw work, queues and gradients of stages; nothing for runs of a whole model."""
    runs = [run for run in folder.runs if run.log.stages and run.workers]
    rows = [row for row in stage_rows(folder) if row.run in runs]
    if runs:
        yield _work(runs, rows, colors)
    if noted := [run for run in runs if _has(run, "waiting", "pending")]:
        yield _queues(noted, rows, colors)
    if measured := [run for run in runs if _has(run, COSINE)]:
        yield _gradients(measured, rows, colors)


def stage_color(stage: int, num_stages: int) -> str:
    """One colour for each stage, dark for the first."""
    shades = mpl.colormaps["viridis"]
    return mpl.colors.to_hex(shades(0.88 * stage / max(1, num_stages - 1)))


def _has(run: Run, *names: str) -> bool:
    ranks = (rank for ranks in run.log.stages.values() for rank in ranks)
    return any(stage_notes(run, rank, *names) for rank in ranks)


def _each_rank(run: Run) -> Iterator[tuple[int, Rank, str]]:
    """Each stage, a rank that holds it, and the colour of the stage."""
    stages = run.log.stages
    for stage, ranks in stages.items():
        for rank in ranks:
            yield stage, rank, stage_color(stage, len(stages))


# Panels.


def _panels(
    runs: Sequence[Run],
    colors: Mapping[str, str],
    num_columns: int,
    draw: Callable[[Run, Sequence[Axes]], None],
    axes_per_run: int = 1,
) -> tuple[bytes, bytes]:
    """Draw some axes for each run, side by side; give PNG and SVG."""
    num_rows = -(-len(runs) * axes_per_run // num_columns)
    with figure_style():
        figure = new_figure(9.6, 0.7 + (3.4 if len(runs) == 1 else 2.3 * num_rows))
        grid = [*figure.subplots(num_rows, num_columns, squeeze=False).flat]
        for index, run in enumerate(runs):
            own = grid[index * axes_per_run : (index + 1) * axes_per_run]
            for axes in own:
                axes.set_title(run.name, color=colors[run.name], fontsize=11, pad=8)
                _dress(axes, run)
            draw(run, own)
        used = len(runs) * axes_per_run
        for axes in grid[used:]:
            axes.set_axis_off()
        for axes in grid[max(0, used - num_columns) : used]:
            axes.set_xlabel("time (s)")
        num_stages = max(len(run.log.stages) for run in runs)
        handles = [
            Line2D([], [], color=stage_color(stage, num_stages), label=f"stage {stage}")
            for stage in range(num_stages)
        ]
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=min(num_stages, 8),
            frameon=False,
        )
        return render(figure, "png"), render(figure, "svg")


def _dress(axes: Axes, run: Run) -> None:
    axes.set_xlim(0, run.log.duration)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def _columns(runs: Sequence[Run]) -> int:
    return min(3 if len(runs) > 4 else 2, len(runs))


def _alt(rows: Sequence[StageRow], runs: Sequence[Run], say: Callable[[StageRow], str]) -> str:
    """What `say` says of each stage of the runs, where it says anything."""
    words = []
    for run in runs:
        said = [
            f"stage {row.stage} {text}" for row in rows if row.run is run and (text := say(row))
        ]
        words.append(f"{run.name}: {', '.join(said)}.")
    return " ".join(words)


# Work.


def _work(runs: Sequence[Run], rows: Sequence[StageRow], colors: Mapping[str, str]) -> Picture:
    num_columns = _columns(runs)
    png, svg = _panels(runs, colors, num_columns, _draw_work)
    return Picture(
        name="stage-work",
        heading="Who worked, over time",
        caption="Share of time in which each stage trained; the rest it waited for a batch from "
        "below, or for an answer or room above. At 100 % a stage is never idle, and sets the "
        "pace. On grey, stages still fill, or run empty: table and words leave that out.",
        alt="Share of time in which each stage trained. "
        + _alt(rows, runs, lambda row: f"worked {percent(row.worked, 0)}"),
        png=png,
        svg=svg,
    )


def _draw_work(run: Run, panel: Sequence[Axes]) -> None:
    [axes] = panel
    stages = run.log.stages
    num_pieces = [
        sum(len(run.log.workers[rank].training) for rank in ranks) / len(ranks)
        for ranks in stages.values()
    ]
    num_bins = int(np.clip(min(num_pieces) / PIECES_PER_BIN, 1, MAX_BINS))
    edges = np.linspace(0, run.log.duration, num_bins + 1)
    for stage, ranks in stages.items():
        shares = worked_shares([run.workers[rank] for rank in ranks], edges)
        color = stage_color(stage, len(stages))
        axes.stairs(shares, edges, baseline=None, color=color, linewidth=1.8)
    begin, end = steady_state(run)
    for start, stop in ((0.0, begin), (end, run.log.duration)):
        axes.axvspan(start, stop, color=WAITING, linewidth=0, zorder=0)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value, 0)))
    axes.set_ylabel("time worked")


# Queues.


def _queues(
    runs: Sequence[Run], rows: Sequence[StageRow], colors: Mapping[str, str]
) -> Picture:
    png, svg = _panels(runs, colors, 2, _draw_queues, axes_per_run=2)
    return Picture(
        name="stage-queues",
        heading="What waited, over time",
        caption="Left, batches that have come from below and wait to be trained on: a long "
        "queue is one before a slow stage. Right, batches that a stage has sent up and that are "
        "not answered. Lines are lengths when they were noted, every tenth training; the band "
        "reaches to the longest since the note before. The first stage has nobody below it, the "
        "last nobody above.",
        alt="Longest queues of each stage. " + _alt(rows, runs, _said_of_queues),
        png=png,
        svg=svg,
    )


def _said_of_queues(row: StageRow) -> str:
    below, above = row.most_waiting, row.most_pending
    words = [] if below is None else [f"{number(below)} waiting"]
    words += [] if above is None else [f"{number(above)} unanswered"]
    return " and ".join(words)


def _draw_queues(run: Run, panel: Sequence[Axes]) -> None:
    below, above = panel
    last = max(run.log.stages)
    for stage, rank, color in _each_rank(run):
        if stage > 0:
            _draw_queue(below, stage_notes(run, rank, "waiting"), "waiting", color)
        if stage < last:
            _draw_queue(above, stage_notes(run, rank, "pending"), "pending", color)
    below.set_ylabel("batches from below")
    above.set_ylabel("batches unanswered")
    for axes in panel:
        # A queue that is empty all the time has an axis with room.
        axes.set_ylim(0, max(1.0, axes.dataLim.y1) * 1.08)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _draw_queue(axes: Axes, notes: Sequence[Noted], name: str, color: str) -> None:
    if not notes:
        return
    times = _chunks([note.time for note in notes], NUM_POINTS, np.max)
    lengths = _chunks([note.numbers[name] for note in notes], NUM_POINTS, np.mean)
    axes.plot(times, lengths, color=color, linewidth=1.3, drawstyle="steps-pre")
    most = [note.numbers.get(f"most_{name}", note.numbers[name]) for note in notes]
    longest = _chunks(most, NUM_POINTS, np.max)
    axes.fill_between(times, lengths, longest, step="pre", color=color, alpha=0.18, linewidth=0)


def _chunks(
    values: Sequence[float], most: int, joined: Callable[[NDArray[np.float64]], float]
) -> NDArray[np.float64]:
    """Make one number of each of at most `most` chunks of about equal length."""
    chunks = np.array_split(np.array(values), min(most, len(values)))
    return np.array([joined(chunk) for chunk in chunks])


# Gradients.


def _gradients(
    runs: Sequence[Run], rows: Sequence[StageRow], colors: Mapping[str, str]
) -> Picture:
    png, svg = _panels(runs, colors, _columns(runs), _draw_gradients)
    return Picture(
        name="stage-gradients",
        heading="Synthetic and true gradients",
        caption="Cosine of the gradient that a stage predicts and the one that comes back for "
        "the same batch: at 1 they point the same way, at 0 the prediction says nothing. Dots "
        "are single batches, lines their means over some time. To the last stage but one the "
        "true gradient comes back; further down, it rests on the predictions of the stages "
        "above.",
        alt="Cosine of synthetic and true gradient, median of the second half. "
        + _alt(rows, runs, lambda row: "" if row.cosine is None else f"{row.cosine:.2f}"),
        png=png,
        svg=svg,
    )


def _draw_gradients(run: Run, panel: Sequence[Axes]) -> None:
    [axes] = panel
    axes.axhline(0, color=MUTED, linewidth=0.8)
    for _, rank, color in _each_rank(run):
        notes = stage_notes(run, rank, COSINE)
        if not notes:
            continue
        times = [note.time for note in notes]
        cosines = [note.numbers[COSINE] for note in notes]
        dots = (_chunks(each, NUM_POINTS, np.mean) for each in (times, cosines))
        axes.plot(*dots, "o", color=color, markersize=3, alpha=0.35, markeredgewidth=0)
        means = (_chunks(each, NUM_MEANS, np.mean) for each in (times, cosines))
        axes.plot(*means, color=color, linewidth=1.6)
    low = min(0.0, axes.dataLim.y0)
    axes.set_ylim(1.08 * low if low < 0 else -0.03, 1.03)
    axes.set_ylabel("cosine")
