"""Numbers of visits in proportion to need, and their random draw."""

from __future__ import annotations

import torch
from torch import Tensor


def expected_visits(need: Tensor, num_visits: float, max_visits: float) -> Tensor:
    r"""Divide visits in proportion to need, up to a maximum per sample.

    :math:`m_i = \min(m_{max}, \lambda a_i)` with :math:`\lambda` such that :math:`\sum_i m_i`
    is `num_visits`; if even :math:`m_{max}` for all samples is too few, all :math:`m_i` are
    equal.

    Args:
        need: :math:`a`, above 0, float64 [num_samples].
        num_visits: Total number of visits.
        max_visits: :math:`m_{max}`, the maximum for one sample.

    >>> expected_visits(torch.tensor([6.0, 3.0, 1.0]).double(), 2, max_visits=1)
    tensor([1.0000, 0.7500, 0.2500], dtype=torch.float64)
    """
    if num_visits >= max_visits * len(need):
        return torch.full_like(need, num_visits / len(need))
    # The first k in descending order are at the maximum, for the smallest k at which the
    # next sample, sharing the remaining visits with all later ones, stays below it.
    ordered, order = need.sort(descending=True)
    left = num_visits - max_visits * torch.arange(len(need), dtype=torch.float64)
    scale = left / ordered.flip(0).cumsum(0).flip(0)
    num_full = int((scale * ordered > max_visits).logical_not().nonzero()[0])
    visits = torch.empty_like(need)
    visits[order[:num_full]] = max_visits
    visits[order[num_full:]] = scale[num_full] * ordered[num_full:]
    return visits


def expected_visits_per_class(
    need: Tensor, labels: Tensor, num_visits: float, max_visits: float
) -> Tensor:
    """`expected_visits` within each class; classes get visits in proportion to their size.

    Args:
        need: As in `expected_visits`.
        labels: [num_samples] class of each sample.
        num_visits: As in `expected_visits`.
        max_visits: As in `expected_visits`.
    """
    visits = torch.empty_like(need)
    for label in labels.unique():  # type: ignore[no-untyped-call]
        members = (labels == label).nonzero()[:, 0]
        due = num_visits * len(members) / len(labels)
        visits[members] = expected_visits(need[members], due, max_visits)
    return visits


def systematic(
    visits: Tensor, num_visits: int, random: torch.Generator, groups: Tensor | None = None
) -> Tensor:
    """Draw `num_visits` positions, with expected visits rounded up or down.

    Systematic sampling: one random start and equal steps along the samples in random order. A
    sample with 2.3 expected visits gets 2 or 3, on average 2.3.

    Args:
        visits: Expected visits, adding up to `num_visits`, float64 [num_samples].
        num_visits: Number of positions to draw.
        random: Source of the order and the start.
        groups: Group of each sample, [num_samples]. The number of visits to a group differs
            from the expected number by less than one. None for a single group.

    References:
        Madow, "On the Theory of Systematic Sampling, II", Ann. Math. Statist. 1949.
    """
    order = torch.randperm(len(visits), generator=random)
    if groups is not None:
        order = order[groups[order].argsort(stable=True)]
    ends = visits[order].cumsum(0)
    start = torch.rand(1, generator=random, dtype=torch.float64)
    steps = start + torch.arange(num_visits, dtype=torch.float64)
    # Rounding may put the last step a hair behind the last end.
    return order[torch.searchsorted(ends, steps, right=True).clamp(max=len(order) - 1)]
