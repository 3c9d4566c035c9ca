"""Ranking of a plan's candidates, and the reason for the first place."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.contract.protocol import Seconds
from edgegossip.report import units
from edgegossip.report.log import activities, read_log, total
from edgegossip.runs.results import Results
from edgegossip.runs.scoreboard import (
    curve_fields,
    last_looks,
    learning_curve,
    metric_of,
    values_of,
)
from edgegossip.runs.study import Row

GAP = 0.01
"""Distance of the default target from the best value; see `MetricSpec.easier`."""
BUSY = 0.7
"""Minimum share of time for which an uplink must send to count as busy."""


def curve(results: Results) -> dict[str, Any]:
    """Metric, bytes and samples of a run over time, as JSON."""
    history = results.history
    return {
        **learning_curve(results),
        "bytes": [each.bytes_sent for each in history],
        "samples": [each.samples_processed for each in history],
        "joules": [each.joules for each in history],
    }


def diverged(metric: MetricSpec) -> dict[str, Any]:
    """Curve of a run whose loss was not finite."""
    return {**curve_fields(metric, [], []), "bytes": [], "samples": [], "joules": []}


def carried_out(rows: Iterable[Row]) -> list[Row]:
    """The rows of runs that were not left out to keep the plan's budget."""
    return [row for row in rows if not row.get("is_skipped")]


def has_learned(rows: Sequence[Row]) -> bool:
    """Whether any run became better than the untrained models, or these are unknown.

    In runs in which none has learned anything, settings differ by chance alone.
    """
    runs = by("run", rows)
    metric = metric_of(rows[0])
    untrained = [value for some in runs.values() for value in _untrained_value(some)]
    if not untrained:
        return True
    least = metric.easier(metric.best(untrained), -GAP)
    return any(metric.is_reached(final_value(some), least) for some in runs.values())


def use_of_machines(run_folder: Path, speeds: Sequence[float]) -> dict[str, float]:
    """Idle share of the machines' capacity, and share of time that the busiest uplink sends.

    A machine is idle while it waits or only sends. A server, which does not train, is always
    idle. Training that the end of the run cut off counts as training.

    Args:
        run_folder: Folder of the run.
        speeds: Samples per second of each machine.
    """
    log = read_log(run_folder / "events.jsonl")
    each = activities(log)
    idle = sum(speed * _idle(some.shares) for speed, some in zip(speeds, each, strict=True))
    return {
        "idle": idle / sum(speeds),
        "uplink": max(total(some.sending) for some in each) / log.duration,
    }


def _idle(shares: Mapping[str, float]) -> float:
    idle = shares["waiting"] + shares["sending"]
    return idle / (idle + shares["training"] or 1.0)


def crossing(row: Row, goal: float) -> Seconds:
    """Time at which a run first reached a goal, interpolated between evaluations; inf if never.

    >>> crossing({"times": [0.0, 2.0], "accuracies": [0.5, 0.9]}, goal=0.8)
    1.5
    """
    metric = metric_of(row)
    last_time: Seconds | None = None
    last_value = goal
    for time, value in zip(row["times"], values_of(row), strict=True):
        if metric.is_reached(value, goal):
            if last_time is None:
                return float(time)
            share = (goal - last_value) / (value - last_value)
            return float(round(last_time + share * (time - last_time), 9))
        last_time, last_value = time, value
    return math.inf


def mean_crossing(rows: Sequence[Row], goal: float) -> Seconds:
    """Time at which the mean over the seeds reaches a goal; inf if never.

    The median of the runs' own times would be as noisy as a single evaluation while a curve is
    flat.
    """
    curves = [row for row in rows if row["times"]]
    if not curves:
        return math.inf
    metric = metric_of(curves[0])
    times = sorted({time for row in curves for time in row["times"]})
    each = [np.interp(times, row["times"], values_of(row)) for row in curves]
    lost = (len(rows) - len(curves)) * _no_value(metric) if len(rows) > len(curves) else 0.0
    mean = (np.sum(each, axis=0) + lost) / len(rows)
    return crossing(curve_fields(metric, times, mean.tolist()), goal)


def _no_value(metric: MetricSpec) -> float:
    """Value of a diverged run: the worst possible one."""
    if metric.is_share:
        return 0.0 if metric.higher_is_better else 1.0
    return -math.inf if metric.higher_is_better else math.inf


def final_value(rows: Iterable[Row]) -> float:
    """Mean over the seeds of the runs' final values."""
    return statistics.fmean(
        last_looks(values_of(row)) if row["times"] else _no_value(metric_of(row))
        for row in rows
    )


def by(key: str, rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows by the value of a field."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def default_target(rows: Iterable[Row]) -> float:
    """Target one point short of the best value, or one percent if the metric is not a share.

    If untrained models reach this already, the target is one point better than they are, so
    that a run which has hardly learned does not count as fast.
    """
    runs = by("run", rows)
    metric = metric_of(next(iter(runs.values()))[0])
    target = metric.easier(metric.best(map(final_value, runs.values())), GAP)
    untrained = metric.best(value for some in runs.values() for value in _untrained_value(some))
    return metric.easier(untrained, -GAP) if metric.is_reached(untrained, target) else target


def _untrained_value(rows: Sequence[Row]) -> Iterator[float]:
    """Mean over the seeds of the values before training, if they were measured."""
    curves = [row for row in rows if row["times"]]
    if curves and all(row["times"][0] == 0 for row in curves):
        yield statistics.fmean(values_of(row)[0] for row in curves)


def in_order(rows: Iterable[Row], goal: float) -> list[str]:
    """Order runs by the time at which their mean reaches a goal, then by final value."""
    runs = by("run", rows)

    def key(run: str) -> tuple[Seconds, float]:
        found = runs[run]
        distance = metric_of(found[0]).shortfall(final_value(found), goal)
        return mean_crossing(found, goal), distance

    return sorted(runs, key=key)


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Expected figures of a candidate.

    Attributes:
        run: Label of the candidate.
        seconds: Time until the mean value over the seeds reaches the target; may be infinite.
        times: Time to the target, for each seed.
        value: Value of the metric at the end: the mean of the last five evaluations.
        num_bytes: Bytes sent by all machines before the target is reached, or in the whole run.
            This number and those below are medians over the seeds.
        joules: Energy of all machines and links, by the model of `machine.energy`, before the
            target is reached, or in the whole run.
        samples: Training samples processed before the target is reached, or in the whole run.
        idle: Unused share of the machines' capacity.
        uplink: Share of time in which the busiest uplink sends.
        metric: The metric.
    """

    run: str
    seconds: Seconds
    times: tuple[Seconds, ...]
    value: float
    num_bytes: float
    joules: float
    samples: float
    idle: float
    uplink: float
    metric: MetricSpec = ACCURACY

    @property
    def only(self) -> str:
        """Name of the candidate's algorithm."""
        return self.run.partition(",")[0]

    @property
    def time_text(self) -> str:
        """Time to the target, and its range over the seeds."""
        if math.isinf(self.seconds):
            return "never"
        last = max(self.times)
        until = "never" if math.isinf(last) else units.seconds(last)
        spread = f" ({units.number(min(self.times))} to {until})" if len(self.times) > 1 else ""
        return units.seconds(self.seconds) + spread


def ranked(rows: Iterable[Row], target: float | None) -> tuple[float, list[Outlook]]:
    """Order the candidates; also return the target.

    Finalists come before all other candidates, which may only have been lucky with few seeds.
    """
    rows = list(rows)
    goal = default_target(rows) if target is None else target
    runs = by("run", rows)
    finalists = {row["run"] for row in rows if row.get("is_final")}
    order = sorted(in_order(rows, goal), key=lambda run: run not in finalists)
    return goal, [_outlook(run, runs[run], goal) for run in order]


def _outlook(run: str, rows: Sequence[Row], goal: float) -> Outlook:
    seconds = mean_crossing(rows, goal)

    def middle(value: Callable[[Row], float]) -> float:
        return statistics.median(map(value, rows))

    return Outlook(
        run=run,
        seconds=seconds,
        times=tuple(crossing(row, goal) for row in rows),
        value=final_value(rows),
        num_bytes=middle(lambda row: _until(row, "bytes", seconds)),
        joules=middle(lambda row: _until(row, "joules", seconds)),
        samples=middle(lambda row: _until(row, "samples", seconds)),
        idle=middle(lambda row: row["idle"]),
        uplink=middle(lambda row: row["uplink"]),
        metric=metric_of(rows[0]),
    )


def _until(row: Row, field: str, time: Seconds) -> float:
    """Value of the counter `field` at a time, interpolated between evaluations."""
    if not row["times"]:
        return 0.0
    return float(np.interp(time, row["times"], row[field]))


# In words.


def tied(order: Sequence[Outlook]) -> list[Outlook]:
    """The candidates whose difference to the first is within the spread of the seeds.

    Their ranges of times to the target overlap. With one seed, the spread is unknown.
    """
    best, *others = order
    last = max(best.times)
    return [
        each
        for each in others
        if math.isfinite(each.seconds)
        and len(best.times) > 1 < len(each.times)
        and min(each.times) <= last
    ]


def no_winner(order: Sequence[Outlook], target: str = "the target") -> str | None:
    """Why no candidate is the best: none reaches the target, or even an untrained model does.

    None if the first candidate reaches the target by training.
    """
    best, *others = order
    if math.isinf(best.seconds):
        # With more seeds than the others have, a finalist may no longer reach it.
        who = "finalist" if any(math.isfinite(each.seconds) for each in others) else "candidate"
        closest = units.metric_value(best.value, best.metric)
        return f"no {who} reaches {target}; {best.run} comes closest, with {closest}"
    if best.seconds <= 0:
        return f"even the untrained model reaches {target}, so it says nothing about training"
    return None


def reason(order: Sequence[Outlook]) -> str:
    """Explain in two sentences why the first candidate is first, and what limits it.

    The time to the target is the number of samples divided by their rate, so the first
    candidate is ahead of the next in number, rate, or both. A tie has no reason. See
    `no_winner` for the absence of a first.
    """
    if (why := no_winner(order)) is not None:
        return f"{units.capitalized(why)}."
    best, *others = order
    reached = [each for each in others if not math.isinf(each.seconds)]
    if not reached:
        return f"Only {best.only} reaches the target. {_limit(best)}"
    ties = tied(order)
    if ties and reached[0] in ties:
        return f"{best.only} and {ties[0].only} differ by less than the seeds. {_limit(best)}"
    other = reached[0]
    fewer = other.samples / max(best.samples, 1.0)
    sooner = other.seconds / best.seconds
    if sooner / max(fewer, 1e-9) < fewer:
        mine, theirs = (units.number(_rounded(each.samples)) for each in (best, other))
        cause = f"it needs {mine} training samples, {other.only}, the next, {theirs}"
    elif best.idle < other.idle:
        cause = (
            f"{units.percent(best.idle, 0)} of the machines' capacity is idle, with "
            f"{other.only}, the next, {units.percent(other.idle, 0)}"
        )
        cause += _why_idle(best, other)
    else:
        # Busy machines may be slower: trainings and messages cost them time, too.
        mine, theirs = (units.number(_rounded(x.samples / x.seconds)) for x in (best, other))
        cause = f"it trains on {mine} samples/s, {other.only}, the next, on {theirs}"
    return f"{best.only} is first because {cause}. {_limit(best)}"


def _why_idle(best: Outlook, other: Outlook) -> str:
    if other.uplink >= BUSY and best.num_bytes < other.num_bytes:
        return (
            f", whose busiest uplink sends for {units.percent(other.uplink, 0)} of it "
            f"({units.data_size(other.num_bytes)} to the target, not "
            f"{units.data_size(best.num_bytes)})"
        )
    return ", which wait for each other" if other.idle > best.idle + 0.05 else ""


def _limit(best: Outlook) -> str:
    if best.uplink >= BUSY and best.idle >= 0.1:
        return (
            f"Its limit is the links: the busiest uplink sends for "
            f"{units.percent(best.uplink, 0)} of the time."
        )
    if best.idle >= 0.1:
        return "Its limit is waiting: for slower machines, or for messages on their way."
    return "Its limit is the machines, which train nearly all the time."


def _rounded(count: float) -> float:
    return round(count, -2) if count >= 1000 else count
