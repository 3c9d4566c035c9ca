"""Figures, panels and tables of studies, from values by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from edgegossip.runs.exhibits import Exhibits, Figure, Panel, Series, Table, Unit, Value

Line: TypeAlias = Mapping[str, tuple[Unit, Value]]
"""A row of a table: unit and value by title of the column."""


def table(heading: str, lines: Iterable[Line], note: str = "") -> Table:
    """Make a table of lines that all have the same columns."""
    rows = [*lines]
    return Table(
        heading=heading,
        columns=tuple((title, unit) for each in rows[:1] for title, (unit, _) in each.items()),
        rows=tuple(tuple(value for _, value in each.values()) for each in rows),
        note=note,
    )


def panel(
    title: str,
    series: Mapping[str, tuple[Iterable[Any], Iterable[Any]]],
    *,
    mark: str | None = None,
    x_label: str = "",
    **others: Any,  # noqa: ANN401
) -> Panel:
    """Make a panel.

    Args:
        title: Title above the panel.
        series: x and y values by name of the series.
        mark: Series that is a line across bars or over a map, if any.
        x_label: Label of the horizontal axis.
        others: Other arguments of `Panel`.
    """
    return Panel(
        title=title,
        x_label=x_label,
        series=tuple(
            Series(name=name, x=tuple(x), y=tuple(y), is_mark=name == mark)
            for name, (x, y) in series.items()
        ),
        **others,
    )


def figure_and_tables(
    name: str, heading: str, caption: str, panels: Iterable[Panel], *tables: Table
) -> Exhibits:
    """Exhibits of one figure, with tables; none without a panel."""
    if not (drawn := tuple(panels)):
        return Exhibits()
    figure = Figure(name=name, heading=heading, caption=caption, panels=drawn)
    return Exhibits(figures=(figure,), tables=tables)
