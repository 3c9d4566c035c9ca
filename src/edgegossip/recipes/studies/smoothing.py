"""Smoothed curves of accuracy; each point is a mean over an interval of the same length."""

from __future__ import annotations

import math

from edgegossip.contract.protocol import Seconds
from edgegossip.runs.study import Row


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
