"""Measures for runs of any algorithm."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.contract.protocol import Payload


def consensus_distance(params: Tensor) -> float:
    r"""Distance of workers from agreement: :math:`\sqrt{\frac1n \sum_i \|x_i - \bar x\|^2}`.

    Exactly 0 if all float32 parameters agree.

    Args:
        params: One row for each worker, [num_workers, num_params].

    Raises:
        ValueError: If `params` is not two-dimensional, or has no rows.

    >>> consensus_distance(torch.tensor([[0.0, 0.0], [6.0, 8.0]]))
    5.0
    """
    if params.ndim != 2 or len(params) == 0:
        raise ValueError(
            f"params must be [num_workers, num_params], got shape {list(params.shape)}; "
            "stack one row for each worker"
        )
    mean = params.mean(dim=0, dtype=torch.float64)
    return float(torch.linalg.vector_norm(params - mean)) / math.sqrt(len(params))


def staleness(receiver_round: int, message_round: int) -> int:
    """Staleness of a message for its receiver, in rounds; 0 if the sender is ahead.

    >>> staleness(receiver_round=7, message_round=5), staleness(5, 7)
    (2, 0)
    """
    return receiver_round - message_round if receiver_round > message_round else 0


def payload_num_bytes(payload: Payload) -> int:
    """Bytes of all tensors, without names and header.

    >>> payload_num_bytes({"params": torch.zeros(3), "age": torch.zeros(1, dtype=torch.int8)})
    13
    """
    return sum(tensor.nbytes for tensor in payload.values())


# Names, units and directions of metrics.


PERCENT = "percent"
"""Unit of shares in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """Name, unit and direction of a metric, as a report needs them.

    Args:
        name: Name as shown in reports, e.g. "bits per character".
        unit: Unit of its values: "percent" for shares in [0, 1], any other word, or empty for
            plain numbers.
        higher_is_better: Whether higher values are better; false for errors and perplexities.

    Raises:
        ValueError: If the name has no letter or digit.

    >>> error = MetricSpec(name="mean error", unit="years", higher_is_better=False)
    >>> error.key, error.best([2.0, 1.0, 3.0]), error.is_reached(1.5, target=2.0)
    ('mean_error', 1.0, True)
    """

    name: str
    unit: str = ""
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError(
                f"a metric needs a name with a letter or a digit, got {self.name!r}, e.g. 'F1'"
            )

    @property
    def key(self) -> str:
        """The name in files: lower case, with underscores."""
        return re.sub(r"[^0-9a-z]+", "_", self.name.lower()).strip("_")

    @property
    def is_share(self) -> bool:
        """Whether values are in [0, 1] and shown as percent."""
        return self.unit == PERCENT

    def is_reached(self, value: float, target: float) -> bool:
        """Whether `value` is as good as `target`, or better; never if it is NaN."""
        return value >= target if self.higher_is_better else value <= target

    def is_better(self, value: float, other: float) -> bool:
        """Whether `value` is better than `other`; not if they are equal, or one is NaN."""
        return value > other if self.higher_is_better else value < other

    def best(self, values: Iterable[float]) -> float:
        """The best value; NaN only if there is no other value."""
        return self._extreme(values, self.higher_is_better)

    def worst(self, values: Iterable[float]) -> float:
        """The worst value; NaN only if there is no other value."""
        return self._extreme(values, not self.higher_is_better)

    def shortfall(self, value: float, reference: float) -> float:
        """The amount by which `value` is worse than `reference`; below 0 if it is better.

        >>> MetricSpec(name="perplexity", higher_is_better=False).shortfall(3.0, 2.5)
        0.5
        """
        return reference - value if self.higher_is_better else value - reference

    def easier(self, value: float, gap: float) -> float:
        """A target easier than `value`, by `gap` for shares, or else by `gap * abs(value)`.

        >>> ACCURACY.easier(0.9, 0.25)
        0.65
        >>> MetricSpec(name="perplexity", higher_is_better=False).easier(8.0, 0.25)
        10.0
        """
        distance = gap if self.is_share else gap * abs(value)
        return value - distance if self.higher_is_better else value + distance

    def _extreme(self, values: Iterable[float], is_highest: bool) -> float:
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return math.nan
        return max(known) if is_highest else min(known)


ACCURACY = MetricSpec(name="accuracy", unit=PERCENT)
"""The metric of run folders that name no metric."""
