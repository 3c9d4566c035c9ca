"""Figures, panels and tables of studies, from values by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from edgegossip.runs.exhibits import Exhibits, Figure, Panel, Series, Table, Unit, Value
from edgegossip.runs.scoreboard import metric_of, values_of
from edgegossip.runs.study import Row

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


def front_panel(rows: Iterable[Row], field: str, label: str, unit: Unit) -> Panel:
    """Make curves of the runs' metric against a quantity, with their Pareto front.

    Accuracy is shown as the error, so that lower is better, as it is for other metrics.

    Args:
        rows: Rows with curves of one metric, one of each run.
        field: Field of the quantity, with one number per evaluation; values of 0 are omitted.
        label: Label of the quantity.
        unit: Unit of the quantity.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    name, y_unit = "test error", "percent"
    for row in rows:
        metric = metric_of(row)
        if not metric.is_share:
            name, y_unit = metric.name, "number"
        values = [1 - y if metric.is_share else y for y in values_of(row)]
        points = [(x, y) for x, y in zip(row[field], values, strict=True) if x > 0]
        if points:  # a run without messages has none against bytes
            curves[row["run"]] = points
    front: list[tuple[float, float]] = []
    for x, y in sorted(point for curve in curves.values() for point in curve):
        if not front or y < front[-1][1]:
            front.append((x, y))
    curves["Pareto front"] = front
    return panel(
        label.capitalize(),
        {run: ([x for x, _ in xy], [y for _, y in xy]) for run, xy in curves.items()},
        mark="Pareto front",
        kind="lines",
        x_label=label,
        x_unit=unit,
        is_x_log=True,
        is_log=True,
        y_label=name,
        y_unit=y_unit,
    )


def figure_and_tables(
    name: str, heading: str, caption: str, panels: Iterable[Panel], *tables: Table
) -> Exhibits:
    """Exhibits of one figure, with tables; none without a panel."""
    if not (drawn := tuple(panels)):
        return Exhibits()
    figure = Figure(name=name, heading=heading, caption=caption, panels=drawn)
    return Exhibits(figures=(figure,), tables=tables)
