"""Krum: choose the vectors that are close to most others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.contract import Mixed, Rank, RobustRule, check_counts, check_ranges
from edgegossip.contract.robust import counted, shares_of


@dataclass(frozen=True, kw_only=True)
class Krum(RobustRule):
    r"""Multi-Krum: average the vectors with the lowest scores.

    The score of a vector is the sum of squared distances to its :math:`n - f - 2` nearest
    others, at least one. All vectors count equally, the worker's own like the others.

    Args:
        num_liars: :math:`f`, the number of false vectors to allow for, at least 1; the theorem
            needs :math:`n > 2 f + 2`.
        num_chosen: Number of vectors to average, at least 1; 1 is Krum.

    Raises:
        ValueError: If a number is out of range.

    References:
        Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient
        Descent", NeurIPS 2017, arXiv:1703.02757. Departures: of equal scores, the lowest rank
        is chosen; too few vectors are no error.
    """

    num_liars: int = 1
    num_chosen: int = 1

    def __post_init__(self) -> None:
        check_counts(self, "num_liars", "num_chosen")
        check_ranges(self, num_liars="at least 1", num_chosen="at least 1")

    def combine(
        self, own: Tensor, others: Mapping[Rank, Tensor], weights: Mapping[Rank, float]
    ) -> Mixed:
        """Choose the vectors with the lowest scores, and average them."""
        vectors = counted(own, others, weights)
        if not vectors:
            return Mixed(own, {})
        stacked = torch.stack([*vectors.values()])  # [num_vectors, num_params]
        # Not `cdist`, whose fast way takes differences of large squares.
        squares = torch.stack(
            [(stacked - each).square().sum(1, dtype=torch.float64) for each in stacked]
        )
        num_near = max(1, len(vectors) - self.num_liars - 2)
        scores = squares.sort(dim=1).values[:, 1 : 1 + num_near].sum(1).nan_to_num(torch.inf)
        best = scores.argsort(stable=True)[: self.num_chosen].tolist()
        chosen = stacked[sorted(best)]
        # The mean of differences: equal vectors stay as they are.
        mixed = chosen[0] + (chosen - chosen[0]).mean(0)
        return Mixed(mixed, shares_of(vectors, (float(k in best) for k in range(len(vectors)))))
