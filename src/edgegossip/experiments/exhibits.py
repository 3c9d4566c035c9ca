"""Figures and tables of a study, as plain values that a report draws.

They are stored in `study.json`, so that a page is made from that file alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["text", "number", "seconds", "bytes", "percent", "points", "times"]
"""How a number is written: "percent" and "points" (percentage points) are shares in [0, 1]."""

Value: TypeAlias = str | float | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve, or one bar in each category.

    Args:
        name: Name in the legend; for a row of a map, its height as text.
        x: Values along a curve or a row of a map; for bars, the names of the categories.
        y: One for each x; None for a bar that is missing or a cell without a number.
        low: Lower end of the range of each y over the seeds; empty for none.
        high: Upper end.
        is_mark: A line across each category of bars, such as a bound, one over a map, or a
            dashed one among curves.
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
        title: Title above it.
        kind: "lines", "bars" (side by side), "stacked" bars, or a "map": a series for each row
            of cells, colored by y on a logarithmic scale, both axes logarithmic.
        x_label: Label below it.
        y_label: Label beside it.
        y_unit: Unit of the numbers on the vertical axis; in a map, of the colors.
        x_unit: Unit of the numbers on the horizontal axis of curves.
        series: In order of the legend.
        is_log: The vertical axis is logarithmic.
        is_x_log: The horizontal axis of curves is.
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
    """Panels side by side, as the paper has them.

    Args:
        name: File name without suffix.
        heading: Says in a few words what it shows.
        caption: How to read it.
        panels: At least one.
    """

    name: str
    heading: str
    caption: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers in rows.

    Args:
        heading: Says what the numbers are.
        columns: Title and unit of each column.
        rows: As many values as columns in each.
        note: How to read it.
    """

    heading: str
    columns: tuple[tuple[str, Unit], ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Exhibits:
    """All that a study shows of what it has found so far."""

    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
