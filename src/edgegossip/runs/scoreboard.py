"""Curves of the chosen metric, in the rows of a study."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.contract.protocol import Seconds
from edgegossip.runs.exhibits import Panel, Series, Table, Unit
from edgegossip.runs.results import Results
from edgegossip.runs.study import Row


def learning_curve(results: Results) -> dict[str, Any]:
    """Times and values of the chosen metric, as fields of a row; see `curve_fields`."""
    history = results.history
    return curve_fields(
        results.metric, [each.time for each in history], [each.value for each in history]
    )


def curve_fields(
    metric: MetricSpec, times: Sequence[float], values: Sequence[float]
) -> dict[str, Any]:
    """Times and values of a metric, as fields of a row.

    For accuracy, the values are in `accuracies`; for another metric, in `values`, with its
    description in `metric`.
    """
    if metric == ACCURACY:
        return {"times": times, "accuracies": values}
    return {"times": times, "values": values, "metric": asdict(metric)}


def metric_of(row: Row) -> MetricSpec:
    """The metric of a row's curve."""
    return MetricSpec(**row["metric"]) if "metric" in row else ACCURACY


def values_of(row: Row) -> Sequence[float]:
    """The values of a row's curve."""
    found: Sequence[float] = row["values" if "metric" in row else "accuracies"]
    return found


def unit_of(metric: MetricSpec) -> Unit:
    """The unit of a column or an axis with values of a metric."""
    return "percent" if metric.is_share else "number"


# Scores, tables and charts of runs relative to a reference run of the same contest.


ContestKey: TypeAlias = tuple[str, str, int]
"""Group, setting and seed."""
Measures: TypeAlias = Mapping[str, tuple[Unit, float | None]]
"""Unit and value of each measure of a run, by title, in the order of a table's columns."""
LAST_LOOKS = 5
LESS_IS_BETTER = {"seconds", "bytes", "joules", "points"}
"""Units in which less is better, so a missing value counts as infinite in a median."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One run of a contest, relative to the reference of the same group, setting and seed.

    Attributes:
        group: Part of the study.
        setting: Distinguishing feature of this contest within its group.
        run: Name of the run.
        seed: Seed of both runs.
        target: Value of the metric to reach; None without a reference run.
        measures: Measures of the run.
    """

    group: str
    setting: str
    run: str
    seed: int
    target: float | None
    measures: Measures

    def __getitem__(self, title: str) -> float | None:
        """The value of a measure."""
        return self.measures[title][1]


Measure: TypeAlias = Callable[[Row, Row | None, Seconds | None, float | None], Measures]
"""Computes a run's measures from its row, the reference's row, the run's time to the target and
the run's speed-up."""


def contest_key(row: Row) -> ContestKey:
    """The contest that a row belongs to."""
    return row["group"], row["setting"], row["seed"]


def scores(
    rows: Iterable[Row], reference: str, target_gap: float, measure: Measure
) -> list[Score]:
    """Compare each run with the reference run of its contest.

    Args:
        rows: Rows with `group`, `setting`, `run`, `seed` and a `learning_curve`.
        reference: Name of the reference run, which defines the target.
        target_gap: The target is the reference's best value minus this gap, in [0, 1]; see
            `MetricSpec.easier`.
        measure: Measures each run.
    """
    rows = list(rows)
    references = {contest_key(row): row for row in rows if row["run"] == reference}
    found = []
    for row in rows:
        target = time = speedup = None
        if (other := references.get(contest_key(row))) is not None:
            metric = metric_of(other)
            target = metric.easier(metric.best(values_of(other)), target_gap)
            time, other_time = time_to(row, target), time_to(other, target)
            speedup = other_time / time if other_time is not None and time else None
        found.append(score(row, measure(row, other, time, speedup), target))
    return found


def score(row: Row, measures: Measures, target: float | None = None) -> Score:
    """The score of a row with `group`, `setting`, `run` and `seed`."""
    names = {name: row[name] for name in ("group", "setting", "run", "seed")}
    return Score(**names, target=target, measures=measures)


def time_to(row: Row, target: float) -> Seconds | None:
    """First time at which a run reached `target`; None if never."""
    metric, pairs = metric_of(row), zip(row["times"], values_of(row), strict=True)
    return next((time for time, value in pairs if metric.is_reached(value, target)), None)


def last_looks(accuracies: Sequence[float]) -> float:
    """The mean accuracy of a run's last five evaluations, because a single one is noisy."""
    return statistics.fmean(accuracies[-LAST_LOOKS:])


def median(values: Iterable[float | None], missing: float = -math.inf) -> float | None:
    """The median of `values`, where None counts as `missing`; None if the median is missing.

    >>> median([3.0, 1.0, None]), median([None, None, 2.0])
    (1.0, None)
    """
    middle = statistics.median(missing if value is None else value for value in values)
    return middle if math.isfinite(middle) else None


def grouped(rows: Iterable[Row], *fields: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by their values of `fields`, in order; None for a missing field.

    >>> grouped([{"ratio": 5, "seed": 0}, {"ratio": 5, "seed": 1}], "ratio").keys()
    dict_keys([(5,)])
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(field) for field in fields), []).append(row)
    return groups


def middle(rows: Iterable[Row], field: str) -> float | None:
    """The median of a field over the seeds; None if at least half of the rows lack it."""
    values = [row.get(field) for row in rows]
    return median(values) if values else None


def score_table(
    found: Sequence[Score],
    *,
    heading: str,
    note: str,
    setting: str = "setting",
    left_out: Collection[str] = (),
) -> Table:
    """Tabulate medians over the seeds; parts and settings have columns if there are several.

    Args:
        found: Scores in the order of the table's rows.
        heading: Heading of the table.
        note: Explanation.
        setting: Title of the column with the settings.
        left_out: Measures without a column.
    """
    runs: dict[tuple[str, str, str], list[Score]] = {}
    for each in found:
        runs.setdefault((each.group, each.setting, each.run), []).append(each)
    columns = {
        title: unit
        for each in found[:1]
        for title, (unit, _) in each.measures.items()
        if title not in left_out
    }
    names = ("part", setting, "run")
    told = [i for i in range(3) if names[i] == "run" or len({key[i] for key in runs}) > 1]
    return Table(
        heading=heading,
        columns=(*((names[i], "text") for i in told), *columns.items()),
        rows=tuple(
            (
                *(key[i] for i in told),
                *(
                    median(
                        (each[title] for each in some),
                        math.inf if unit in LESS_IS_BETTER else -math.inf,
                    )
                    for title, unit in columns.items()
                ),
            )
            for key, some in runs.items()
        ),
        note=note,
    )


def bars(
    found: Sequence[Score],
    measure: str,
    *,
    y_label: str,
    x_label: str = "",
    title: str | None = None,
    mark: tuple[str, str] | None = None,
) -> Panel:
    """Make a bar for each setting and run: the median and range over the seeds.

    Args:
        found: Scores of one group.
        measure: Title of the measure.
        y_label: Label of the measure.
        x_label: Label of the settings.
        title: Title above the panel; by default the measure's.
        mark: Line across the bars of each setting: name and measure of the line.
    """
    settings = {each.setting: each for each in found}
    series = []
    for run in dict.fromkeys(each.run for each in found):
        mine = [each for each in found if each.run == run]
        ranges = [_range([e[measure] for e in mine if e.setting == each]) for each in settings]
        middles, lows, highs = zip(*ranges, strict=True)
        series.append(Series(name=run, x=tuple(settings), y=middles, low=lows, high=highs))
    if mark is not None:
        y = tuple(each[mark[1]] for each in settings.values())
        series.append(Series(name=mark[0], x=tuple(settings), y=y, is_mark=True))
    return Panel(
        title=title or measure.capitalize(),
        kind="bars",
        x_label=x_label,
        y_label=y_label,
        y_unit=next((each.measures[measure][0] for each in found), "number"),
        series=tuple(series),
    )


def _range(values: Sequence[float | None]) -> tuple[float | None, float | None, float | None]:
    """The median, minimum and maximum; all None if at least half of the values are missing."""
    if not values or (middle := median(values)) is None:
        return None, None, None
    known = [each for each in values if each is not None]
    return middle, min(known), max(known)


def curves(
    rows: Iterable[Row],
    contest: ContestKey,
    title: str,
    x_label: str,
    *,
    x: str = "times",
    x_unit: Unit = "number",
    is_x_log: bool = False,
) -> Panel:
    """Make curves of all runs of one contest.

    Args:
        rows: Rows of this and possibly other contests.
        contest: Contest to draw.
        title: Title above the panel.
        x_label: Label of the horizontal axis.
        x: Field with the values on this axis.
        x_unit: Unit of this axis.
        is_x_log: Whether the axis is logarithmic; values of 0 are omitted.
    """
    series, metric = [], ACCURACY
    for row in rows:
        if contest_key(row) == contest:
            metric = metric_of(row)
            pairs = zip(row[x], values_of(row), strict=True)
            points = [pair for pair in pairs if pair[0] > 0 or not is_x_log]
            xs, ys = zip(*points, strict=True)
            series.append(Series(name=row["run"], x=xs, y=ys))
    return Panel(
        title=title,
        kind="lines",
        x_label=x_label,
        x_unit=x_unit,
        is_x_log=is_x_log,
        y_label=metric.name,
        y_unit=unit_of(metric),
        series=tuple(series),
    )
