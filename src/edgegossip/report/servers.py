"""Workers' commits to a server, and the search for the commit rate."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.report.figures import LOG_RATIO, run_panels, spread_out, write_name
from edgegossip.report.folder import ReportData, Run
from edgegossip.report.log import SERVER, Noted
from edgegossip.report.style import (
    BASELINE_COLOR,
    INK,
    MUTED,
    SENDING,
    WAITING,
    Picture,
    figure_style,
    new_figure,
    picture,
    write_axis,
)
from edgegossip.report.units import listing, number, seconds
from edgegossip.runs.describe import rank_spans
from edgegossip.runs.files import is_number

SEARCH = "search"
"""The kind of note that a server makes at the end of each window of its search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRow:
    """A row in the table of runs with a server.

    Attributes:
        run: Run of the row.
        servers: Ranks of the servers, in words; empty if no rank has a server's role.
        total: Commits of all workers.
        least: Commits of the worker with the fewest commits.
        most: Commits of the worker with the most commits.
        seconds: Mean seconds between two commits of a worker; None without commits.
        num_steps: Mean steps between two commits of a worker; None without commits.
        explicit_momentum: Momentum of the workers' optimizer; None if unknown.
        implicit_momentum: Median implicit momentum over the windows of a search; None without
            notes.
    """

    run: Run
    servers: str
    total: int
    least: int
    most: int
    seconds: Seconds | None
    num_steps: float | None
    explicit_momentum: float | None
    implicit_momentum: float | None


def commit_rows(folder: ReportData) -> list[CommitRow]:
    """Count the commits of each run with a server."""
    return [_row(run) for run in folder.runs if has_commits(run)]


def has_commits(run: Run) -> bool:
    """Whether any worker has committed to a server."""
    return any(worker.commits for worker in run.log.workers)


def servers(run: Run) -> list[Rank]:
    """The ranks of the servers; if there are several, they share the model."""
    return [rank for rank, role in enumerate(run.log.roles) if role == SERVER]


def server_words(runs: Sequence[Run]) -> str:
    """Name the servers of `runs`."""
    return "the servers" if any(len(servers(run)) > 1 for run in runs) else "the server"


def _row(run: Run) -> CommitRow:
    workers = [run.log.workers[rank] for rank in run.log.trainers]
    counts = _counts(run)
    total = sum(counts)
    implicit = [
        note.numbers["implicit_momentum"]
        for note in windows(run)
        if "implicit_momentum" in note.numbers
    ]
    return CommitRow(
        run=run,
        servers=rank_spans(servers(run)),
        total=total,
        least=min(counts),
        most=max(counts),
        seconds=run.log.duration * len(workers) / total if total else None,
        num_steps=sum(worker.num_steps for worker in workers) / total if total else None,
        explicit_momentum=explicit_momentum(run),
        implicit_momentum=statistics.median(implicit) if implicit else None,
    )


def explicit_momentum(run: Run) -> float | None:
    """The momentum of the workers' optimizer; None if its settings have none."""
    optimizer = run.log.header.get("task", {}).get("optimizer")
    value = optimizer.get("momentum") if isinstance(optimizer, Mapping) else None
    return value if is_number(value) else None


def windows(run: Run) -> list[Noted]:
    """The search notes of a run that have both a window number and a rate."""
    notes = [note for note in run.log.notes if note.kind == SEARCH]
    return [note for note in notes if {"window", "rate"} <= {*note.numbers}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search for the commit rate, up to the beginning of the next search.

    Attributes:
        rewards: The rates that were tried and their rewards, in order.
        chosen: The final rate; None for an unfinished search.
    """

    rewards: Sequence[tuple[float, float]]
    chosen: float | None


def searches(notes: Sequence[Noted]) -> list[Search]:
    """Separate the searches in `windows`: each search begins with window 1."""
    begins = [i for i, note in enumerate(notes) if i == 0 or note.numbers["window"] == 1]
    found = []
    for begin, end in itertools.pairwise([*begins, len(notes)]):
        numbers = [note.numbers for note in notes[begin:end]]
        rewards = [(each["rate"], each["reward"]) for each in numbers if "reward" in each]
        # A window without a reward comes after the search: its rate is the one found.
        chosen = None if "reward" in numbers[-1] else numbers[-1]["rate"]
        found.append(Search(rewards=rewards, chosen=chosen))
    return found


def search_sentences(folder: ReportData) -> list[str]:
    """Describe the rates that each run with a search tried, and the final rate."""
    return [_sentence(run) for run in folder.runs if windows(run)]


def _sentence(run: Run) -> str:
    notes = windows(run)
    found = searches(notes)
    tried = sorted({rate for each in found for rate, _ in each.rewards})
    kept = [number(each.chosen) for each in found if each.chosen is not None]
    rates = number(tried[0]) if tried else ""
    if len(tried) > 1:
        rates += f" to {number(tried[-1])}"
    outcome = f"kept {listing(list(dict.fromkeys(kept)))}" if kept else "did not finish"
    who = server_words([run])
    text = f"In {run.name} {who} tried {rates} commits per window and {outcome}."
    momentum, explicit = _row(run).implicit_momentum, explicit_momentum(run)
    if momentum is None:
        return text
    beside = "" if explicit is None else f", plus an explicit one of {number(explicit)}"
    return f"{text} The implicit momentum was {number(momentum)} in the median window{beside}."


NUM_POINTS = 240
"""Maximum number of points of a line; more would not be visible."""
COMMITS_PER_BIN = 4
MAX_BINS = 40
SPEEDS = LinearSegmentedColormap.from_list("speeds", ["#8cc8e6", "#0072b2", "#06263d"])
"""Colors from the slowest to the fastest worker."""


def commit_pictures(folder: ReportData, colors: Mapping[str, str]) -> Iterator[Picture]:
    """Draw the commits of each worker and each search; nothing for runs without a server."""
    runs = [run for run in folder.runs if has_commits(run) and run.log.duration > 0]
    if runs:
        yield _commits(runs, colors)
        yield _rates(runs, colors)
    for run in runs:
        if notes := windows(run):
            name = f"search-{run.name}" if folder.is_comparison else "search"
            yield _draw_search(name, run, notes, colors[run.name])


# Commits.


def _commits(runs: Sequence[Run], colors: Mapping[str, str]) -> Picture:
    heading = "Commits of each worker"
    counts = [f"{run.name}: {_span(run)}" for run in runs]
    speeds = {"slowest worker": 0.0, "median": 0.5, "fastest worker": 1.0}
    legend = {name: SPEEDS(share) for name, share in speeds.items()}
    with figure_style():
        return picture(
            run_panels(runs, colors, _draw_commits, [heading], legend),
            name="commits",
            heading=heading,
            caption="A line for each worker, the darker the faster. Where lines overlap, "
            "workers commit equally often, regardless of their speed."
            + (" Panels have separate scales." if len(runs) > 1 else ""),
            alt=f"Commits of the workers to {server_words(runs)} by the end. "
            f"{'; '.join(counts)}.",
        )


def _counts(run: Run) -> list[int]:
    return [len(run.log.workers[rank].commits) for rank in run.log.trainers]


def _span(run: Run) -> str:
    counts = _counts(run)
    low, high = min(counts), max(counts)
    return f"{number(low)} to {number(high)}" if low < high else f"{number(low)} each"


def _draw_commits(run: Run, panel: Sequence[Axes]) -> None:
    [axes] = panel
    times = np.linspace(0, run.log.duration, NUM_POINTS)
    by_speed = sorted(run.log.trainers, key=run.throughputs.__getitem__)
    for place, rank in enumerate(by_speed):
        made = np.searchsorted(run.log.workers[rank].commits, times, side="right")
        shade = SPEEDS(place / max(1, len(by_speed) - 1))
        axes.plot(times, made, color=shade, linewidth=1.2, drawstyle="steps-post")
    words = _span(run)
    axes.text(0.04, 0.96, words, transform=axes.transAxes, va="top", color=MUTED, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    write_axis(axes.yaxis, number)
    if (place_in_grid := axes.get_subplotspec()) and place_in_grid.is_first_col():
        axes.set_ylabel("commits of a worker")


# Rates.


def _rates(runs: Sequence[Run], colors: Mapping[str, str]) -> Picture:
    curves = {run.name: _rate(run) for run in runs}
    words = [f"{run.name}: {number(_mean_rate(run))} on average" for run in runs]
    caption = "Mean over the workers; each step spans several commits."
    with figure_style():
        figure = new_figure(9.0, 4.2)
        axes = figure.add_subplot()
        axes.set_title("Commit rate over time")
        axes.set_xlabel("time (s)")
        axes.set_ylabel("commits per second and worker")
        for run in runs:
            axes.stairs(*curves[run.name], baseline=None, color=colors[run.name], linewidth=2)
        known = np.concatenate([rates[rates > 0] for rates, _ in curves.values()])
        if known.max() >= LOG_RATIO * known.min():
            axes.set_yscale("log")
            axes.set_ylim(known.min() / 1.4, known.max() * 1.4)
            caption += " The axis is logarithmic."
        else:
            axes.set_ylim(0, 1.1 * known.max())
        write_axis(axes.xaxis, number)
        write_axis(axes.yaxis, number)
        axes.set_xlim(0, max(run.log.duration for run in runs))
        _name_rates(axes, runs, curves, colors)
        return picture(
            figure,
            name="commit-rate",
            heading="Commit rate over time",
            caption=caption,
            alt=f"Commits per second and worker over time. {'; '.join(words)}.",
        )


Curve: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Heights of steps and their edges."""


def _rate(run: Run) -> Curve:
    """Commits per second and worker, in steps that have several commits each."""
    workers = [run.log.workers[rank] for rank in run.log.trainers]
    times = np.concatenate([worker.commits for worker in workers])
    num_bins = int(np.clip(len(times) / len(workers) / COMMITS_PER_BIN, 1, MAX_BINS))
    counts, edges = np.histogram(times, num_bins, (0, run.log.duration))
    return counts / len(workers) / np.diff(edges), edges


def _mean_rate(run: Run) -> float:
    counts = _counts(run)
    return sum(counts) / len(counts) / run.log.duration


def _name_rates(
    axes: Axes, runs: Sequence[Run], curves: Mapping[str, Curve], colors: Mapping[str, str]
) -> None:
    """Label each curve next to the axes, near the height at which it ends."""
    to_axes = axes.transData + axes.transAxes.inverted()
    low = axes.get_ylim()[0]
    ends = [max(low, float(curves[run.name][0][-1])) for run in runs]
    heights = [float(to_axes.transform((0, end))[1]) for end in ends]
    for run, height, free in zip(runs, heights, spread_out(heights, 0.14), strict=True):
        gap = seconds(1 / _mean_rate(run))
        write_name(axes, run.name, f"one in {gap}", height, free, colors[run.name])


# The search.


def _draw_search(name: str, run: Run, notes: Sequence[Noted], color: str) -> Picture:
    found = searches(notes)
    kept = [number(each.chosen) for each in found if each.chosen is not None]
    outcome = f"It kept {listing(kept)}." if kept else "It has kept none yet."
    tried = [
        f"{number(rate)}: {number(reward)}" for each in found for rate, reward in each.rewards
    ]
    with figure_style():
        figure = new_figure(9.6, 6.6)
        (rewards, rates), (losses, momenta) = figure.subplots(2, 2)
        _draw_rewards(rewards, found, color)
        _draw_rates(rates, run, notes, color)
        _draw_losses(losses, notes, color)
        _draw_momenta(momenta, run, notes, color)
        for axes in (rates, losses, momenta):
            axes.set_xlabel("time (s)")
            axes.set_xlim(0, run.log.duration)
        return picture(
            figure,
            name=name,
            heading=f"The search of {run.name}",
            caption=_search_caption(found),
            alt=f"Search for the commit rate in {run.name}. Reward of each rate tried: "
            f"{'; '.join(tried)}. {outcome}",
        )


def _search_caption(found: Sequence[Search]) -> str:
    parts = [
        "A rate is tried for one window; the reward measures how fast the validation loss fell "
        "in it. The search continues upward while rewards rise; a ring marks the final rate."
    ]
    if len(found) > 1:
        parts.append("A later search is darker than those before.")
    if _are_relative(found):
        parts.append("Rewards are given as shares of the best of each search.")
    parts.append(
        "Implicit momentum is the momentum that asynchrony adds, by Theorem 1 of ADSP with the "
        "commits and steps of the window; explicit momentum is the optimizer\u2019s."
    )
    return " ".join(parts)


def _are_relative(found: Sequence[Search]) -> bool:
    """Whether the rewards of one search would flatten the curve of another."""
    bests = [max(reward for _, reward in each.rewards) for each in found if each.rewards]
    return len(bests) > 1 and min(bests) > 0 and max(bests) >= LOG_RATIO * min(bests)


def _draw_rewards(axes: Axes, found: Sequence[Search], color: str) -> None:
    is_relative = _are_relative(found)
    axes.set_title("Reward of each rate tried", fontsize=11)
    axes.set_xlabel("commits of each worker in the window")
    axes.set_ylabel("reward, relative to the best" if is_relative else "reward")
    axes.axhline(0, color=MUTED, linewidth=0.8)
    for index, each in enumerate(found):
        if not each.rewards:
            continue
        age = 0.3 + 0.7 * (index + 1) / len(found)
        unit = max(reward for _, reward in each.rewards) if is_relative else 1.0
        points = [(rate, reward / unit) for rate, reward in each.rewards]
        axes.plot(*zip(*points, strict=True), "o-", color=color, alpha=age, markersize=5)
        kept = [point for point in points if point[0] == each.chosen]
        if kept:
            axes.plot(*kept[-1], "o", mfc="none", mec=INK, mew=1.8, markersize=12, alpha=age)
    axes.margins(x=0.12, y=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    write_axis(axes.yaxis, number)


def _draw_rates(axes: Axes, run: Run, notes: Sequence[Noted], color: str) -> None:
    """Draw the requested and the achieved rate of each window."""
    axes.set_title("Commits in each window", fontsize=11)
    axes.set_ylabel("commits of each worker")
    ends = [note.time for note in notes]
    edges = [max(0.0, 2 * ends[0] - ends[1]) if len(ends) > 1 else 0.0, *ends]
    for start, note in zip(edges, notes, strict=False):
        if "reward" in note.numbers:
            axes.axvspan(start, note.time, color=WAITING, linewidth=0, zorder=0)
    wanted = [note.numbers["rate"] for note in notes]
    axes.stairs(wanted, edges, baseline=None, color=color, linewidth=2, label="wanted")
    made = [note.numbers.get("num_commits", math.nan) / len(run.log.trainers) for note in notes]
    middles = [(start + end) / 2 for start, end in zip(edges, ends, strict=False)]
    axes.plot(middles, made, "o", color=SENDING, markersize=4, label="made, on average")
    axes.set_ylim(0, 1.35 * max(*wanted, *(each for each in made if each == each), 1))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.plot([], [], "s", color=WAITING, markersize=9, label="searching")
    axes.legend(loc="upper left", ncols=3, frameon=False, fontsize=8.5, columnspacing=1)


def _draw_losses(axes: Axes, notes: Sequence[Noted], color: str) -> None:
    axes.set_title("Loss on validation data", fontsize=11)
    axes.set_ylabel("loss at the end of a window")
    points = [(n.time, n.numbers["loss"]) for n in notes if n.numbers.get("loss", 0) > 0]
    if not points:
        return
    axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=4)
    losses = [loss for _, loss in points]
    if max(losses) >= LOG_RATIO * min(losses):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    write_axis(axes.yaxis, number)


def _draw_momenta(axes: Axes, run: Run, notes: Sequence[Noted], color: str) -> None:
    axes.set_title("Momentum", fontsize=11)
    axes.set_ylabel("momentum")
    key = "implicit_momentum"
    points = [(note.time, note.numbers[key]) for note in notes if key in note.numbers]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, label="implicit")
    explicit = explicit_momentum(run)
    if explicit is not None:
        axes.axhline(explicit, color=BASELINE_COLOR, linestyle=(0, (4, 3)), label="explicit")
    axes.set_ylim(-0.03, 1.03)
    axes.legend(loc="best", frameon=False, fontsize=9)
