"""What contests come to: accuracy, bytes and time beside those of dense push-sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgegossip.core.protocol import Seconds
from edgegossip.experiments.exhibits import Panel, Series, Table, Unit
from edgegossip.experiments.study import Row
from edgegossip.experiments.traffic import Traffic
from edgegossip.recipes.push_sum import DENSE
from edgegossip.recipes.studies.standings import median, time_to

TARGET_GAP = 0.01
"""The target is the dense run's best accuracy less this."""


@dataclass(frozen=True, kw_only=True)
class Placing:
    """One run of a contest, beside the dense one of the same seed.

    Attributes:
        group: Part of the study.
        setting: How the data was dealt, or the graph.
        run: Who.
        seed: Of both.
        accuracy: Of the averaged model at the end, in [0, 1].
        worker_mean: Of the workers' own models at the end, on average.
        worker_min: Of the worst of them.
        loss: The dense run's `worker_mean` less this one's; None without a dense run.
        bytes_per_worker: Sent, on average.
        ratio_same_graph: See `Traffic.ratios`.
        ratio_complete_graph: See `Traffic.ratios`.
        time: Virtual seconds to the target; None if never.
        speedup: The dense run's over that.
    """

    group: str
    setting: str
    run: str
    seed: int
    accuracy: float
    worker_mean: float
    worker_min: float
    loss: float | None
    bytes_per_worker: float
    ratio_same_graph: float | None
    ratio_complete_graph: float | None
    time: Seconds | None
    speedup: float | None


def placings(rows: Iterable[Row]) -> list[Placing]:
    """Set each run beside the dense one of its group, setting and seed.

    Args:
        rows: Of `Contest.cells`, in any order.
    """
    rows = list(rows)
    dense = {_contest(row): row for row in rows if row["run"] == DENSE}
    return [_placing(row, dense.get(_contest(row))) for row in rows]


def _contest(row: Row) -> tuple[Any, ...]:
    return row["group"], row["setting"], row["seed"]


def _placing(row: Row, dense: Row | None) -> Placing:
    own = Traffic(**row["traffic"])
    ratios = own.ratios(None if dense is None else Traffic(**dense["traffic"]))
    time = reference = None
    if dense is not None:
        target = max(dense["accuracies"]) - TARGET_GAP
        time, reference = time_to(row, target), time_to(dense, target)
    mean = _mean(row["worker_accuracies"])
    return Placing(
        group=row["group"],
        setting=row["setting"],
        run=row["run"],
        seed=row["seed"],
        accuracy=row["accuracies"][-1],
        worker_mean=mean,
        worker_min=min(row["worker_accuracies"]),
        loss=None if dense is None else _mean(dense["worker_accuracies"]) - mean,
        bytes_per_worker=own.per_worker,
        ratio_same_graph=ratios["bytes_ratio_same_graph"],
        ratio_complete_graph=ratios["bytes_ratio_complete_graph"],
        time=time,
        speedup=reference / time if reference is not None and time else None,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


COLUMNS: tuple[tuple[str, Unit, Callable[[Placing], float | None], float], ...] = (
    ("averaged model", "percent", lambda each: each.accuracy, -math.inf),
    ("mean worker", "percent", lambda each: each.worker_mean, -math.inf),
    ("worst worker", "percent", lambda each: each.worker_min, -math.inf),
    ("mean worker, lost", "points", lambda each: each.loss, math.inf),
    ("sent per worker", "bytes", lambda each: each.bytes_per_worker, math.inf),
    ("less, same graph", "times", lambda each: each.ratio_same_graph, -math.inf),
    ("less, complete graph", "times", lambda each: each.ratio_complete_graph, -math.inf),
    ("time to target", "seconds", lambda each: each.time, math.inf),
    ("sooner", "times", lambda each: each.speedup, -math.inf),
)
"""Title and unit of each column, its value, and what a missing one counts as."""

NOTE = (
    "Medians over the seeds; a dash: never, or nothing to compare with. Accuracies are of the "
    "end: of the averaged model, and of the workers' own. Lost: the dense run's mean worker "
    "less this run's. Bytes are all that is sent, with headers, positions and weights, in all "
    "rounds. Less: what dense push-sum with a step a round sends for as many samples on the "
    "run's own graph, or on the complete one as the paper seems to count, over what the run "
    f"sent. The target is the dense run's best accuracy less {100 * TARGET_GAP:g} pp; time is "
    "virtual, on uplinks of 1 Mbit/s and 30 ms."
)


def contest_table(found: Sequence[Placing], heading: str) -> Table:
    """Medians over the seeds; parts and settings have a column only if there are several."""
    runs: dict[tuple[str, str, str], list[Placing]] = {}
    for each in found:
        runs.setdefault((each.group, each.setting, each.run), []).append(each)
    titles = ("part", "setting", "run")
    told = [i for i in range(3) if titles[i] == "run" or len({key[i] for key in runs}) > 1]
    rows = tuple(
        (
            *(key[i] for i in told),
            *(median(map(value, some), missing) for _, _, value, missing in COLUMNS),
        )
        for key, some in runs.items()
    )
    columns: tuple[tuple[str, Unit], ...] = (
        *((titles[i], "text") for i in told),
        *((title, unit) for title, unit, _, _ in COLUMNS),
    )
    return Table(heading=heading, columns=columns, rows=rows, note=NOTE)


def contest_curves(
    rows: Iterable[Row], group: str, setting: str, seed: int
) -> tuple[Panel, Panel]:
    """Accuracy of the averaged model against bytes and against time, of one contest."""
    chosen = [row for row in rows if _contest(row) == (group, setting, seed)]

    def panel(title: str, axis: str, x_label: str, x_unit: Unit) -> Panel:
        return Panel(
            title=title,
            kind="lines",
            x_label=x_label,
            y_label="accuracy",
            y_unit="percent",
            series=tuple(_curve(row, axis) for row in chosen),
            is_x_log=True,
            x_unit=x_unit,
        )

    return (
        panel(setting, "bytes_per_worker", "sent per worker", "bytes"),
        panel(setting, "times", "virtual time at 1 Mbit/s", "seconds"),
    )


def _curve(row: Row, axis: str) -> Series:
    pairs = zip(row[axis], row["accuracies"], strict=True)
    # Nothing, at the beginning, has no place on a logarithmic axis.
    x, y = zip(*((x, y) for x, y in pairs if x > 0), strict=True)
    return Series(name=row["run"], x=x, y=y)


def accuracy_bars(
    found: Sequence[Placing], value: Callable[[Placing], float], title: str, x_label: str
) -> Panel:
    """A bar for each setting and run: the median over the seeds, with their range."""
    settings = tuple(dict.fromkeys(each.setting for each in found))
    series = []
    for run in dict.fromkeys(each.run for each in found):
        by_setting: Mapping[str, list[float]] = {
            setting: [value(e) for e in found if (e.run, e.setting) == (run, setting)]
            for setting in settings
        }
        series.append(
            Series(
                name=run,
                x=settings,
                y=tuple(median(some) if some else None for some in by_setting.values()),
                low=tuple(min(some, default=None) for some in by_setting.values()),
                high=tuple(max(some, default=None) for some in by_setting.values()),
            )
        )
    return Panel(
        title=title,
        kind="bars",
        x_label=x_label,
        y_label="accuracy",
        y_unit="percent",
        series=tuple(series),
    )
