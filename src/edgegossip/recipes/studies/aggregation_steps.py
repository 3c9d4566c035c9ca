"""Times of the steps of aggregation, as figures 3 and 7 of the EdgeGossip paper show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgegossip.experiments.exhibits import Panel, Series
from edgegossip.experiments.study import Row
from edgegossip.recipes.studies.scoreboard import median

STEPS = ("reduction", "division", "means")
CLOCK = "Processor time on one thread of this machine; the paper's machine is another."


def grouped(rows: Iterable[Row], *fields: str) -> dict[tuple[object, ...], list[Row]]:
    """Rows by their values of `fields`, in order; None where a row has none.

    >>> grouped([{"ratio": 5, "seed": 0}, {"ratio": 5, "seed": 1}], "ratio").keys()
    dict_keys([(5,)])
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(field) for field in fields), []).append(row)
    return groups


def middle(rows: Iterable[Row], field: str) -> float | None:
    """The median of a field over the seeds; None where most have none."""
    return median(row.get(field) for row in rows)


def steps_panel(title: str, groups: Mapping[str, Iterable[Row]]) -> Panel:
    """Stack the times of the three steps, for each group of rows that differ in their seed."""
    return Panel(
        title=title,
        kind="stacked",
        x_label="",
        y_label="processor time",
        y_unit="seconds",
        series=tuple(
            Series(
                name=step,
                x=tuple(groups),
                y=tuple(middle(some, f"wall_{step}") for some in groups.values()),
            )
            for step in STEPS
        ),
    )
