"""Scores of races: each run against EpochGossip on the same data, machines and seed."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from edgegossip.contract.protocol import Seconds
from edgegossip.runs.exhibits import Table
from edgegossip.runs.scoreboard import Measures, Score, score_table, scores
from edgegossip.runs.study import Row
from studies.race import BASELINE


def smoothed(row: Row, width: Seconds) -> Row:
    """Replace a curve with its means over intervals of `width`, up to the last whole interval.

    A noisy curve that is measured more often passes a target sooner. The new curve has one
    point for each interval.

    Args:
        row: Row with `times`, ascending, and `accuracies`; each accuracy holds until the next.
        width: Length of the intervals in seconds, above 0.

    >>> smoothed({"times": [1.0, 2.0, 4.0], "accuracies": [0.2, 0.4, 0.6]}, width=2.0)
    {'times': [2.0, 4.0], 'accuracies': [0.2, 0.4]}
    """
    times, accuracies = row["times"], row["accuracies"]
    # Kept results have five digits, which must not take away a last whole interval.
    num_intervals = math.floor(times[-1] / width + 0.01)
    ends = [(k + 1) * width for k in range(num_intervals)]
    means = [mean_accuracy(times, accuracies, end - width, end) for end in ends]
    found = [(end, mean) for end, mean in zip(ends, means, strict=True) if mean is not None]
    return {**row, "times": [end for end, _ in found], "accuracies": [m for _, m in found]}


def mean_accuracy(
    times: list[Seconds], accuracies: list[float], start: Seconds, end: Seconds
) -> float | None:
    """The time-weighted mean accuracy between `start` and `end`; None before the first one.

    Each accuracy holds until the next.

    >>> mean_accuracy([1.0, 2.0, 4.0], [0.2, 0.4, 0.6], start=1.0, end=5.0)
    0.4
    """
    until = [*times[1:], math.inf]
    weights = [max(0.0, min(end, b) - max(start, a)) for a, b in zip(times, until, strict=True)]
    total = sum(weights)
    weighted = zip(weights, accuracies, strict=True)
    return sum(weight * accuracy for weight, accuracy in weighted) / total if total else None


PAPER_LOSS = 0.0078
"""The paper's mean loss of accuracy."""
_ENOUGH = 0.98
"""Share of EpochGossip's samples that counts as all, as messages take time, too."""
LOSS = "loss of best accuracy"
"""A measure that only figures show."""


def standings(
    rows: Iterable[Row], target_gap: float, *, is_smoothed: bool = False
) -> list[Score]:
    """Compare each run with EpochGossip's run of the same group, machines and seed.

    Args:
        rows: Rows of `Race.cells`, in any order.
        target_gap: The target is EpochGossip's best accuracy minus this gap, in [0, 1].
        is_smoothed: Compare means over an epoch's worth of samples; see `smoothed`.
    """
    found = on_each_setup(rows)
    if is_smoothed:
        found = [
            each if each["run"] == BASELINE else equal_looks(each, each["machines"])
            for each in found
        ]
    return scores(found, BASELINE, target_gap, _measures)


def equal_looks(row: Row, machines: Mapping[str, Any]) -> Row:
    """Average a curve over intervals in which a run processes an epoch's worth of samples.

    A run that waits after each epoch is measured as often as EpochGossip, so its curve stays.

    Args:
        row: Row of a run, whose workers are otherwise assumed never to wait.
        machines: The run's part of the `setups` in EpochGossip's row.
    """
    if row.get("waits"):
        return row
    epoch = machines["epoch_ends"][1] - machines["epoch_ends"][0]
    return smoothed(row, epoch / machines["throughput_bound"])


def on_each_setup(rows: Iterable[Row]) -> list[Row]:
    """Prepare the rows of races for a scoreboard, with EpochGossip's curve on each setup.

    Args:
        rows: Rows of `Race.cells`, in any order.
    """
    rows = list(rows)
    found: list[Row] = []
    for baseline in rows:
        if baseline["run"] != BASELINE:
            continue
        for setup, times in baseline["setups"].items():
            added = {"setting": setup, "machines": times}
            ends = times["epoch_ends"]
            curve = {**baseline, **added, "times": ends, "equal_epochs_time": ends[-1]}
            found.append({**curve, "at_equal_samples": _interpolated_final(curve, ends[-1])})
            own = (baseline["group"], baseline["seed"], setup)
            found += [
                {**row, **added, "at_equal_samples": _at_equal_samples(row, baseline)}
                for row in rows
                if (row["group"], row["seed"], row["setup"]) == own
            ]
    return found


def _measures(
    row: Row, baseline: Row | None, time: Seconds | None, speedup: float | None
) -> Measures:
    assert baseline is not None  # without it there is no row
    machines, best = row["machines"], max(row["accuracies"])
    ends, end = baseline["equal_epochs_time"], row["equal_epochs_time"]
    # A little later, when the sent models have been averaged and measured.
    settled = 0.2 * machines["round_seconds"]
    accuracy = None if end is None else _accuracy_at(row, end + settled)
    loss = None if accuracy is None else baseline["accuracies"][-1] - accuracy
    bound = machines["throughput_bound"]
    of_bound = None if speedup is None or row["run"] == BASELINE else speedup / bound
    return {
        "T_max / T_min": ("number", machines["time_ratio"]),
        # Samples per second if no worker waits, over EpochGossip's.
        "bound": ("times", bound),
        "time to target": ("seconds", time),
        "speed-up": ("times", speedup),
        "of the bound": ("percent", of_bound),
        "best accuracy": ("percent", best),
        "final accuracy": ("percent", _final_accuracy(row)),
        "final accuracy, equal samples": ("percent", row["at_equal_samples"]),
        # The paper's measures: EpochGossip's time for all of its epochs / the run's for as many
        # rounds, and the accuracy lost by then; None without rounds.
        "speed-up, equal epochs": ("times", ends / end if end else None),
        "accuracy loss, equal epochs": ("points", loss),
        LOSS: ("points", max(baseline["accuracies"]) - best),
    }


def _accuracy_at(row: Row, time: Seconds) -> float | None:
    """The accuracy at `time`, constant between evaluations; None after the run has ended."""
    if row["times"][-1] < time - 1e-9 * time and row["run"] != BASELINE:
        return None
    index = bisect.bisect_right(row["times"], time) - 1
    accuracy: float = row["accuracies"][index]
    return accuracy


def _final_accuracy(row: Row) -> float:
    """The mean accuracy over the run's last fifth, because a single evaluation is noisy."""
    times, accuracies = row["times"], row["accuracies"]
    mean = mean_accuracy(times, accuracies, 0.8 * times[-1], times[-1])
    last: float = accuracies[-1]
    return last if mean is None else mean


def _at_equal_samples(row: Row, baseline: Row) -> float | None:
    """The final accuracy if the run had ended after as many samples as EpochGossip's.

    None if it ended after fewer than 98 % of them.
    """
    share = baseline["num_epochs"] * baseline["num_train"] / row["samples_processed"]
    if share > 1 / _ENOUGH:
        return None
    return _interpolated_final(row, min(1.0, share) * row["times"][-1])


def _interpolated_final(row: Row, end: Seconds) -> float:
    """The mean over the last fifth before `end` of a curve that is linear between evaluations.

    If each accuracy held until the next, a rising curve would be lower the fewer its
    evaluations, and EpochGossip has fewer.
    """
    since = 0.8 * end
    times = np.array([since, *(time for time in row["times"] if since < time < end), end])
    accuracies = np.interp(times, row["times"], row["accuracies"])
    means = (accuracies[:-1] + accuracies[1:]) / 2
    return float(np.average(means, weights=np.diff(times)))


def race_table(
    found: Sequence[Score], heading: str, target_gap: float, dash: str, looks: str = ""
) -> Table:
    """Tabulate each run's medians over the seeds, with the bound on each speed-up.

    Args:
        found: Scores in the order of the rows.
        heading: Heading of the table.
        target_gap: As in `standings`.
        dash: Further meaning of a dash, in addition to missing epochs.
        looks: When evaluations take place, for the description of the target.
    """
    note = (
        f"Medians over the seeds; a dash: {dash}, or it has no epochs. The target is "
        f"EpochGossip's best accuracy less {100 * target_gap:g} percentage points{looks}. The "
        "bound is the gain in samples per second from eliminating waiting alone: sum(v) / (E "
        "v_min). At equal epochs, the paper's measure, a slow platform does less work than in "
        "EpochGossip and the bound is T_max / T_min: read it together with the loss of "
        "accuracy. Final accuracy is the mean over the last fifth of the time; at equal "
        "samples, over the last fifth of the time until a run has processed as many samples as "
        "EpochGossip, with curves interpolated (a dash: it processed fewer)."
    )
    return score_table(found, heading=heading, note=note, setting="machines", left_out={LOSS})
