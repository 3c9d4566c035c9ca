"""The chosen metric of the averaged model against time, data sent and epochs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox

from edgegossip.contract.metrics import MetricSpec
from edgegossip.report.folder import ReportData, Run
from edgegossip.report.style import (
    MUTED,
    Picture,
    figure_style,
    new_figure,
    picture,
    write_axis,
)
from edgegossip.report.units import (
    capitalized,
    data_size,
    energy,
    listing,
    metric_value,
    number,
    seconds,
)
from edgegossip.runs.results import Evaluation

# Above this ratio between the most and the least data sent, a linear axis hides the least.
LOG_RATIO = 10


Color: TypeAlias = str | tuple[float, float, float, float]
"""A color's name, or its red, green, blue and opacity."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """Quantity on the horizontal axis; {metric} in its caption stands for the metric's name."""

    name: str
    words: str
    axis_label: str
    caption: str
    value: Callable[[Evaluation], float]
    human: Callable[[float], str]


TIME = Quantity(
    "time",
    "time",
    "time (s)",
    "Curves further left are faster. Evaluating costs no time.",
    lambda evaluation: evaluation.time,
    seconds,
)
DATA = Quantity(
    "bytes",
    "data sent",
    "data sent by all workers (bytes)",
    "Curves further left need less traffic: all bytes that left any worker so far, lost ones "
    "included.",
    lambda evaluation: evaluation.bytes_sent,
    data_size,
)
ENERGY = Quantity(
    "energy",
    "energy",
    "energy of all machines and links",
    "Curves further left need less energy, by the model of the machines and links.",
    lambda evaluation: evaluation.joules or 0.0,
    energy,
)
EPOCHS = Quantity(
    "epochs",
    "epochs",
    "epochs (samples processed by all workers / training samples)",
    "Independent of speed: equal work counts equally on any machine. A curve "
    "further right needs more samples for the same {metric}.",
    lambda evaluation: evaluation.epochs,
    lambda epochs: f"{number(epochs)} epochs",
)


def metric_pictures(folder: ReportData, colors: dict[str, str]) -> Iterator[Picture]:
    """Draw the chosen metric against each quantity; nothing without an evaluation."""
    runs = []
    for run in folder.runs:
        finite = [each for each in run.log.evaluations if math.isfinite(each.value)]
        if finite:
            runs.append(replace(run, log=replace(run.log, evaluations=finite)))
    evaluations = [each for run in runs for each in run.log.evaluations]
    is_known = all(each.energy is not None for each in evaluations)
    quantities = (TIME, DATA, *([ENERGY] if is_known else []), EPOCHS)
    for quantity in quantities if runs else ():
        yield _picture(quantity, runs, folder.target, colors)


def _picture(
    quantity: Quantity, runs: Sequence[Run], target: float | None, colors: dict[str, str]
) -> Picture:
    metric = runs[0].log.metric
    heading = f"{capitalized(metric.name)} against {quantity.words}"
    with figure_style():
        figure = new_figure(9.0, 4.6)
        axes = figure.add_subplot()
        axes.set_title(heading)
        axes.set_xlabel(quantity.axis_label)
        models = {run.log.model for run in runs}
        model = models.pop() if len(models) == 1 else "the model"
        axes.set_ylabel(f"{metric.name} of {model}")
        is_log = _scale(axes, quantity, runs, metric)
        for run in runs:
            _curve(axes, quantity, run, target, colors[run.name], is_log)
        _limits(axes, runs, target)
        _label_ends(axes, quantity, runs, target, colors)
        if target is not None:
            label_target(axes, target, metric)
        caption = quantity.caption.format(metric=metric.name)
        if is_log:
            caption += " The axis is logarithmic: each grid line is ten times the one before."
        if any(_kept(quantity, run) for run in runs):
            caption += " A diamond marks the best model by validation."
        if any(run.log.first_at(target) for run in runs):
            beyond = "above" if metric.higher_is_better else "below"
            caption += f" A ring marks the first evaluation at the target or {beyond}."
        return picture(
            figure,
            name=f"{metric.key.replace('_', '-')}-{quantity.name}",
            heading=heading,
            caption=caption,
            alt=_alt(heading, quantity, runs, target),
        )


def _scale(axes: Axes, quantity: Quantity, runs: Sequence[Run], metric: MetricSpec) -> bool:
    """Set the axes' scales and ticks; return whether the horizontal axis is logarithmic."""
    write_axis(axes.yaxis, lambda value: metric_value(value, metric))
    if quantity is not DATA:
        write_axis(axes.xaxis, energy if quantity is ENERGY else number)
        return False
    write_axis(axes.xaxis, data_size)
    finals = [run.log.evaluations[-1].bytes_sent for run in runs]
    if min(finals) <= 0 or max(finals) < LOG_RATIO * min(finals):
        return False
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=12))
    write_axis(axes.xaxis, data_size)
    axes.xaxis.set_minor_formatter(NullFormatter())
    return True


def _curve(
    axes: Axes, quantity: Quantity, run: Run, target: float | None, color: str, is_log: bool
) -> None:
    points = [
        (quantity.value(evaluation), evaluation.value)
        for evaluation in run.log.evaluations
        if not is_log or quantity.value(evaluation) > 0
    ]
    axes.plot(*zip(*points, strict=True), color=color)
    axes.plot(*points[-1], "o", color=color, markersize=5)
    first = run.log.first_at(target)
    if first is not None and (not is_log or quantity.value(first) > 0):
        axes.plot(
            quantity.value(first),
            first.value,
            "o",
            markersize=9,
            markerfacecolor="white",
            markeredgecolor=color,
            markeredgewidth=2,
            zorder=4,
        )
    if (kept := _kept(quantity, run)) and (not is_log or quantity.value(kept) > 0):
        axes.plot(
            quantity.value(kept),
            kept.value,
            "D",
            markersize=7,
            markerfacecolor=color,
            markeredgecolor="white",
            markeredgewidth=1.2,
            zorder=5,
        )


def _risen(curves: Sequence[Sequence[float]]) -> float:
    """A value that each curve exceeds after its first tenth, minus a margin.

    A tenth of the later values may be lower, so a single dip does not count.
    """
    early = [curve[min(2 + len(curve) // 10, len(curve) - 1)] for curve in curves]
    best = max(itertools.chain(*curves))
    later = (curve[len(curve) // 2 :] for curve in curves)
    fallen = [sorted(half)[len(half) // 10] for half in later]
    lowest = min(*early, *fallen)
    return lowest - 0.5 * (best - lowest)


def _limits(axes: Axes, runs: Sequence[Run], target: float | None) -> None:
    """Emphasize differences: the first steep rise gets only a part of the scale."""
    metric = runs[0].log.metric
    marked = [kept.value for run in runs if (kept := run.kept) is not None]
    curves = [[each.value for each in run.log.evaluations] for run in runs]
    axes.set_ylim(_vertical(metric, curves, target, marked))
    if axes.get_xscale() == "linear":
        axes.set_xlim(left=0)
    if target is not None:
        axes.axhline(target, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)


# The size of the target's label, in shares of the axes.
LABEL_WIDTH, LABEL_HEIGHT = 0.16, 0.065


def label_target(axes: Axes, target: float, metric: MetricSpec) -> Annotation:
    """Label the target's line at the end and side where the fewest curves cross the label."""
    to_axes = axes.transData + axes.transAxes.inverted()
    height = float(to_axes.transform((axes.get_xlim()[1], target))[1])
    curves = [
        Path(to_axes.transform(line.get_xydata()))
        for line in axes.lines
        if line.get_transform() == axes.transData  # all but the target's own line
    ]
    places = [
        (Bbox.from_bounds(x, y, LABEL_WIDTH, LABEL_HEIGHT), x > 0, y == height)
        for x in (1 - LABEL_WIDTH, 0)
        for y in (height, height - LABEL_HEIGHT)
    ]
    _, is_right, is_above = min(
        places,
        key=lambda place: sum(each.intersects_bbox(place[0], filled=False) for each in curves),
    )
    return axes.annotate(
        f"target {metric_value(target, metric)}",
        (1 if is_right else 0, target),
        xycoords=("axes fraction", "data"),
        xytext=(-4 if is_right else 4, 3 if is_above else -3),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="bottom" if is_above else "top",
        color=MUTED,
        fontsize=9,
        bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5},
    )


def _vertical(
    metric: MetricSpec,
    curves: Sequence[Sequence[float]],
    target: float | None,
    marked: Sequence[float] = (),
) -> tuple[float, float]:
    """Limits of the vertical axis, computed from negated values if lower is better.

    All `marked` values are within.
    """
    sign = 1 if metric.higher_is_better else -1
    curves = [[sign * value for value in curve] for curve in curves]
    known = [*itertools.chain(*curves), *([] if target is None else [sign * target])]
    shown = [sign * value for value in marked if math.isfinite(value)]
    low, high = min([max(min(known), _risen(curves)), *shown]), max([*known, *shown])
    spread = max(high - low, 0.02 if metric.is_share else 1e-6 * abs(high) or 1e-6)
    # Even a flat curve gets a scale of some height, or its labels would be equal.
    low, high = high - 1.05 * spread, high + 0.08 * spread
    if not metric.higher_is_better:
        low, high = -high, -low
    return (max(-0.01, low), min(1.01, high)) if metric.is_share else (low, high)


def run_panels(
    runs: Sequence[Run],
    colors: Mapping[str, str],
    draw: Callable[[Run, Sequence[Axes]], None],
    titles: Sequence[str],
    legend: Mapping[str, Color],
) -> Figure:
    """Draw axes over time for each run and title.

    Args:
        runs: Runs, at least one; the axes of a single run show `titles` instead of its name.
        colors: Colors of the runs.
        draw: Draws a run into its axes.
        titles: Titles for the axes of a run.
        legend: Names below the axes and their colors.
    """
    width = len(titles)
    num_columns = width if width > 1 else min(3 if len(runs) > 4 else 2, len(runs))
    num_rows = -(-len(runs) * width // num_columns)
    figure = new_figure(9.6, 0.7 + (3.6 if len(runs) == 1 else 2.4 * num_rows))
    grid = [*figure.subplots(num_rows, num_columns, squeeze=False).flat]
    used = len(runs) * width
    for index, run in enumerate(runs):
        own = grid[index * width : (index + 1) * width]
        draw(run, own)
        for axes, title in zip(own, titles, strict=True):
            if len(runs) == 1:
                axes.set_title(title)
            else:
                axes.set_title(run.name, color=colors[run.name], fontsize=11, pad=8)
            axes.set_xlim(0, run.log.duration)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            write_axis(axes.xaxis, number)
    for axes in grid[used:]:
        axes.set_axis_off()
    for axes in grid[max(0, used - num_columns) : used]:
        axes.set_xlabel("time (s)")
    handles = [Line2D([], [], color=color, label=name) for name, color in legend.items()]
    columns = min(len(handles), 8)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    return figure


LEADER = {"arrowstyle": "-", "alpha": 0.6, "shrinkA": 2, "shrinkB": 0, "relpos": (0, 0.5)}
"""The line from the end of a curve to its name."""


def _label_ends(
    axes: Axes,
    quantity: Quantity,
    runs: Sequence[Run],
    target: float | None,
    colors: dict[str, str],
) -> None:
    """Label each curve next to the axes, near the height at which it ends."""
    low, high = axes.get_ylim()
    heights = [(run.log.evaluations[-1].value - low) / (high - low) for run in runs]
    right = axes.get_xlim()[1]
    for run, height, free in zip(runs, heights, spread_out(heights, 0.13), strict=True):
        color, last = colors[run.name], run.log.evaluations[-1]
        # A run that is over keeps its model: lead the eye from its end to its name.
        ends = [quantity.value(last), right]
        axes.plot(ends, [last.value] * 2, ":", color=color, linewidth=1, scalex=False)
        write_name(axes, run.name, _verdict(quantity, run, target), height, free, color)


def write_name(
    axes: Axes, name: str, verdict: str, height: float, free: float, color: str
) -> None:
    """Next to the axes, at height `free`, write the name of a curve that ends at `height`."""
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

    If there are too many heights, the gap shrinks. The order from low to high is kept.

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


def _kept(quantity: Quantity, run: Run) -> Evaluation | None:
    """The best model by validation, if its place on this axis is known."""
    # On real machines it was measured between two evaluations, whose bytes and samples differ.
    is_exact = run.kept and any(each.time == run.kept.time for each in run.log.evaluations)
    return run.kept if is_exact or quantity is TIME else None


def _kept_words(run: Run) -> str:
    if (kept := run.kept) is None:
        return ""
    return f", best by validation {metric_value(kept.value, run.log.metric)}"


def _verdict(quantity: Quantity, run: Run, target: float | None) -> str:
    first, metric = run.log.first_at(target), run.log.metric
    if first is None or target is None:
        return f"ends at {metric_value(run.log.evaluations[-1].value, metric)}"
    return f"{metric_value(target, metric)} at {quantity.human(quantity.value(first))}"


def _alt(heading: str, quantity: Quantity, runs: Sequence[Run], target: float | None) -> str:
    lines = [
        f"{run.name}: {_verdict(quantity, run, target)}, after "
        f"{quantity.human(quantity.value(run.log.evaluations[-1]))} "
        f"{metric_value(run.log.evaluations[-1].value, run.log.metric)}" + _kept_words(run)
        for run in runs
    ]
    return f"Line chart, {heading[0].lower()}{heading[1:]}. {listing(lines)}."
