"""Figures and tables of a study, as plain values that a report draws.

They are stored in `study.json`, so a report needs only this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal[
    "text", "number", "seconds", "bytes", "joules", "percent", "points", "times"
]
"""Format of a number; "percent" and "points" (percentage points) are shares in [0, 1]."""

Value: TypeAlias = str | float | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve, or one bar in each category.

    Args:
        name: Name in the legend; in a map, the row's place on the vertical axis, as text.
        x: Values along a curve or a row of a map; for bars, the names of the categories.
        y: Value for each x; None for a missing bar or a cell without a number.
        low: Lower end of the range of each y over the seeds; empty without ranges.
        high: Upper end of this range.
        is_mark: Whether the series is a mark: a line across each category of bars (such as a
            bound), a line over a map, or a dashed curve.
    """

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    is_mark: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Args:
        title: Title above the axes.
        kind: "lines", "bars" (side by side), "stacked" bars, or a "map": a series for each row
            of cells, colored by y, with logarithmic axes and colors.
        x_label: Label of the horizontal axis.
        y_label: Label of the vertical axis.
        y_unit: Unit of the numbers on the vertical axis; in a map, of the colors.
        x_unit: Unit of the numbers on the horizontal axis of curves.
        series: Series in the order of the legend.
        is_log: Whether the vertical axis is logarithmic.
        is_x_log: Whether the horizontal axis of curves is logarithmic.
    """

    title: str
    kind: Literal["lines", "bars", "stacked", "map"]
    x_label: str
    y_label: str
    y_unit: Unit
    series: tuple[Series, ...]
    is_log: bool = False
    is_x_log: bool = False
    x_unit: Unit = "number"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure: panels side by side, as in the paper.

    Args:
        name: File name without suffix.
        heading: Short description.
        caption: Explanation.
        panels: Panels, at least one.
    """

    name: str
    heading: str
    caption: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers in rows.

    Args:
        heading: Meaning of the numbers.
        columns: Title and unit of each column.
        rows: Rows with a value for each column.
        note: Explanation.
    """

    heading: str
    columns: tuple[tuple[str, Unit], ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Exhibits:
    """Figures and tables of a study's findings so far.

    Args:
        figures: The figures.
        tables: The tables.
        summary: Answer to the study's question, one sentence each, the shortest first; empty
            while it is open.
    """

    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    summary: tuple[str, ...] = ()
