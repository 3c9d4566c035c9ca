"""What races come to: times to targets, speed-ups, accuracies; as tables and figures."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgegossip.core.protocol import Seconds
from edgegossip.experiments.exhibits import Panel, Series, Table, Unit
from edgegossip.experiments.study import Row
from edgegossip.recipes.studies.race import BASELINE


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One run of a race, against EpochGossip of the same seed.

    Attributes:
        group: Part of the study.
        setup: The machines.
        run: Who.
        seed: Of both.
        target: The accuracy to get to, in [0, 1].
        time: Virtual seconds to it; None if never.
        speedup: EpochGossip's time to it over that.
        throughput_bound: How many times the samples per second of EpochGossip are processed
            where nobody waits.
        time_ratio: T_max / T_min.
        best_accuracy: Of all evaluations.
        final_accuracy: Mean over the last fifth of its time.
        equal_epochs_speedup: The paper's measure: EpochGossip's time for all of its epochs
            over this run's for as many rounds; None without rounds.
        accuracy_loss: EpochGossip's accuracy less this run's, after as many rounds.
        accuracy_gap: EpochGossip's best accuracy less this run's.
    """

    group: str
    setup: str
    run: str
    seed: int
    target: float
    time: Seconds | None
    speedup: float | None
    throughput_bound: float
    time_ratio: float
    best_accuracy: float
    final_accuracy: float
    equal_epochs_speedup: float | None
    accuracy_loss: float | None
    accuracy_gap: float

    @property
    def of_bound(self) -> float | None:
        """Speed-up over the throughput bound; None for EpochGossip itself."""
        if self.speedup is None or self.run == BASELINE:
            return None
        return self.speedup / self.throughput_bound


def standings(rows: Iterable[Row], target_gap: float) -> list[Standing]:
    """Set each run beside the EpochGossip of its group, number of workers and seed.

    Args:
        rows: Of `Race.cells`, in any order.
        target_gap: The target is EpochGossip's best accuracy less this, in [0, 1].
    """
    rows = list(rows)
    baselines = [row for row in rows if row["run"] == BASELINE]
    found: list[Standing] = []
    for baseline in baselines:
        target = max(baseline["accuracies"]) - target_gap
        for setup, times in baseline["setups"].items():
            curve = {"times": times["epoch_ends"], "accuracies": baseline["accuracies"]}
            whole = {
                "equal_epochs_time": times["epoch_ends"][-1],
                **{name: baseline[name] for name in ("group", "run", "seed")},
                **curve,
            }
            others = [
                row
                for row in rows
                if (row["group"], row["seed"], row["setup"])
                == (baseline["group"], baseline["seed"], setup)
            ]
            found += [_standing(row, whole, setup, times, target) for row in (whole, *others)]
    return found


def _standing(
    row: Row, baseline: Row, setup: str, times: Mapping[str, float], target: float
) -> Standing:
    time, reference = time_to(row, target), time_to(baseline, target)
    ends, end = baseline["equal_epochs_time"], row["equal_epochs_time"]
    # A little later, when the models that were sent have been averaged and measured.
    settled = 0.2 * times["round_seconds"]
    accuracy = None if end is None else _accuracy_at(row, end + settled)
    return Standing(
        group=row["group"],
        setup=setup,
        run=row["run"],
        seed=row["seed"],
        target=target,
        time=time,
        speedup=reference / time if reference is not None and time else None,
        throughput_bound=times["throughput_bound"],
        time_ratio=times["time_ratio"],
        best_accuracy=max(row["accuracies"]),
        final_accuracy=_final_accuracy(row),
        equal_epochs_speedup=ends / end if end else None,
        accuracy_loss=None if accuracy is None else baseline["accuracies"][-1] - accuracy,
        accuracy_gap=max(baseline["accuracies"]) - max(row["accuracies"]),
    )


def time_to(row: Row, target: float) -> Seconds | None:
    """When a run first had an accuracy of `target`; None if it never had."""
    pairs = zip(row["times"], row["accuracies"], strict=True)
    return next((time for time, accuracy in pairs if accuracy >= target), None)


def _accuracy_at(row: Row, time: Seconds) -> float | None:
    """The accuracy at `time`, which holds until it changes; None where the run was over."""
    if row["times"][-1] < time - 1e-9 * time and row["run"] != BASELINE:
        return None
    index = bisect.bisect_right(row["times"], time) - 1
    accuracy: float = row["accuracies"][index]
    return accuracy


def _final_accuracy(row: Row) -> float:
    """The mean over the last fifth of the run: one evaluation alone would be chance."""
    times: list[Seconds] = row["times"]
    end, total = times[-1], 0.0
    since = 0.8 * end
    for (start, stop), accuracy in zip(pairwise(times), row["accuracies"], strict=False):
        total += max(0.0, stop - max(start, since)) * accuracy
    return total / (end - since)


def median(values: Iterable[float | None], missing: float = -math.inf) -> float | None:
    """The middle of `values`, None counting as `missing`; None if that is the middle.

    >>> median([3.0, 1.0, None]), median([None, None, 2.0])
    (1.0, None)
    """
    middle = statistics.median(missing if value is None else value for value in values)
    return middle if math.isfinite(middle) else None


def by_run(found: Iterable[Standing]) -> dict[tuple[str, str, str], list[Standing]]:
    """The standings of all seeds, by group, setup and run."""
    groups: dict[tuple[str, str, str], list[Standing]] = {}
    for each in found:
        groups.setdefault((each.group, each.setup, each.run), []).append(each)
    return groups


def race_table(found: Sequence[Standing], heading: str, note: str) -> Table:
    """Medians over the seeds of each run, with the bound beside each speed-up.

    Parts and machines have a column only if there are several.
    """
    keys = list(by_run(found))
    titles = ("part", "machines", "run")
    told = [i for i in range(3) if titles[i] == "run" or len({key[i] for key in keys}) > 1]
    columns: tuple[tuple[str, Unit], ...] = (
        *((titles[i], "text") for i in told),
        ("T_max / T_min", "number"),
        ("bound", "times"),
        ("time to target", "seconds"),
        ("speed-up", "times"),
        ("of the bound", "percent"),
        ("best accuracy", "percent"),
        ("final accuracy", "percent"),
        ("speed-up, equal epochs", "times"),
        ("accuracy loss, equal epochs", "points"),
    )
    rows = [
        (
            *(key[i] for i in told),
            some[0].time_ratio,
            some[0].throughput_bound,
            median((each.time for each in some), math.inf),
            median(each.speedup for each in some),
            median(each.of_bound for each in some),
            median(each.best_accuracy for each in some),
            median(each.final_accuracy for each in some),
            median(each.equal_epochs_speedup for each in some),
            median((each.accuracy_loss for each in some), math.inf),
        )
        for key, some in by_run(found).items()
    ]
    return Table(heading=heading, columns=columns, rows=tuple(rows), note=note)


def bars(
    found: Sequence[Standing],
    value: Callable[[Standing], float | None],
    *,
    title: str,
    y_label: str,
    y_unit: Unit,
    x_label: str = "",
    has_bound: bool = False,
) -> Panel:
    """A bar for each setup and run: the median over the seeds, with their range.

    Args:
        found: Of one group.
        value: What is drawn.
        title: Above the panel.
        y_label: What `value` is.
        y_unit: Its unit.
        x_label: What the setups are.
        has_bound: Mark the throughput bound of each setup.
    """
    setups = tuple(dict.fromkeys(each.setup for each in found))
    runs = dict.fromkeys(each.run for each in found)
    series = [_bar_series(found, run, setups, value) for run in runs]
    if has_bound:
        bounds = {each.setup: each.throughput_bound for each in found}
        marks = tuple(bounds[setup] for setup in setups)
        series.append(Series(name="throughput bound", x=setups, y=marks, is_mark=True))
    return Panel(
        title=title,
        kind="bars",
        x_label=x_label,
        y_label=y_label,
        y_unit=y_unit,
        series=tuple(series),
    )


def _bar_series(
    found: Sequence[Standing],
    run: str,
    setups: tuple[str, ...],
    value: Callable[[Standing], float | None],
) -> Series:
    middles, lows, highs = [], [], []
    for setup in setups:
        values = [value(each) for each in found if (each.run, each.setup) == (run, setup)]
        known = [each for each in values if each is not None]
        middle = median(values) if values else None
        middles.append(middle)
        lows.append(min(known) if middle is not None else None)
        highs.append(max(known) if middle is not None else None)
    return Series(name=run, x=setups, y=tuple(middles), low=tuple(lows), high=tuple(highs))


def curves(rows: Iterable[Row], group: str, setup: str, seed: int) -> Panel:
    """Accuracy against virtual time of all runs of one group, setup and seed."""
    series = []
    for row in rows:
        if (row["group"], row["seed"]) != (group, seed):
            continue
        if row["run"] == BASELINE and setup in row["setups"]:
            times = row["setups"][setup]["epoch_ends"]
        elif row["setup"] == setup:
            times = row["times"]
        else:
            continue
        series.append(Series(name=row["run"], x=tuple(times), y=tuple(row["accuracies"])))
    return Panel(
        title=group,
        kind="lines",
        x_label="virtual time (s)",
        y_label="accuracy",
        y_unit="percent",
        series=tuple(series),
    )
