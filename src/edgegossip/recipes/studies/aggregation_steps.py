"""Times of the steps of aggregation, as in figures 3 and 7 of the EdgeGossip paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgegossip.runs.exhibits import Panel, Series
from edgegossip.runs.scoreboard import middle
from edgegossip.runs.study import Row

STEPS = ("reduction", "division", "means")
CLOCK = "Processor time on one thread of this machine; the paper's machine is different."


def steps_panel(title: str, groups: Mapping[str, Iterable[Row]]) -> Panel:
    """Stack the times of the three steps, for each group of rows that differ only in seed."""
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
