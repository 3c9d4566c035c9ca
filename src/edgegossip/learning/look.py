"""The look at the aggregated points before a pass: what the present model finds hard."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from edgegossip.balance.sampler import AccuracyAwareSampler

FORWARD_COST = 1 / 3
"""What a forward pass over a point costs, in training samples' worth: a backward pass takes
twice as long as a forward one."""


class Look:
    """Measures the losses of aggregated points and tells them to a sampler.

    Args:
        loss_of: ``loss_of(points)``: the present model's losses of these aggregated points,
            [num_points].
        num_points: Aggregated points to look at each time, those first that were looked at
            longest ago.
        max_cost: What the look may cost at most, in samples' worth, before a pass over all
            data; proportionally less before one that is cut down. None for any.
    """

    def __init__(
        self,
        loss_of: Callable[[Tensor], Tensor],
        num_points: int,
        max_cost: float | None = None,
    ) -> None:
        self._loss_of = loss_of
        self._num_points = num_points
        self._max_cost = max_cost

    def cost(self, keep_ratio: float) -> float:
        """What the look before a pass of `keep_ratio` costs, in training samples' worth."""
        return self._num_looked_at(keep_ratio) * FORWARD_COST

    @torch.no_grad()
    def __call__(self, sampler: AccuracyAwareSampler, keep_ratio: float) -> None:
        points = sampler.stalest_points(self._num_looked_at(keep_ratio))
        sampler.set_losses(self._loss_of(points), points)

    def _num_looked_at(self, keep_ratio: float) -> int:
        if self._max_cost is None:
            return self._num_points
        affordable = int(keep_ratio * self._max_cost / FORWARD_COST)
        return min(self._num_points, max(1, affordable))
