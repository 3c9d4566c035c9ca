"""Timelines of workers: training, sending, waiting, crashed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.report.folder import ReportData, Run
from edgegossip.report.log import Activity, Spans, clipped, described, mean_waiting
from edgegossip.report.style import (
    INK,
    SENDING,
    WAITING,
    Picture,
    figure_style,
    new_figure,
    picture,
    write_axis,
)
from edgegossip.report.units import capitalized, listing, number, percent, seconds

# A bar narrower than 1/150 of the timeline (about 4 pixels on the page) is not seen.
LEGIBLE_BARS = 150
MAX_WORKERS = 40

KINDS = {
    "training": "training",
    "sending": "sending",
    "waiting": "waiting",
    "unfinished": "waiting or cut off",
    "crashed": "crashed",
}


def timeline_pictures(folder: ReportData, colors: dict[str, str]) -> Iterator[Picture]:
    """Draw a timeline of each run in which virtual time has passed."""
    for run in folder.runs:
        if run.workers:
            name = f"timeline-{run.name}" if folder.is_comparison else "timeline"
            yield _picture(name, run, colors[run.name])


def legible_window(workers: Sequence[Activity], duration: Seconds) -> Seconds:
    """The duration, from the run's start, that can be drawn with visible bars.

    It spans at most `LEGIBLE_BARS` typical bars of the worker with the shortest bars.
    """
    typical = [
        float(np.median(worker.training[:, 1] - worker.training[:, 0]))
        for worker in workers
        if len(worker.training)
    ]
    return min([duration, LEGIBLE_BARS * min(typical, default=duration)])


def _picture(name: str, run: Run, color: str) -> Picture:
    ranks = _shown_ranks(run)
    shown = [run.workers[rank] for rank in ranks]
    window = legible_window(shown, run.log.duration)
    styles = _styles(color)
    with figure_style():
        figure = new_figure(9.6, 1.55 + 0.46 * len(ranks))
        left, right = figure.subplots(
            1, 2, sharey=True, width_ratios=[4.4, 1], gridspec_kw={"wspace": 0.06}
        )
        _draw_spans(left, shown, window, styles)
        _draw_shares(right, shown, styles)
        _dress(left, right, run, ranks, window)
        kinds = [kind for kind in KINDS if any(worker.shares[kind] > 0 for worker in shown)]
        figure.legend(
            handles=[Patch(label=KINDS[kind], **styles[kind]) for kind in kinds],
            loc="outside lower center",
            ncols=len(kinds),
            frameon=False,
        )
        words = [f"{run.log.name(r)}: {described(run.workers[r].shares)}" for r in ranks]
        return picture(
            figure,
            name=name,
            heading=run.name,
            caption=_caption(run, ranks, window),
            alt=f"Timeline of each worker in {run.name}. Share of the run: {'; '.join(words)}.",
        )


def _styles(color: str) -> dict[str, dict[str, Any]]:
    edge = {"edgecolor": "white", "linewidth": 0.4}
    return {
        "training": {"facecolor": color, **edge},
        # The edge keeps messages visible that take less than a pixel.
        "sending": {"facecolor": SENDING, "edgecolor": SENDING, "linewidth": 0.8},
        "waiting": {"facecolor": WAITING, "linewidth": 0},
        "unfinished": {"facecolor": WAITING, "hatch": "////", "linewidth": 0},
        "crashed": {"facecolor": "white", "edgecolor": INK, "hatch": "xxxx", "linewidth": 0.8},
    }


def _shown_ranks(run: Run) -> list[Rank]:
    """All ranks; if there are too many, `MAX_WORKERS` from the fastest to the slowest."""
    ranks = range(len(run.log.workers))
    if len(ranks) <= MAX_WORKERS:
        return list(ranks)
    by_speed = sorted(ranks, key=lambda rank: run.throughputs[rank], reverse=True)
    picks = np.linspace(0, len(ranks) - 1, MAX_WORKERS).round().astype(int)
    return [by_speed[pick] for pick in picks]


def _draw_spans(
    axes: Axes, workers: Sequence[Activity], window: Seconds, styles: dict[str, Any]
) -> None:
    """Draw one shape for each kind of span; an artist per event would take minutes."""
    upper, lower, whole = (-0.38, 0.16), (0.21, 0.38), (-0.38, 0.38)
    layers: list[tuple[str, tuple[float, float], Callable[[Activity], Spans]]] = [
        ("waiting", upper, lambda worker: worker.present),
        ("unfinished", upper, lambda worker: worker.unfinished),
        ("training", upper, lambda worker: worker.training),
        ("sending", lower, lambda worker: worker.sending),
        ("crashed", whole, lambda worker: worker.crashed),
    ]
    for kind, (top, bottom), spans_of in layers:
        boxes = [
            [[start, row + top], [start, row + bottom], [end, row + bottom], [end, row + top]]
            for row, worker in enumerate(workers)
            for start, end in clipped(spans_of(worker), window)
        ]
        if boxes:
            shape = Path.make_compound_path_from_polys(np.array(boxes))
            axes.add_patch(PathPatch(shape, **styles[kind]))


def _draw_shares(axes: Axes, workers: Sequence[Activity], styles: dict[str, Any]) -> None:
    rows = np.arange(len(workers))
    left = np.zeros(len(workers))
    for kind in KINDS:
        shares = np.array([worker.shares[kind] for worker in workers])
        # An outline would be drawn even around nothing.
        some = shares > 0
        axes.barh(rows[some], shares[some], left=left[some], height=0.62, **styles[kind])
        left += shares
    for row, worker in enumerate(workers):
        axes.annotate(
            percent(worker.shares["training"], digits=0),
            (1, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            annotation_clip=False,
        )


def _dress(left: Axes, right: Axes, run: Run, ranks: list[Rank], window: Seconds) -> None:
    duration = run.log.duration
    part = "The whole run" if window >= duration else f"The first {seconds(window)}"
    left.set_title(f"{part} of {run.name}")
    right.set_title("Time training", fontsize=10)
    left.set_xlim(0, window)
    left.set_ylim(len(ranks) - 0.5, -0.5)
    left.set_xlabel("time (s)")
    write_axis(left.xaxis, number)
    left.set_yticks(range(len(ranks)), [_worker_label(run, rank) for rank in ranks])
    left.tick_params(axis="y", labelcolor=INK)
    right.tick_params(axis="y", labelleft=False)
    right.set_xlim(0, 1)
    right.set_xticks([0, 0.5, 1], ["0", percent(0.5), percent(1)])
    right.set_xlabel("of the whole run")
    for axes in (left, right):
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)


def _worker_label(run: Run, rank: Rank) -> str:
    platform = run.log.header["platforms"][rank]
    has_roles = len(set(run.log.roles)) > 1
    name = run.log.name(rank) if has_roles else f"{rank}  {platform['name']}"
    if rank not in run.speeds:
        return f"{name}\nno data"
    load = ", loaded" if platform.get("trace") is not None else ""
    return f"{name}\n{number(run.throughputs[rank])} samples/s{load}"


def _caption(run: Run, ranks: list[Rank], window: Seconds) -> str:
    speeds = run.speeds
    fastest, slowest = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    parts = [
        f"{capitalized(run.log.name(rank))} ({number(speeds[rank])} samples/s): "
        f"{described(run.workers[rank].shares)}."
        for rank in dict.fromkeys([fastest, slowest])
    ]
    if kept := kept_sentence(run):
        parts.append(kept)
    if any(run.workers[rank].shares["unfinished"] > 0 for rank in ranks):
        parts.append(
            "Hatched: work cut off by a crash or the end is not in the log, so the worker may "
            "have trained or waited."
        )
    if window < run.log.duration:
        parts.append(
            f"The timeline stops after {seconds(window)} of {seconds(run.log.duration)}, "
            "so that single bars are visible; the shares cover the whole run."
        )
    if len(ranks) < len(run.workers):
        parts.append(
            f"{len(ranks)} of the {len(run.workers)} workers are shown, fastest on top, "
            "slowest at the bottom."
        )
    return " ".join(parts)


# Balancing.


MAX_NAMED = 8
"""Maximum number of workers that are named individually."""


def kept_shares(run: Run) -> list[float] | None:
    """Mean share of its data that each worker trained on in a round.

    None if the run was not balanced, or if a worker has not finished a round.
    """
    if not run.log.is_balanced:
        return None
    sizes = run.log.header.get("shard_sizes")
    if not sizes or not all(worker.num_rounds for worker in run.log.workers):
        return None
    return [
        worker.round_samples / (worker.num_rounds * size) if size else 0.0
        for worker, size in zip(run.log.workers, sizes, strict=True)
    ]


def kept_sentence(run: Run) -> str:
    """Describe the `kept_shares`; empty if there are none."""
    shares = kept_shares(run)
    # A round of many steps may visit the data more than once: nothing is left out.
    if shares is None or max(shares) > 1:
        return ""
    if len(shares) > MAX_NAMED:
        kept = f"its workers kept from {percent(min(shares), 0)} to {percent(max(shares), 0)}"
    else:
        last = len(shares) - 1
        kept = f"workers 0 to {last} kept {listing([percent(share, 0) for share in shares])}"
    return f"On average {kept} of their data in a round."


def balance(folder: ReportData) -> str:
    """Describe the waits without and with balancing; empty if no run was balanced."""
    balanced = [run for run in folder.runs if run.workers and kept_shares(run) is not None]
    if not balanced:
        return ""
    return " ".join([_baseline_wait(folder), *map(_balanced_wait, balanced)]).strip()


def _baseline_wait(folder: ReportData) -> str:
    """Describe the waits in the baseline."""
    run = next((run for run in folder.runs if run.name == folder.baseline), None)
    if run is None or not run.workers or kept_shares(run) is not None:
        return ""
    speeds = run.speeds
    fastest, slowest = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    waiting = mean_waiting([run.workers[fastest]])
    if waiting is None or speeds[fastest] == speeds[slowest]:
        return ""
    return (
        f"In {run.name}, worker {fastest} ({number(speeds[fastest])} samples/s) spent "
        f"{percent(waiting, 0)} of its time waiting for worker {slowest}, the slowest "
        f"({number(speeds[slowest])} samples/s)."
    )


def _balanced_wait(run: Run) -> str:
    text = (
        f"In {run.name} every worker trains on only as much of its data as it has time for, so "
        f"all finish together. {kept_sentence(run)}"
    )
    each = [mean_waiting([worker]) for worker in run.workers]
    waiting = [share for share in each if share is not None]
    if len(waiting) < len(each):
        return text
    longest = waiting.index(max(waiting))
    return (
        f"{text} The longest wait was that of worker {longest}, "
        f"{percent(waiting[longest], 0)} of its time."
    )
