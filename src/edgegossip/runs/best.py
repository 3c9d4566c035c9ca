"""The best model of a run by validation, and the end of a run that no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edgegossip.contract.errors import unknown_name
from edgegossip.contract.metrics import MetricSpec
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_counts, check_ranges

LOSS = MetricSpec(name="loss", higher_is_better=False)
"""The loss as a metric by which models are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBest:
    """Keep the best averaged model of a run, and end a run that no longer improves.

    The averaged model is measured on the *validation* split, at the moments at which a run is
    evaluated; the test split has no influence. Of equal values, the earliest counts. The model
    at the end of the run is kept as well.

    Args:
        patience: Number of evaluations in a row without a new best value after which the run
            ends; None never ends it. An evaluation of unchanged parameters does not count.
        metric: Name of the metric; "loss" for the loss; None for the task's chosen metric.
        rounds: Rounds between two evaluations on real machines, where each costs the exchange
            of the models; see `BestByValidation`. None for the rounds in which the workers
            process each sample about once, or for 1 if rounds have no fixed number of steps,
            and in a `TrainingLoop`. A simulated run has the evaluations of its experiment,
            which cost no time.

    Raises:
        ValueError: If a number is out of range, or a count is not whole.
    """

    patience: int | None = None
    metric: str | None = None
    rounds: int | None = None

    def __post_init__(self) -> None:
        check_counts(self, "patience", "rounds")
        check_ranges(self, patience="at least 1 or None", rounds="at least 1 or None")

    def find(self, metrics: Sequence[MetricSpec]) -> MetricSpec:
        """Find the metric among those of a task, the chosen one first, and the loss.

        Raises:
            ValueError: If the metric is unknown.
        """
        by_name = {LOSS.name: LOSS, **{each.name: each for each in metrics}}
        name = self.metric or next(iter(metrics), LOSS).name
        if name not in by_name:
            raise ValueError(unknown_name("metric", name, by_name))
        return by_name[name]

    def is_over(self, num_worse: int) -> bool:
        """Whether to end a run after so many evaluations in a row without a new best value."""
        return self.patience is not None and num_worse >= self.patience


def kept_best(keep: KeepBest | str | None) -> KeepBest | None:
    """The setting `keep`, in which "best" stands for the defaults.

    Raises:
        ValueError: If it is something else.

    >>> kept_best("best")
    KeepBest(patience=None, metric=None, rounds=None)
    """
    if keep is None or isinstance(keep, KeepBest):
        return keep
    if keep != "best":
        raise ValueError(
            f"keep must be 'best', a KeepBest such as KeepBest(patience=5), or None for the "
            f"last model alone; got {keep!r}"
        )
    return KeepBest()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BestModel:
    """The best averaged model of a run by validation.

    Attributes:
        params: The model's tensors by name, as in its `state_dict`.
        time: Time at which the model was measured.
        round: Number of rounds that all evaluated workers had completed.
        metric: Metric by which it was chosen.
        validation_value: Value of this metric on the validation split.
        metrics: The task's metrics of this model on the test split by name, the chosen one
            first; empty in a `TrainingLoop`, which has no test split.
    """

    params: dict[str, Tensor]
    time: Seconds
    round: int
    metric: MetricSpec
    validation_value: float
    metrics: Mapping[str, float]

    def __repr__(self) -> str:
        return (
            f"BestModel(time={self.time:.4g}, round={self.round}, "
            f"{self.metric.name}={self.validation_value:.4g} on validation data)"
        )

    @property
    def value(self) -> float:
        """The task's chosen metric on the test split; NaN in a `TrainingLoop`."""
        return next(iter(self.metrics.values()), math.nan)

    def summary(self) -> dict[str, Any]:
        """The fields of `summary.json`; see `Results.summary`."""
        measured = {f"kept_{MetricSpec(name=n).key}": each for n, each in self.metrics.items()}
        return {
            **measured,
            "kept_by": self.metric.name,
            "kept_validation_value": self.validation_value,
            "kept_time": self.time,
            "kept_round": self.round,
        }

    @classmethod
    def from_summary(
        cls,
        summary: Mapping[str, Any],
        params: dict[str, Tensor],
        metrics: Sequence[MetricSpec],
    ) -> BestModel:
        """Read the fields of `summary.json`.

        Raises:
            LookupError: If a field is missing.
            ValueError: If the metric is unknown.
        """
        return cls(
            params=params,
            time=summary["kept_time"],
            round=summary["kept_round"],
            metric=KeepBest(metric=summary["kept_by"]).find(metrics),
            validation_value=summary["kept_validation_value"],
            metrics={
                each.name: math.nan if (value := summary[f"kept_{each.key}"]) is None else value
                for each in metrics
            },
        )


@dataclass(slots=True)
class Selection:
    """Chooses the best of the averaged models of a run.

    Attributes:
        keep: The setting.
        metric: Metric by which models are chosen.
        params: Parameters of the best model so far, [num_params]; None before the first.
        value: Its value.
        time: The time at which it was measured.
        round: Number of rounds that all evaluated workers had completed then.
        index: Index of its evaluation in the history of the run.
        num_worse: Number of later evaluations.
    """

    keep: KeepBest
    metric: MetricSpec
    params: Tensor | None = None
    value: float = math.nan
    time: Seconds = 0.0
    round: int = 0
    index: int = 0
    num_worse: int = 0

    def add(
        self, params: Tensor, value: float, *, time: Seconds, round: int, index: int
    ) -> None:
        """Add an evaluation; a value that is not finite is never the best."""
        if math.isfinite(value) and (
            self.params is None or self.metric.is_better(value, self.value)
        ):
            self.params, self.value, self.num_worse = params, value, 0
            self.time, self.round, self.index = time, round, index
        else:
            self.num_worse += 1

    @property
    def is_over(self) -> bool:
        """Whether the run ends, because it has not improved for so long."""
        return self.keep.is_over(self.num_worse)
