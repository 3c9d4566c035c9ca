"""The stages of a model in a run: work, waits, queues and the quality of gradients."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from edgegossip.contract.protocol import Rank, Span
from edgegossip.report.figures import run_panels
from edgegossip.report.folder import ReportData, Run
from edgegossip.report.log import Activity, Noted, Spans, merged, total
from edgegossip.report.style import MUTED, WAITING, Picture, figure_style, picture, write_axis
from edgegossip.report.units import number, percent
from edgegossip.runs.describe import rank_spans

STAGE = "stage"
"""The kind of note that a stage makes periodically."""
COSINE = "gradient_cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage of a run; unknown or missing numbers are None.

    Attributes:
        run: Run of the stage.
        stage: Number of the stage, from 0.
        ranks: Ranks of the stage, in words.
        worked: Mean share of the steady state spent training.
        waited: Mean share of the steady state in which a rank was not training, crashed or
            finished.
        num_batches: Total batches that updated the stage.
        num_given_up: Total batches that got no answer in time.
        most_waiting: Maximum number of batches from below that waited at one rank.
        most_pending: Maximum number of one rank's batches that had no answer from above.
        cosine: Cosine between the synthetic and the true gradient: median over the second half
            of the notes.
    """

    run: Run
    stage: int
    ranks: str
    worked: float | None
    waited: float | None
    num_batches: float | None
    num_given_up: float | None
    most_waiting: float | None
    most_pending: float | None
    cosine: float | None


def stage_rows(folder: ReportData) -> list[StageRow]:
    """Make a row for each stage of each run."""
    return [_row(run, stage) for run in folder.runs for stage in run.log.stages]


def stage_sentence(run: Run) -> str:
    """Describe the busiest and the longest-waiting stage; empty unless at least two worked."""
    rows = [_row(run, stage) for stage in run.log.stages]
    known = [(row.worked, row.waited or 0.0, row.stage) for row in rows if row.worked]
    if len(known) < 2:
        return ""
    worked, _, busiest = max(known)
    _, waited, idlest = max(known, key=lambda each: each[1])
    return (
        f"Once all stages had begun, stage {busiest} worked the most, {percent(worked, 0)} of "
        f"the time, and stage {idlest} waited the longest, {percent(waited, 0)}."
    )


def stage_notes(run: Run, rank: Rank, *names: str) -> list[Noted]:
    """The notes of a stage that have all numbers in `names`."""
    notes = [note for note in run.log.notes if (note.kind, note.rank) == (STAGE, rank)]
    return [note for note in notes if {*names} <= {*note.numbers}]


def steady_state(run: Run) -> Span:
    """The span from the time when all stages have begun to train until the first one stops.

    If this span is empty, the whole run is returned.
    """
    begins, ends = [], []
    for ranks in run.log.stages.values():
        spans = [span for rank in ranks for span in run.log.workers[rank].training]
        begins.append(min((start for start, _ in spans), default=run.log.duration))
        ends.append(max((end for _, end in spans), default=0.0))
    begin, end = max(begins), min(ends)
    return (begin, end) if begin < end else (0.0, run.log.duration)


def _row(run: Run, stage: int) -> StageRow:
    ranks = run.log.stages[stage]
    is_first, is_last = stage == 0, stage == max(run.log.stages)
    workers = [run.workers[rank] for rank in ranks] if run.workers else []
    shares = _shares(workers, steady_state(run))
    cosines = [
        note.numbers[COSINE]
        for notes in (stage_notes(run, rank, COSINE) for rank in ranks)
        for note in notes[len(notes) // 2 :]
    ]
    return StageRow(
        run=run,
        stage=stage,
        ranks=rank_spans(ranks),
        worked=shares[0],
        waited=shares[1],
        num_batches=_sum(run, ranks, "batches"),
        num_given_up=None if is_last else _sum(run, ranks, "given_up"),
        most_waiting=None if is_first else _most(run, ranks, "most_waiting"),
        most_pending=None if is_last else _most(run, ranks, "most_pending"),
        cosine=statistics.median(cosines) if cosines else None,
    )


def _shares(workers: Sequence[Activity], span: Span) -> tuple[float | None, float | None]:
    """The mean shares of `span` spent working and waiting."""
    if not workers:
        return None, None
    begin, end = span
    worked = waited = 0.0
    for worker in workers:
        trained, busy, there = (
            total(np.clip(spans, begin, end))
            for spans in (
                worker.training,
                np.concatenate([worker.training, worker.crashed]),
                np.concatenate([worker.training, worker.crashed, worker.present]),
            )
        )
        worked += trained
        waited += there - busy
    whole = (end - begin) * len(workers)
    return worked / whole, waited / whole


def _most(run: Run, ranks: Iterable[Rank], name: str) -> float | None:
    notes = [note for rank in ranks for note in stage_notes(run, rank, name)]
    return max((note.numbers[name] for note in notes), default=None)


def _sum(run: Run, ranks: Iterable[Rank], name: str) -> float | None:
    """Add up the counts of each rank from before and after restarts."""
    counts = [[note.numbers[name] for note in stage_notes(run, rank, name)] for rank in ranks]
    if not any(counts):
        return None
    return sum(
        # A rank that has restarted counts from 0 again.
        after if after < before else after - before
        for found in counts
        for before, after in zip([0.0, *found], found, strict=False)
    )


def worked_shares(workers: Sequence[Activity], edges: Spans) -> Spans:
    """The mean share of time that `workers` spent training between consecutive `edges`.

    Args:
        workers: Workers, at least one.
        edges: Increasing times, [num_edges].

    Returns:
        Shares, [num_edges - 1].
    """
    covered = np.zeros(len(edges))
    for worker in workers:
        spans = merged(worker.training)
        if len(spans):
            lengths = spans[:, 1] - spans[:, 0]
            ends = np.cumsum(lengths)
            trained = np.column_stack([ends - lengths, ends])
            covered += np.interp(edges, spans.ravel(), trained.ravel())
    return np.asarray(np.diff(covered) / np.diff(edges) / len(workers))


NUM_POINTS = 240
"""Maximum number of points of a line; more would not be visible."""
NUM_MEANS = 30
"""Maximum number of points of a line through scattered values."""
PIECES_PER_BIN = 4
MAX_BINS = 40


def stage_pictures(folder: ReportData, colors: Mapping[str, str]) -> Iterator[Picture]:
    """Draw the work, queues and gradients of stages; nothing for runs of a whole model."""
    runs = [run for run in folder.runs if run.log.stages and run.workers]
    rows = [row for row in stage_rows(folder) if row.run in runs]
    if runs:
        yield _work(runs, rows, colors)
    if noted := [run for run in runs if _has(run, "waiting", "pending")]:
        yield _queues(noted, rows, colors)
    if measured := [run for run in runs if _has(run, COSINE)]:
        yield _gradients(measured, rows, colors)


def stage_colors(stages: Iterable[int]) -> dict[int, str]:
    """Give each stage one color in all figures, the darkest to the first stage.

    >>> stage_colors([0, 1])
    {0: '#440154', 1: '#6ece58'}
    """
    ordered = sorted({*stages})
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.78, len(ordered)))
    return {stage: to_hex(shade) for stage, shade in zip(ordered, shades, strict=True)}


def _has(run: Run, *names: str) -> bool:
    return any(stage_notes(run, rank, *names) for _, rank in _each_rank(run))


def _each_rank(run: Run) -> Iterator[tuple[int, Rank]]:
    """All pairs of a stage and a rank that holds it."""
    return ((stage, rank) for stage, ranks in run.log.stages.items() for rank in ranks)


Palette: TypeAlias = Mapping[int, str]
"""The color of each stage."""


def _panels(
    runs: Sequence[Run],
    colors: Mapping[str, str],
    draw: Callable[[Run, Sequence[Axes], Palette], None],
    titles: Sequence[str],
    shown: Iterable[int],
) -> Figure:
    """Draw axes for each run and title, with the stages in `shown` as the legend."""
    palette = stage_colors(stage for run in runs for stage in run.log.stages)
    legend = {f"stage {stage}": palette[stage] for stage in sorted({*shown})}
    return run_panels(
        runs, colors, lambda run, panel: draw(run, panel, palette), titles, legend
    )


def _alt(rows: Sequence[StageRow], runs: Sequence[Run], say: Callable[[StageRow], str]) -> str:
    """Collect the texts of `say` for each stage of the runs."""
    words = []
    for run in runs:
        own = [row for row in rows if row.run is run]
        texts = [f"stage {row.stage} {text}" for row in own if (text := say(row))]
        words.append(f"{run.name}: {', '.join(texts)}.")
    return " ".join(words)


# Work.


def _work(runs: Sequence[Run], rows: Sequence[StageRow], colors: Mapping[str, str]) -> Picture:
    heading = "Who worked, over time"
    with figure_style():
        return picture(
            _panels(runs, colors, _draw_work, [heading], [row.stage for row in rows]),
            name="stage-work",
            heading=heading,
            caption="Share of time in which each stage trained; otherwise it waited for a "
            "batch from below, or for an answer or space above. A stage at 100\u00a0% is never "
            "idle, and sets the pace. On gray, stages still fill or drain: the table excludes "
            "these times.",
            alt="Share of time in which each stage trained. "
            + _alt(rows, runs, lambda row: f"worked {percent(row.worked, 0)}"),
        )


def _draw_work(run: Run, panel: Sequence[Axes], palette: Palette) -> None:
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
        axes.stairs(shares, edges, baseline=None, color=palette[stage], linewidth=1.8)
    begin, end = steady_state(run)
    for start, stop in ((0.0, begin), (end, run.log.duration)):
        axes.axvspan(start, stop, color=WAITING, linewidth=0, zorder=0)
    axes.set_ylim(0, 1.04)
    write_axis(axes.yaxis, partial(percent, digits=0))
    axes.set_ylabel("time worked")


# Queues.


def _queues(
    runs: Sequence[Run], rows: Sequence[StageRow], colors: Mapping[str, str]
) -> Picture:
    titles = ["Come from below, waiting", "Sent up, not answered"]
    with figure_style():
        return picture(
            _panels(runs, colors, _draw_queues, titles, [row.stage for row in rows]),
            name="stage-queues",
            heading="What waited, over time",
            caption="Left: batches from below that wait for training; a slow stage has a long "
            "queue. Right: unanswered batches that a stage has sent up. Thick lines show the "
            "maximum over ten training steps, thin lines the length at their end. The first "
            "stage has no stage below it, and the last none above.",
            alt="Longest queues of each stage. " + _alt(rows, runs, _queue_words),
        )


def _queue_words(row: StageRow) -> str:
    below, above = row.most_waiting, row.most_pending
    words = [] if below is None else [f"{number(below)} waiting"]
    words += [] if above is None else [f"{number(above)} unanswered"]
    return " and ".join(words)


def _draw_queues(run: Run, panel: Sequence[Axes], palette: Palette) -> None:
    below, above = panel
    last = max(run.log.stages)
    for stage, rank in _each_rank(run):
        if stage > 0:
            _draw_queue(below, run, stage, rank, "waiting", palette[stage])
        if stage < last:
            _draw_queue(above, run, stage, rank, "pending", palette[stage])
    below.set_ylabel("batches from below")
    above.set_ylabel("batches unanswered")
    for axes in panel:
        # Even a queue that is always empty gets an axis of some height.
        axes.set_ylim(0, max(1.0, axes.dataLim.y1) * 1.08)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _draw_queue(axes: Axes, run: Run, stage: int, rank: Rank, name: str, color: str) -> None:
    if not (notes := stage_notes(run, rank, name, f"most_{name}")):
        return
    width = max(1.2, 3.0 - 0.7 * stage)  # equal queues stay visible
    times = _chunks([note.time for note in notes], NUM_POINTS, np.max)
    lengths = _chunks([note.numbers[name] for note in notes], NUM_POINTS, np.mean)
    [thin] = axes.plot(times, lengths, color=color, linewidth=0.7, alpha=0.7)
    most = [note.numbers[f"most_{name}"] for note in notes]
    longest = _chunks(most, NUM_POINTS, np.max)
    [thick] = axes.plot(times, longest, color=color, linewidth=width)
    for line in (thin, thick):
        line.set_drawstyle("steps-pre")


def _chunks(
    values: Sequence[float], most: int, joined: Callable[[NDArray[np.float64]], float]
) -> NDArray[np.float64]:
    """Cut `values` into at most `most` chunks of about equal length, and join each chunk."""
    chunks = np.array_split(np.array(values), min(most, len(values)))
    return np.array([joined(chunk) for chunk in chunks])


# Gradients.


def _gradients(
    runs: Sequence[Run], rows: Sequence[StageRow], colors: Mapping[str, str]
) -> Picture:
    heading = "Synthetic and true gradients"
    shown = [row.stage for row in rows if row.cosine is not None]
    with figure_style():
        return picture(
            _panels(runs, colors, _draw_gradients, [heading], shown),
            name="stage-gradients",
            heading=heading,
            caption="Cosine between the gradient that a stage predicts and the one that comes "
            "back for the same batch: 1 means the same direction; at 0 the prediction is "
            "useless. Dots are single batches, lines their moving means. The second-to-last "
            "stage gets the true gradient; gradients further down depend on the predictions of "
            "the stages above.",
            alt="Cosine of synthetic and true gradient, median of the second half. "
            + _alt(rows, runs, lambda row: "" if row.cosine is None else f"{row.cosine:.2f}"),
        )


def _draw_gradients(run: Run, panel: Sequence[Axes], palette: Palette) -> None:
    [axes] = panel
    axes.axhline(0, color=MUTED, linewidth=0.8)
    for stage, rank in _each_rank(run):
        notes = stage_notes(run, rank, COSINE)
        if not notes:
            continue
        times = [note.time for note in notes]
        cosines = [note.numbers[COSINE] for note in notes]
        x, y = (_chunks(each, NUM_POINTS, np.mean) for each in (times, cosines))
        axes.scatter(x, y, s=9, color=palette[stage], alpha=0.35, linewidths=0)
        x, y = (_chunks(each, NUM_MEANS, np.mean) for each in (times, cosines))
        axes.plot(x, y, color=palette[stage], linewidth=1.6)
    low = min(0.0, axes.dataLim.y0)
    axes.set_ylim(1.08 * low if low < 0 else -0.03, 1.03)
    axes.set_ylabel("cosine")
