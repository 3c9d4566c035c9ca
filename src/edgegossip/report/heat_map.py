"""Drawing a panel of colored cells, with a number for each pair of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from edgegossip.report.style import INK, WAITING
from edgegossip.report.units import number, written

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
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, unit)))


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
