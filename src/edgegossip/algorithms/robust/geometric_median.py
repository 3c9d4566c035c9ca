"""Geometric median: the point with the smallest sum of distances to all vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.contract import Mixed, Rank, RobustRule, check_counts, check_ranges
from edgegossip.contract.robust import counted, own_weight, shares_of


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(RobustRule):
    r"""Move to the geometric median by smoothed Weiszfeld steps.

    .. math:: z \leftarrow \frac{\sum_j \beta_j x_j}{\sum_j \beta_j}, \qquad
        \beta_j = \frac{W_{ij}}{\max(\nu, \|z - x_j\|)}

    The steps begin at the coordinates' median, which false vectors cannot move far. False
    vectors with less than half of the weight cannot move the result far, either.

    Args:
        num_steps: Number of steps, at least 1.
        smoothing: :math:`\nu` as a share of the median distance from the start, above 0.

    Raises:
        ValueError: If a number is out of range.

    References:
        Pillutla, Kakade & Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP
        2022, arXiv:1912.13445 (RFA). Departures: the start, which is the mean in the paper, and
        a :math:`\nu` relative to distances.
    """

    num_steps: int = 8
    smoothing: float = 1e-3

    def __post_init__(self) -> None:
        check_counts(self, "num_steps")
        check_ranges(self, num_steps="at least 1", smoothing="above 0 and finite")

    def combine(
        self, own: Tensor, others: Mapping[Rank, Tensor], weights: Mapping[Rank, float]
    ) -> Mixed:
        """Take the steps."""
        vectors = counted(own, others, weights)
        if not vectors:
            return Mixed(own, {})
        stacked = torch.stack([*vectors.values()])  # [num_vectors, num_params]
        weight = torch.tensor([weights.get(j, own_weight(weights)) for j in vectors])
        median = stacked.median(0).values
        far = self._distances(stacked, median)
        nu = self.smoothing * far.median().clamp(max=torch.finfo(torch.float32).max)
        if not nu > 0:  # most vectors are equal, and their point is the geometric median
            return Mixed(median, shares_of(vectors, (far == 0).double().tolist()))
        for _ in range(self.num_steps):
            share = weight / far.clamp(min=nu)
            share = share / share.sum()
            # A vector that is too far to measure has share 0; 0 times infinity is no number.
            moved = torch.where(share[:, None] > 0, stacked - median, 0)
            point = median + (share[:, None] * moved).sum(0).to(median.dtype)
            far = self._distances(stacked, point)
        given = share / weight
        return Mixed(point, shares_of(vectors, (given / given.max()).tolist()))

    @staticmethod
    def _distances(stacked: Tensor, point: Tensor) -> Tensor:
        far: Tensor = torch.linalg.vector_norm(stacked - point, dim=1, dtype=torch.float64)
        return far.nan_to_num(torch.inf)
