"""The averaged model's accuracy against time, data sent and epochs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from edgegossip.experiments.results import Evaluation
from edgegossip.report.folder import ReportData, Run
from edgegossip.report.style import MUTED, Picture, figure_style, new_figure, render
from edgegossip.report.units import data_size, listing, number, percent, seconds

# Above this ratio between the most and the least data sent, a linear axis hides the least.
LOG_RATIO = 10


@dataclass(frozen=True, slots=True)
class Quantity:
    """The quantity on the horizontal axis."""

    name: str
    heading: str
    axis_label: str
    caption: str
    value: Callable[[Evaluation], float]
    human: Callable[[float], str]


TIME = Quantity(
    "accuracy-time",
    "Accuracy against time",
    "time (s)",
    "Further left is sooner. Evaluating costs no time.",
    lambda evaluation: evaluation.time,
    seconds,
)
DATA = Quantity(
    "accuracy-bytes",
    "Accuracy against data sent",
    "data sent by all workers (bytes)",
    "Further left is less traffic: all bytes that left any worker so far, lost ones included.",
    lambda evaluation: evaluation.bytes_sent,
    data_size,
)
EPOCHS = Quantity(
    "accuracy-epochs",
    "Accuracy against epochs",
    "epochs (samples processed by all workers / training samples)",
    "Speed taken out: equal work counts equally, on any machine and at any speed. A curve "
    "further right needs more samples for the same accuracy.",
    lambda evaluation: evaluation.epochs,
    lambda epochs: f"{number(epochs)} epochs",
)


def accuracy_pictures(folder: ReportData, colors: dict[str, str]) -> Iterator[Picture]:
    """Draw accuracy against each quantity; nothing without an evaluation."""
    runs = [run for run in folder.runs if run.log.evaluations]
    for quantity in (TIME, DATA, EPOCHS) if runs else ():
        yield _picture(quantity, runs, folder.target_accuracy, colors)


def _picture(
    quantity: Quantity, runs: Sequence[Run], target: float | None, colors: dict[str, str]
) -> Picture:
    with figure_style():
        figure = new_figure(9.0, 4.6)
        axes = figure.add_subplot()
        axes.set_title(quantity.heading)
        axes.set_xlabel(quantity.axis_label)
        models = {run.log.model for run in runs}
        axes.set_ylabel(f"accuracy of {models.pop() if len(models) == 1 else 'the model'}")
        is_log = _scale(axes, quantity, runs)
        for run in runs:
            _curve(axes, quantity, run, target, colors[run.name], is_log)
        _limits(axes, runs, target)
        _label_ends(axes, quantity, runs, target, colors)
        png, svg = render(figure, "png"), render(figure, "svg")
    caption = quantity.caption
    if is_log:
        caption += " The axis is logarithmic: each grid line is ten times the one before."
    if any(run.log.first_at(target) for run in runs):
        caption += " A ring marks the first evaluation at the target or above."
    return Picture(
        name=quantity.name,
        heading=quantity.heading,
        caption=caption,
        alt=_alt(quantity, runs, target),
        png=png,
        svg=svg,
    )


def _scale(axes: Axes, quantity: Quantity, runs: Sequence[Run]) -> bool:
    """Set the axes' scales and ticks; return whether the horizontal axis is logarithmic."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    if quantity is not DATA:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        return False
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: data_size(value)))
    finals = [run.log.evaluations[-1].bytes_sent for run in runs]
    if min(finals) <= 0 or max(finals) < LOG_RATIO * min(finals):
        return False
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: data_size(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    return True


def _curve(
    axes: Axes, quantity: Quantity, run: Run, target: float | None, color: str, is_log: bool
) -> None:
    points = [
        (quantity.value(evaluation), evaluation.accuracy)
        for evaluation in run.log.evaluations
        if not is_log or quantity.value(evaluation) > 0
    ]
    axes.plot(*zip(*points, strict=True), color=color)
    axes.plot(*points[-1], "o", color=color, markersize=5)
    first = run.log.first_at(target)
    if first is not None and (not is_log or quantity.value(first) > 0):
        axes.plot(
            quantity.value(first),
            first.accuracy,
            "o",
            markersize=9,
            markerfacecolor="white",
            markeredgecolor=color,
            markeredgewidth=2,
            zorder=4,
        )


def _risen(runs: Sequence[Run]) -> float:
    """An accuracy that each run exceeds after its first tenth, less a margin.

    A tenth of the later values may be lower, so a single dip does not count.
    """
    early = [
        run.log.evaluations[
            min(2 + len(run.log.evaluations) // 10, len(run.log.evaluations) - 1)
        ]
        for run in runs
    ]
    best = max(evaluation.accuracy for run in runs for evaluation in run.log.evaluations)
    later = (run.log.evaluations[len(run.log.evaluations) // 2 :] for run in runs)
    fallen = [sorted(each.accuracy for each in half)[len(half) // 10] for half in later]
    lowest = min(*(evaluation.accuracy for evaluation in early), *fallen)
    return lowest - 0.5 * (best - lowest)


def _limits(axes: Axes, runs: Sequence[Run], target: float | None) -> None:
    """Emphasize differences: the first steep rise gets only a part of the scale."""
    accuracies = [evaluation.accuracy for run in runs for evaluation in run.log.evaluations]
    known = [*accuracies, *([] if target is None else [target])]
    low, high = max(min(known), _risen(runs)), max(known)
    spread = max(high - low, 0.02)
    axes.set_ylim(max(-0.01, low - 0.05 * spread), min(1.01, high + 0.08 * spread))
    if axes.get_xscale() == "linear":
        axes.set_xlim(left=0)
    if target is not None:
        axes.axhline(target, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"target {percent(target)}",
            (1, target),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            color=MUTED,
            fontsize=9,
        )


LEADER = {"arrowstyle": "-", "alpha": 0.6, "shrinkA": 2, "shrinkB": 0, "relpos": (0, 0.5)}
"""The line from the end of a curve to its name."""


def _label_ends(
    axes: Axes,
    quantity: Quantity,
    runs: Sequence[Run],
    target: float | None,
    colors: dict[str, str],
) -> None:
    """Label each curve beside the axes, near the height at which it ends."""
    low, high = axes.get_ylim()
    heights = [(run.log.evaluations[-1].accuracy - low) / (high - low) for run in runs]
    right = axes.get_xlim()[1]
    for run, height, free in zip(runs, heights, spread_out(heights, 0.13), strict=True):
        color, last = colors[run.name], run.log.evaluations[-1]
        # A run that is over keeps its accuracy: lead the eye from its end to its name.
        ends = [quantity.value(last), right]
        axes.plot(ends, [last.accuracy] * 2, ":", color=color, linewidth=1, scalex=False)
        write_name(axes, run.name, _verdict(quantity, run, target), height, free, color)


def write_name(
    axes: Axes, name: str, verdict: str, height: float, free: float, color: str
) -> None:
    """Write the name of a curve that ends at `height` beside the axes, at a `free` height."""
    axes.annotate(
        name,
        (1, height),
        xycoords="axes fraction",
        xytext=(1.05, free),
        textcoords="axes fraction",
        color=color,
        weight="bold",
        va="center",
        arrowprops={**LEADER, "color": color},
        annotation_clip=False,
    )
    axes.annotate(
        verdict,
        (1.05, free),
        xycoords="axes fraction",
        xytext=(0, -14),
        textcoords="offset points",
        color=MUTED,
        fontsize=8.5,
        va="center",
        annotation_clip=False,
    )


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights in [0, 1] apart until neighbors are `gap` from each other.

    If there are too many, the gap shrinks. The order from low to high is kept.

    >>> [round(height, 2) for height in spread_out([0.9, 0.2, 0.95], gap=0.1)]
    [0.9, 0.2, 1.0]
    """
    gap = min(gap, 1 / max(len(heights) - 1, 1))
    order = sorted(range(len(heights)), key=heights.__getitem__)
    free = list(heights)
    for below, above in itertools.pairwise(order):
        free[above] = max(free[above], free[below] + gap)
    # Heights pushed out at the top come back down, and push those below them.
    ceiling = 1.0
    for index in reversed(order):
        free[index] = min(free[index], ceiling)
        ceiling = free[index] - gap
    return free


def _verdict(quantity: Quantity, run: Run, target: float | None) -> str:
    first = run.log.first_at(target)
    if first is None or target is None:
        return f"ends at {percent(run.log.evaluations[-1].accuracy)}"
    return f"{percent(target)} at {quantity.human(quantity.value(first))}"


def _alt(quantity: Quantity, runs: Sequence[Run], target: float | None) -> str:
    lines = [
        f"{run.name}: {_verdict(quantity, run, target)}, after "
        f"{quantity.human(quantity.value(run.log.evaluations[-1]))} "
        f"{percent(run.log.evaluations[-1].accuracy)}"
        for run in runs
    ]
    return f"Line chart, {quantity.heading.lower()}. {listing(lines)}."
