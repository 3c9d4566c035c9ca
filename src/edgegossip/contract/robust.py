"""Robust mixing: rules that combine vectors of which some may be false.

A rule takes a worker's own vector, those of others and their weights, and tells how much of its
weight it has given to each of the others. Rules are in `edgegossip.algorithms.robust`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from edgegossip.contract.protocol import MAX_NOTED, Note, Rank

TRUST = "trust"
"""The kind of note that names the share of its weight that each neighbor was given."""


@dataclass(slots=True, eq=False)
class Mixed:
    """The result of a rule.

    Attributes:
        params: The combination, [num_params].
        shares: By rank, the share of its weight that a vector was given, in [0, 1].
    """

    params: Tensor
    shares: dict[Rank, float]

    @property
    def note(self) -> Note:
        """Note the shares."""
        return trust_note(self.shares)


class RobustRule(ABC):
    """Combines vectors of which some may be false; implementations are frozen dataclasses.

    A rule that combines equal vectors returns that vector, and never leaves the smallest box
    around all given vectors, except through rounding.

    Attributes:
        is_coordinatewise: Whether an entry of the result depends only on the same entry of the
            vectors.
    """

    is_coordinatewise: ClassVar[bool] = False

    @abstractmethod
    def combine(
        self, own: Tensor, others: Mapping[Rank, Tensor], weights: Mapping[Rank, float]
    ) -> Mixed:
        """Combine vectors; without others, the result is `own`.

        Args:
            own: The receiver's own vector, [num_params]. For a server, which has none, a vector
                of zeros: what others send it are changes.
            others: Vectors of others, [num_params] each, in order of rank.
            weights: Weight of each of them, above 0. `own` has the rest up to 1; if nothing is
                left, `own` is only a point of reference, and no rule counts it as a vector.
        """


def robust_field() -> Any:  # noqa: ANN401 - the type of a dataclass field
    """Make the field for an algorithm's rule, None by default.

    Descriptions of experiments omit the default, so that folders from before can be resumed.
    """
    return field(default=None, metadata={"omits_default": True})


def own_weight(weights: Mapping[Rank, float]) -> float:
    """The weight that others leave to a worker's own vector, in [0, 1]."""
    rest = 1 - sum(weights.values())
    # Weights of n others that add up to 1 may leave 1e-16 through rounding.
    return rest if rest > 1e-9 else 0.0


def distances(own: Tensor, others: Mapping[Rank, Tensor]) -> dict[Rank, float]:
    """Euclidean distance of each vector from `own`; infinite if it is too large to compute."""
    return {j: _distance(other, own) for j, other in others.items()}


def _distance(one: Tensor, other: Tensor) -> float:
    far = torch.dist(one, other)
    if not far.isfinite():  # squares of large entries do not fit in float32
        far = torch.linalg.vector_norm(one - other, dtype=torch.float64).nan_to_num(torch.inf)
    return far.item()


def counted(
    own: Tensor, others: Mapping[Rank, Tensor], weights: Mapping[Rank, float]
) -> dict[Rank, Tensor]:
    """The vectors that count: those of others and, as rank -1, `own` if it has a weight."""
    return {**({-1: own} if own_weight(weights) else {}), **others}


def shares_of(vectors: Mapping[Rank, Tensor], given: Iterable[float]) -> dict[Rank, float]:
    """Shares given to vectors that `counted` returned, without the worker's own."""
    return {j: share for j, share in zip(vectors, given, strict=True) if j >= 0}


def trust_note(shares: Mapping[Rank, float]) -> Note:
    """Note the shares of weight that others were given; only the lowest if there are many."""
    least = sorted(shares, key=lambda j: (shares[j], j))[:MAX_NOTED]
    return Note(TRUST, {str(j): shares[j] for j in sorted(least)})
