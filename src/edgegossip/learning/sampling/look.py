"""The look at aggregated points before a pass, to find samples that are hard for the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.learning.sampling.sampler import AccuracyAwareSampler

FORWARD_COST = 1 / 3
"""Cost of a forward pass over a point, in training samples; a backward pass costs twice as
much.
"""


@dataclass(frozen=True, slots=True)
class Budget:
    """Number of aggregated points in a look.

    Attributes:
        num_points: Number of aggregated points per look; points with the oldest losses come
            first.
        max_cost: Maximum cost of the look, in samples, before a full pass; proportionally less
            before a shorter pass. None for no limit.
    """

    num_points: int
    max_cost: float | None = None

    def cost(self, keep_ratio: float) -> float:
        """Cost of the look before a pass of `keep_ratio`, in training samples."""
        return self.num_looked_at(keep_ratio) * FORWARD_COST

    def num_looked_at(self, keep_ratio: float) -> int:
        """Number of points in the look before a pass of `keep_ratio`."""
        if self.max_cost is None:
            return self.num_points
        affordable = int(keep_ratio * self.max_cost / FORWARD_COST)
        return min(self.num_points, max(1, affordable))


class Look:
    """Measures the losses of aggregated points for a sampler.

    Args:
        loss_of: ``loss_of(points)``: the current model's losses on these aggregated points,
            [num_points].
        budget: Number of points per look.
    """

    def __init__(self, loss_of: Callable[[Tensor], Tensor], budget: Budget) -> None:
        self._loss_of = loss_of
        self.budget = budget

    @torch.no_grad()
    def __call__(self, sampler: AccuracyAwareSampler, keep_ratio: float) -> None:
        points = sampler.stalest_points(self.budget.num_looked_at(keep_ratio))
        sampler.set_losses(self._loss_of(points), points)
