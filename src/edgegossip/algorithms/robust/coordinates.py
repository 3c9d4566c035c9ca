"""Trimmed mean and median of each coordinate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from edgegossip.contract import Mixed, Rank, RobustRule, check_counts, check_ranges
from edgegossip.contract.robust import counted, shares_of


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(RobustRule):
    """In each coordinate, average without the `num_liars` largest and smallest values.

    All vectors count equally, the worker's own like the others, whatever their weights in the
    mixing matrix. If at most twice as many values as are to be left out have come, only the
    middle one or two are left.

    Args:
        num_liars: Number of values to leave out at each end, at least 1.

    Raises:
        ValueError: If `num_liars` is out of range.

    References:
        Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
        ICML 2018, arXiv:1803.01498, Algorithm 1, for gradients at a server. Departure: a number
        instead of a share.
    """

    is_coordinatewise: ClassVar[bool] = True
    num_liars: int = 1

    def __post_init__(self) -> None:
        check_counts(self, "num_liars")
        check_ranges(self, num_liars="at least 1")

    def combine(
        self, own: Tensor, others: Mapping[Rank, Tensor], weights: Mapping[Rank, float]
    ) -> Mixed:
        """Trim each coordinate, and average the rest."""
        return _trimmed(self.num_liars, own, others, weights)


@dataclass(frozen=True, kw_only=True)
class CoordinateMedian(RobustRule):
    """Take the median in each coordinate; of an even number, the mean of the middle two.

    Fewer than half of the vectors may be false; all count equally, as in `TrimmedMean`.

    References:
        Yin et al., ICML 2018, arXiv:1803.01498, Algorithm 1.
    """

    is_coordinatewise: ClassVar[bool] = True

    def combine(
        self, own: Tensor, others: Mapping[Rank, Tensor], weights: Mapping[Rank, float]
    ) -> Mixed:
        """Take the median of each coordinate."""
        return _trimmed(len(others), own, others, weights)


def _trimmed(
    num_liars: int, own: Tensor, others: Mapping[Rank, Tensor], weights: Mapping[Rank, float]
) -> Mixed:
    vectors = counted(own, others, weights)
    if not vectors:
        return Mixed(own, {})
    stacked = torch.stack([*vectors.values()])  # [num_vectors, num_params]
    cut = min(num_liars, (len(vectors) - 1) // 2)
    kept = stacked.sort(dim=0).values[cut : len(vectors) - cut]
    low, high = kept[0], kept[-1]
    # The mean of differences from the smallest value: equal vectors stay as they are.
    mixed = low + (kept - low).mean(0)
    # A liar that always lies outside is never within the limits; honest vectors mostly are.
    is_within = ((stacked >= low) & (stacked <= high)).float().mean(1)
    return Mixed(mixed, shares_of(vectors, is_within.tolist()))
