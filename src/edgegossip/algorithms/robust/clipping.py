"""Clipped differences: self-centered clipping, CS+, and a bound on lengths."""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from edgegossip.contract import Mixed, Rank, RobustRule, check_counts, check_ranges
from edgegossip.contract.robust import distances, own_weight


@dataclass(frozen=True, kw_only=True)
class Clipping(RobustRule):
    r"""Base of rules that clip the difference of each vector from the worker's own.

    .. math:: x_i \leftarrow x_i + \sum_j W_{ij} \min(1, \tau_i / \|x_j - x_i\|) (x_j - x_i)

    A vector, however far away, therefore moves a worker by at most :math:`W_{ij} \tau_i`. With
    an infinite :math:`\tau_i` this is plain mixing.
    """

    @abstractmethod
    def radius(self, distance: Mapping[Rank, float], weights: Mapping[Rank, float]) -> float:
        r"""The radius :math:`\tau_i`, at least 0, from the vectors' distances and weights."""

    def combine(
        self, own: Tensor, others: Mapping[Rank, Tensor], weights: Mapping[Rank, float]
    ) -> Mixed:
        """Clip, and add with the given weights."""
        distance = distances(own, others)
        radius = self.radius(distance, weights)
        shares = {
            j: 1.0 if far <= radius else radius / far if far < math.inf else 0.0
            for j, far in distance.items()
        }
        mixed = own.clone()
        for j, other in others.items():
            # Without this, a vector that overflows would give 0 times infinity.
            if shares[j]:
                mixed.add_(other - own, alpha=weights[j] * shares[j])
        return Mixed(mixed, shares)


@dataclass(frozen=True, kw_only=True)
class SelfCenteredClipping(Clipping):
    r"""ClippedGossip: clip neighbors' differences at a radius around the worker's own model.

    Without a given radius, :math:`\tau_i = \sqrt{\frac1{\delta_i} \sum_{j \in K} W_{ij} \|x_i -
    x_j\|^2}`. :math:`\delta_i` is the weight of the `num_liars` heaviest neighbors, and
    :math:`K` are the nearest neighbors, without as many as have this weight. With symmetric
    weights and one fixed radius for all, mixing keeps the mean: what a worker takes from a
    neighbor, the neighbor takes from it.

    Args:
        radius_at: A fixed radius :math:`\tau`, above 0; None to compute it in each round.
        num_liars: Number of lying neighbors that the computed radius allows for, at least 1.

    Raises:
        ValueError: If a number is out of range.

    References:
        He, Karimireddy & Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip",
        2022, arXiv:2202.01545. The computed radius is that of the authors' theory with liars
        replaced by the farthest neighbors, as in the code of Gaucher et al. (`ClippedSum`);
        their own code takes the second-largest distance.
    """

    radius_at: float | None = None
    num_liars: int = 1

    def __post_init__(self) -> None:
        check_counts(self, "num_liars")
        check_ranges(self, radius_at="above 0 or None", num_liars="at least 1")

    def radius(self, distance: Mapping[Rank, float], weights: Mapping[Rank, float]) -> float:
        if self.radius_at is not None:
            return self.radius_at
        allowed = weight_of_liars(weights, self.num_liars)
        squares, rest = 0.0, sum(weights.values()) - allowed
        for j in sorted(distance, key=lambda j: (distance[j], j)):
            if weights[j] > rest + 1e-9:
                break
            rest -= weights[j]
            squares += weights[j] * distance[j] ** 2
        return math.sqrt(squares / allowed) if allowed else math.inf


@dataclass(frozen=True, kw_only=True)
class ClippedSum(Clipping):
    r"""CS+: clip at the distance beyond which vectors of twice the liars' weight lie.

    The worker itself counts at distance 0. If :math:`b` is the weight of the `num_liars`
    heaviest neighbors, the vectors that are clipped, and the first that is not, weigh at least
    :math:`2 b`. This is :math:`\tau_i = 0`, no mixing, if liars may weigh half of what is not
    the worker's own, like one of two neighbors in a ring.

    Args:
        num_liars: Number of lying neighbors to allow for, at least 1.

    Raises:
        ValueError: If `num_liars` is out of range.

    References:
        Gaucher, Dieuleveut & Hendrikx, "Unified Breakdown Analysis for Byzantine Robust
        Gossip", ICML 2025, arXiv:2410.10418; the threshold is that of the authors' code.
        Departure: they give the liars' weight, here it follows from their number.
    """

    num_liars: int = 1

    def __post_init__(self) -> None:
        check_counts(self, "num_liars")
        check_ranges(self, num_liars="at least 1")

    def radius(self, distance: Mapping[Rank, float], weights: Mapping[Rank, float]) -> float:
        inside = 1 - 2 * weight_of_liars(weights, self.num_liars)
        radius, reached = 0.0, own_weight(weights)
        for j in sorted(distance, key=lambda j: (distance[j], j)):
            reached += weights[j]
            if reached > inside + 1e-9:
                return radius
            radius = distance[j]
        return radius


@dataclass(frozen=True, kw_only=True)
class NormBound(Clipping):
    r"""Clip differences at a multiple of their median length.

    For servers and `DiLoCo`, differences are the updates themselves, so an enlarged update
    counts no more than `factor` typical ones. Fewer than half of the vectors may be false.

    Args:
        factor: The multiple, above 0.

    Raises:
        ValueError: If `factor` is out of range.

    References:
        Sun et al., "Can You Really Backdoor Federated Learning?", 2019, arXiv:1911.07963, with
        a fixed bound. Departure: the bound follows the median.
    """

    factor: float = 1.5

    def __post_init__(self) -> None:
        check_ranges(self, factor="above 0 and finite")

    def radius(self, distance: Mapping[Rank, float], weights: Mapping[Rank, float]) -> float:
        # The lower one of two middle values: of two vectors, one may be false.
        return self.factor * statistics.median_low(distance.values()) if distance else math.inf


def weight_of_liars(weights: Mapping[Rank, float], num_liars: int) -> float:
    """Weight of the `num_liars` heaviest of the others."""
    return sum(sorted(weights.values())[-num_liars:])
