"""Nearest-neighbor averaging: leave out the vectors that are farthest from one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from edgegossip.contract import Mixed, Rank, RobustRule, check_counts, check_ranges
from edgegossip.contract.robust import distances, own_weight


@dataclass(frozen=True, kw_only=True)
class NearestNeighbors(RobustRule):
    r"""NNA: average the worker's own vector and all others except the `num_liars` farthest.

    .. math:: x_i \leftarrow \frac{\sum_{j \in N} W_{ij} x_j}{\sum_{j \in N} W_{ij}}

    :math:`N` contains :math:`i` and its nearest neighbors. The mean over all workers is not
    kept, because a worker may leave out one that does not leave it out.

    Args:
        num_liars: Number of vectors to leave out, at least 1.

    Raises:
        ValueError: If `num_liars` is out of range.

    References:
        Farhadkhani et al., "Robust Collaborative Learning with Linear Gradient Overhead", ICML
        2023, arXiv:2302.01772. Departures: vectors keep the relative weights of the mixing
        matrix; a server, which has no vector, leaves out the longest updates.
    """

    num_liars: int = 1

    def __post_init__(self) -> None:
        check_counts(self, "num_liars")
        check_ranges(self, num_liars="at least 1")

    def combine(
        self, own: Tensor, others: Mapping[Rank, Tensor], weights: Mapping[Rank, float]
    ) -> Mixed:
        """Leave out the farthest, and average the rest."""
        distance = distances(own, others)
        nearest = sorted(others, key=lambda j: (distance[j], j))
        kept = {*nearest[: max(0, len(others) - self.num_liars)]}
        shares = {j: float(j in kept) for j in others}
        total = own_weight(weights) + sum(weights[j] for j in sorted(kept))
        mixed = own.clone()
        for j in sorted(kept):
            # Differences, so that equal vectors stay as they are, to the bit.
            mixed.add_(others[j] - own, alpha=weights[j] / total)
        return Mixed(mixed, shares)
