"""Targets that end a run, for measuring the time to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edgegossip.core.errors import unknown_name
from edgegossip.core.metric_spec import MetricSpec
from edgegossip.core.ranges import check_ranges
from edgegossip.experiments.results import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTarget:
    """A target loss that ends a run, for measurements of the time to this loss.

    Args:
        loss: Upper limit for the mean loss of the last `num_looks` evaluations, above 0.
        num_looks: Number of evaluations in the mean, at least 1; a single one is noisy.

    Raises:
        ValueError: If a number is out of range.
    """

    loss: float
    num_looks: int = 10

    def __post_init__(self) -> None:
        check_ranges(self, loss="above 0 and finite", num_looks="at least 1")

    def is_reached(self, losses: Sequence[float]) -> bool:
        """Whether a run with these losses, in order of time, has reached the target.

        >>> LossTarget(loss=1.0, num_looks=2).is_reached([3.0, 1.5, 0.5])
        True
        """
        last = losses[-self.num_looks :]
        return len(last) == self.num_looks and sum(last) <= self.loss * self.num_looks


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricTarget:
    """A target of a metric that ends a run, for measurements of the time to this target.

    Args:
        value: Value that the mean of the last `num_looks` evaluations must reach: from below if
            higher values are better, otherwise from above.
        metric: Name of the metric; None for the task's chosen one.
        num_looks: Number of evaluations in the mean, at least 1; a single one is noisy.

    Raises:
        ValueError: If a number is out of range.
    """

    value: float
    metric: str | None = None
    num_looks: int = 1

    def __post_init__(self) -> None:
        check_ranges(self, num_looks="at least 1")
        if not math.isfinite(self.value):
            raise ValueError(f"value must be finite, got {self.value!r}")

    def find(self, metrics: Sequence[MetricSpec]) -> MetricSpec:
        """Find the metric among those of a task, the chosen one first.

        Raises:
            ValueError: If the metric is unknown.
        """
        by_name = {each.name: each for each in metrics}
        name = self.metric or metrics[0].name
        if name not in by_name:
            raise ValueError(unknown_name("metric", name, by_name))
        return by_name[name]

    def is_reached(self, values: Sequence[float], metric: MetricSpec) -> bool:
        """Whether a run with these values, in order of time, has reached the target.

        >>> falls = MetricSpec(name="perplexity", higher_is_better=False)
        >>> MetricTarget(value=2.0).is_reached([3.0, 1.9], falls)
        True
        """
        last = values[-self.num_looks :]
        is_long = len(last) == self.num_looks
        return is_long and metric.is_reached(sum(last) / len(last), self.value)


RunTarget: TypeAlias = LossTarget | MetricTarget


def has_come_to(
    target: RunTarget | None, history: Sequence[Evaluation], metrics: Sequence[MetricSpec]
) -> bool:
    """Whether a run with these evaluations has reached its target; false without a target."""
    match target:
        case LossTarget():
            return target.is_reached([each.loss for each in history])
        case MetricTarget():
            metric = target.find(metrics)
            return target.is_reached([each.metrics[metric.name] for each in history], metric)
    return False
