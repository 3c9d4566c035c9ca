"""Drawing a study's figures: panels of curves, bars or cells, from plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from edgegossip.report.style import (
    BASELINE_COLOR,
    INK,
    MUTED,
    RUN_COLORS,
    SENDING,
    WAITING,
    Picture,
    figure_style,
    new_figure,
    picture,
    write_axis,
)
from edgegossip.report.units import NO_BREAK, listing, number, written

WIDTH, HEIGHT = 9.6, 3.7
LEGEND_WIDTH = 130
"""Width in characters, including 8 for the line before each name."""
GREY = ("epoch-gossip", "stochastic-gradient-push", "paper")
"""Reference runs, which are drawn in gray as in every report."""


def study_picture(figure: Mapping[str, Any]) -> Picture:
    """Draw one figure of `study.json`."""
    panels = figure["panels"]
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    colors = series_colors(panels)
    with figure_style():
        canvas = new_figure(WIDTH, HEIGHT * num_rows + 0.5)
        grid = canvas.subplots(num_rows, num_columns, squeeze=False).flatten()
        for axes, panel in zip(grid, panels, strict=False):
            draw_panel(axes, panel, colors)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        _draw_legend(canvas, colors)
        words = {name: figure[name] for name in ("name", "heading", "caption")}
        parts = [f"{panel['title']}. {'; '.join(_words(panel))}." for panel in panels]
        alt = " ".join([f"Chart, {figure['heading']}.", *parts])
        return picture(canvas, alt=alt, **words)


def series_colors(panels: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Choose a color for each name, the same in all panels.

    >>> series_colors([{"series": [{"name": "epoch-gossip"}, {"name": "random"}]}])
    {'epoch-gossip': '#5b6470', 'random': '#0072b2'}
    """
    # The rows of a map have the colors of its scale.
    coloured = [panel for panel in panels if panel.get("kind") != "map"]
    names = list(dict.fromkeys(each["name"] for panel in coloured for each in panel["series"]))
    free = iter([*RUN_COLORS, SENDING, INK] * len(names))
    return {name: BASELINE_COLOR if name in GREY else next(free) for name in names}


def line_styles(colors: Mapping[str, str]) -> dict[str, str]:
    """Choose line styles that distinguish series of the same color.

    >>> line_styles({"gosgd": "#0072b2", "diloco": "#d55e00", "ssp": "#0072b2"})
    {'gosgd': '-', 'diloco': '-', 'ssp': ':'}
    """
    names: dict[str, list[str]] = {}
    for name, color in colors.items():
        names.setdefault(color, []).append(name)
    styles = ("-", ":", "-.")
    return {
        name: styles[names[color].index(name) % len(styles)] for name, color in colors.items()
    }


def _draw_legend(canvas: Figure, colors: Mapping[str, str]) -> None:
    """Name the series of all panels once; a panel's title names a single series."""
    handles: dict[str, Any] = {}
    for axes in canvas.axes:
        found, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            handles |= dict(zip(labels, found, strict=True))
    names = [name for name in colors if name in handles]
    if names:
        most = max(1, min(6, LEGEND_WIDTH // (max(map(len, names)) + 8)))
        canvas.legend(
            [handles[name] for name in names],
            names,
            loc="outside lower center",
            ncols=math.ceil(len(names) / math.ceil(len(names) / most)),
            frameon=False,
        )


def draw_panel(axes: Axes, panel: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    """Draw one panel of `study.json` in the colors of its series."""
    axes.set_title(panel["title"])
    axes.set_xlabel(panel["x_label"])
    axes.set_ylabel(panel["y_label"])
    if panel["kind"] == "map":
        draw_map(axes, panel)
        return
    unit = panel["y_unit"]
    write_axis(axes.yaxis, lambda value: _tick(value, unit))
    if panel["kind"] == "lines":
        _draw_lines(axes, panel, colors)
    else:
        _draw_bars(axes, panel["series"], colors, unit, is_stacked=panel["kind"] == "stacked")
    if panel["is_log"]:
        axes.set_yscale("log")
        _write_powers(axes.yaxis, unit)


class _Written(LogFormatter):
    """Formats numbers as elsewhere in reports, without matplotlib's formulas."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def __call__(self, value: float, place: int | None = None) -> str:
        # The base class returns no text for labels that would be too close together.
        return _tick(value, self._unit) if super().__call__(value, place) else ""


def _write_powers(axis: Axis, unit: str) -> None:
    """Label a logarithmic axis."""
    axis.set_major_formatter(_Written(unit))
    axis.set_minor_formatter(_Written(unit))


def _tick(value: float, unit: str) -> str:
    # Only tables show percentage points with two decimals.
    return f"{100 * value:g}{NO_BREAK}pp" if unit == "points" else written(value, unit)


def _draw_lines(axes: Axes, panel: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    styles = line_styles(colors)
    for each in panel["series"]:
        color = INK if each["is_mark"] else colors[each["name"]]
        style, width = ("--", 1.2) if each["is_mark"] else (styles[each["name"]], 1.8)
        axes.plot(each["x"], each["y"], style, color=color, label=each["name"], linewidth=width)
        axes.plot(each["x"][-1:], each["y"][-1:], "o", color=color, markersize=4)
    unit = panel["x_unit"]
    if panel["is_x_log"]:
        axes.set_xscale("log")
        _write_powers(axes.xaxis, unit)
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
    if unit != "number" and not panel["is_x_log"]:
        write_axis(axes.xaxis, lambda value: written(value, unit))


def _draw_bars(
    axes: Axes,
    series: Sequence[Mapping[str, Any]],
    colors: Mapping[str, str],
    unit: str,
    *,
    is_stacked: bool,
) -> None:
    categories = list(dict.fromkeys(x for each in series for x in each["x"]))
    whole = [each for each in series if not each["is_mark"]]
    width = 0.7 if is_stacked else 0.8 / max(1, len(whole))
    bottom = np.zeros(len(categories))
    for index, each in enumerate(whole):
        offset = 0.0 if is_stacked else (index - (len(whole) - 1) / 2) * width
        places = np.array([categories.index(x) for x in each["x"]]) + offset
        heights = np.array([np.nan if y is None else y for y in each["y"]])
        axes.bar(
            places,
            heights,
            width * 0.94,
            bottom=bottom if is_stacked else None,
            color=colors[each["name"]],
            label=each["name"],
        )
        if is_stacked:
            bottom = bottom + np.nan_to_num(heights)
        for place, low, high in zip(places, each["low"], each["high"], strict=False):
            if not is_stacked and low is not None and high is not None and high > low:
                axes.plot([place, place], [low, high], color=INK, linewidth=0.9)
    for each in series:
        if each["is_mark"]:
            places = np.array([categories.index(x) for x in each["x"]])
            values = np.array(each["y"], float)
            axes.hlines(values, places - 0.42, places + 0.42, color=INK, label=each["name"])
    _label_categories(axes, categories)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.grid(visible=False, axis="x")


def _label_categories(axes: Axes, categories: Sequence[str]) -> None:
    is_crowded = sum(map(len, categories)) > 40
    axes.set_xticks(
        range(len(categories)),
        categories,
        rotation=30 if is_crowded else 0,
        ha="right" if is_crowded else "center",
    )
    axes.set_xlim(-0.5, len(categories) - 0.5)  # a missing bar keeps its place


def _words(panel: Mapping[str, Any]) -> list[str]:
    if panel["kind"] == "map":
        return map_words(panel)
    unit = panel["y_unit"]
    words = []
    for each in panel["series"]:
        if panel["kind"] == "lines":
            # A run that diverged before its first evaluation has no values.
            end = f"ends at {written(each['y'][-1], unit)}" if each["y"] else "has no values"
            words.append(f"{each['name']} {end}")
        else:
            pairs = zip(each["x"], each["y"], strict=True)
            values = [f"{x} {written(y, unit)}" for x, y in pairs]
            words.append(f"{each['name']}: {listing(values)}")
    return words


# Maps.


Doubles: TypeAlias = NDArray[np.float64]


def draw_map(axes: Axes, panel: Mapping[str, Any]) -> None:
    """Draw rows of cells on logarithmic axes, colored on a logarithmic scale.

    Args:
        axes: Axes to draw on.
        panel: Panel of `study.json`. Cells without a positive number are hatched; a mark
            becomes a line across the cells.
    """
    rows = [each for each in panel["series"] if not each["is_mark"]]
    x, y = np.array(rows[0]["x"], float), np.array([float(each["name"]) for each in rows])
    values = np.array([each["y"] for each in rows], float)  # None becomes nan
    values[~(values > 0)] = np.nan
    axes.set_facecolor(WAITING)
    axes.patch.set_hatch("///")
    x_edges, y_edges = _edges(x), _edges(y)
    if np.isfinite(values).any():
        _draw_cells(axes, x_edges, y_edges, values, panel["y_unit"])
    axes.set_xscale("log")
    axes.set_yscale("log")
    # Set before marks are drawn, because they may extend beyond the cells.
    axes.set_xlim(x_edges[0], x_edges[-1])
    axes.set_ylim(y_edges[0], y_edges[-1])
    for each in panel["series"]:
        if each["is_mark"]:
            axes.plot(each["x"], each["y"], color="white", linewidth=4)  # outline
            axes.plot(each["x"], each["y"], color=INK, label=each["name"], linewidth=1.8)
    axes.set_xticks(x, [number(each) for each in x])
    axes.set_yticks(y, [number(each) for each in y])
    axes.minorticks_off()
    axes.grid(visible=False)


def _draw_cells(
    axes: Axes, x_edges: Doubles, y_edges: Doubles, values: Doubles, unit: str
) -> None:
    """Draw the cells, [num_rows, num_columns], with a color bar."""
    mesh = axes.pcolormesh(
        x_edges, y_edges, np.ma.masked_invalid(values), norm=LogNorm(), cmap="viridis_r"
    )
    bar = axes.figure.colorbar(mesh, ax=axes)
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    write_axis(bar.ax.yaxis, lambda value: written(value, unit))


def map_words(panel: Mapping[str, Any]) -> list[str]:
    """Describe the map in words: the smallest number of each column."""
    rows = [each for each in panel["series"] if not each["is_mark"]]
    words = []
    for column, x in enumerate(rows[0]["x"]):
        known = [(each["y"][column], each["name"]) for each in rows if each["y"][column]]
        least = min(known, default=None)
        said = (
            "none" if least is None else f"{written(least[0], panel['y_unit'])} at {least[1]}"
        )
        words.append(f"least at {number(x)}: {said}")
    return words


def _edges(centers: Sequence[float] | Doubles) -> Doubles:
    """The edges of cells around `centers`, which ascend or descend, on a logarithmic scale."""
    logs = np.log(np.asarray(centers, float))
    steps = np.diff(logs) if len(logs) > 1 else np.ones(1)
    middles = (logs[1:] + logs[:-1]) / 2
    ends: Doubles = np.exp(
        np.concatenate([[logs[0] - steps[0] / 2], middles, [logs[-1] + steps[-1] / 2]])
    )
    return ends
