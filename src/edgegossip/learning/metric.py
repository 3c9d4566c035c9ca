"""Metrics: sums over the samples of a batch, which add up over batches and workers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from edgegossip.core.errors import unknown_name
from edgegossip.core.metric_spec import MetricSpec
from edgegossip.core.ranges import check_type
from edgegossip.learning.dataset import Dataset
from edgegossip.learning.nested import num_samples

RESERVED = {
    *("type", "time", "epochs", "loss", "consensus_distance", "bytes_sent"),
    "samples_processed",
}
"""Names of other fields in a run's log, which no metric may have."""


@dataclass(frozen=True, kw_only=True)
class Metric(MetricSpec, ABC):
    """Base of metrics; subclasses are frozen dataclasses that give `name` a default.

    The mean of a metric's values over batches is not its value over all samples if batches
    differ in size, or if the metric is not a mean (R2, F1, perplexity). A metric therefore
    gives sums, and its value is computed once, from the sums over all batches of all workers.

    If the loss is finite, a value that is not finite is an error before any training; later, it
    causes one warning, and ``null`` in the files. The built-in metrics raise `DataError` if the
    shapes of outputs and targets do not match, because PyTorch would broadcast them.

    Args:
        name: See `MetricSpec`.
        unit: See `MetricSpec`.
        higher_is_better: See `MetricSpec`.
    """

    needs_classes: ClassVar[bool] = False
    """Whether the metric compares outputs with class labels."""

    @property
    def spec(self) -> MetricSpec:
        """Name, unit and direction only."""
        return MetricSpec(
            name=self.name, unit=self.unit, higher_is_better=self.higher_is_better
        )

    @abstractmethod
    def sums(self, outputs: Any, targets: Any) -> Tensor:  # noqa: ANN401
        """Sums over the samples of a batch; their shape is the same for all batches.

        Args:
            outputs: First result of the task's `forward`: the model's outputs.
            targets: Second result of `forward`.
        """

    @abstractmethod
    def value(self, sums: Tensor) -> float:
        """Compute the value from the sums over all samples, float64."""


@dataclass(frozen=True, kw_only=True)
class MeanMetric(Metric):
    """Your own mean over samples, such as a share of correct answers.

    Args:
        name: See `MetricSpec`.
        unit: See `MetricSpec`.
        higher_is_better: See `MetricSpec`.
        of: ``of(outputs, targets)``: the mean over a batch; batches are weighted by their
            numbers of samples.

    >>> def bias(outputs, targets): return (outputs - targets).mean()
    >>> metric = MeanMetric(name="bias", of=bias, higher_is_better=False)
    >>> metric.value(metric.sums(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 2.0])))
    1.0
    """

    of: Callable[[Any, Any], Tensor | float]

    def sums(self, outputs: Any, targets: Any) -> Tensor:  # noqa: ANN401
        number = num_samples(targets)
        return torch.tensor([float(self.of(outputs, targets)) * number, number]).double()

    def value(self, sums: Tensor) -> float:
        total, number = sums.tolist()
        return total / number if number else math.nan


@dataclass(frozen=True, kw_only=True)
class SumsMetric(Metric):
    """Your own metric that is not a mean over samples.

    Args:
        name: See `MetricSpec`.
        unit: See `MetricSpec`.
        higher_is_better: See `MetricSpec`.
        of: ``of(outputs, targets)``: sums over the samples of a batch, in one tensor, of the
            same shape for all batches.
        finish: ``finish(sums)``: the value, from the sums over all samples.

    >>> def errors(outputs, targets):
    ...     return torch.stack([(outputs - targets).square().sum(), torch.tensor(len(targets))])
    >>> rmse = SumsMetric(name="RMSE", of=errors, finish=lambda s: (s[0] / s[1]).sqrt(),
    ...                   higher_is_better=False)
    >>> rmse.value(rmse.sums(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])))
    3.0
    """

    of: Callable[[Any, Any], Tensor]
    finish: Callable[[Tensor], Tensor | float]

    def sums(self, outputs: Any, targets: Any) -> Tensor:  # noqa: ANN401
        return self.of(outputs, targets)

    def value(self, sums: Tensor) -> float:
        return float(self.finish(sums))


@dataclass(slots=True, eq=False)
class Measurement:
    """Loss and metrics on some samples, as sums that add up over several parts.

    Attributes:
        num_samples: Number of samples.
        total_loss: Sum of the loss over `num_terms`.
        num_terms: Number of terms in the loss: samples, or tokens.
        sums: Sums of each metric, by name, float64.
    """

    num_samples: int = 0
    total_loss: float = 0.0
    num_terms: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, metric: Metric, sums: Tensor) -> None:
        """Add the sums of a batch."""
        sums = sums.detach().to("cpu", torch.float64)
        before = self.sums.get(metric.name)
        self.sums[metric.name] = sums if before is None else before + sums

    def __add__(self, other: Measurement) -> Measurement:
        names = {**self.sums, **other.sums}
        parts = (
            [each.sums[name] for each in (self, other) if name in each.sums] for name in names
        )
        return Measurement(
            self.num_samples + other.num_samples,
            self.total_loss + other.total_loss,
            self.num_terms + other.num_terms,
            {name: torch.stack(part).sum(0) for name, part in zip(names, parts, strict=True)},
        )

    @property
    def loss(self) -> float:
        """Mean loss."""
        return self.total_loss / self.num_terms if self.num_terms else math.nan

    def values(self, metrics: Iterable[Metric]) -> dict[str, float]:
        """The value of each metric, by name."""
        return {each.name: float(each.value(self.sums[each.name])) for each in metrics}


def check_metrics(
    metrics: Sequence[Metric], target_metric: str | None, dataset: Dataset
) -> None:
    """Check the metrics of a task.

    Raises:
        ValueError: If there is no metric, one is not a `Metric`, names are equal or reserved,
            `target_metric` is unknown, or a metric does not fit the data.
    """
    check_type("metrics", metrics, Sequence, "(R2(),)")
    if not metrics:
        raise ValueError("metrics is empty; name at least one, e.g. metrics=(R2(),)")
    for metric in metrics:
        check_type("a metric", metric, Metric, "MeanMetric(name='bias', of=bias)")
    keys = Counter(metric.key for metric in metrics)
    for metric in metrics:
        if keys[metric.key] > 1 or metric.key in RESERVED:
            raise ValueError(
                f"a metric cannot be called {metric.name!r}, which is the name of another "
                "one or of a field of the log; choose another name"
            )
        if metric.needs_classes and not dataset.num_classes:
            raise ValueError(
                f"{metric.name} needs classes, and {dataset.name!r} has none; give "
                "the task metrics that fit, e.g. metrics=(R2(), MeanAbsoluteError())"
            )
    names = [metric.name for metric in metrics]
    if target_metric not in (None, *names):
        raise ValueError(unknown_name("target_metric", str(target_metric), names))
