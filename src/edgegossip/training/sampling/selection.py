"""Selection of training samples when there is no time for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Generator, Tensor

from edgegossip.contract.errors import unknown_name
from edgegossip.contract.ranges import check_ranges


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
    visits: Tensor, num_visits: int, random: Generator, groups: Tensor | None = None
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


@dataclass(slots=True, kw_only=True, eq=False)
class Candidates:
    """Data that a selection gets at the start of an epoch.

    Attributes:
        losses: [M] last measured loss of each aggregated point.
        is_newest: [M] whether the newest probe measured the point.
        labels: [M] class of each aggregated point.
        subset_of: [N] index of each sample's aggregated point.
        num_visits: [N] number of previous visits to each sample.
        sample_losses: [N] loss of each sample at its last visit, from training; NaN before the
            first visit.
    """

    losses: Tensor
    is_newest: Tensor
    labels: Tensor
    subset_of: Tensor
    num_visits: Tensor
    sample_losses: Tensor

    @property
    def num_samples(self) -> int:
        """Number of samples to choose from."""
        return len(self.subset_of)


@dataclass(slots=True, eq=False)
class Choice:
    """Samples that an epoch visits.

    Attributes:
        order: [num_samples] positions, in the order of visiting.
        weights: [num_samples] weight of each sample's loss; None for all 1.
        focus: Share of samples chosen for their high loss, in [0, 1].
    """

    order: Tensor
    weights: Tensor | None = None
    focus: float = 0.0


class Selection(Protocol):
    """Base of selections; subclasses are frozen dataclasses of hyperparameters.

    `choose` returns exactly `num_samples` positions, by default all different, in an order that
    depends only on `random` and the candidates.

    Attributes:
        num_points: Number of aggregated points to probe before an epoch; None for all.
    """

    num_points: int | None = None
    needs_losses: ClassVar[bool] = True
    needs_sample_losses: ClassVar[bool] = False
    keeps_subsets_whole: ClassVar[bool] = False

    def choose(self, candidates: Candidates, num_samples: int, random: Generator) -> Choice:
        """Choose `num_samples` (1 to all) of the samples."""


@dataclass(frozen=True)
class Ranked(Selection):
    """Algorithm 2 as published: whole subsets by descending loss, not shuffled.

    Adjacent subsets in the ranking often have the same class, so batches lack other classes; on
    CIFAR-10, training fails. The last subset is cut to give the exact number of samples.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 32(7), 2021, Algorithm 2.
    """

    keeps_subsets_whole: ClassVar[bool] = True

    def choose(self, candidates: Candidates, num_samples: int, random: Generator) -> Choice:
        rank = candidates.losses.argsort(descending=True, stable=True).argsort()
        order = rank[candidates.subset_of].argsort(stable=True)
        return Choice(order[:num_samples], focus=1.0)


@dataclass(frozen=True)
class RankedShuffled(Selection):
    """The samples of `Ranked`, in random order: batches mix subsets and classes."""

    def choose(self, candidates: Candidates, num_samples: int, random: Generator) -> Choice:
        order = Ranked().choose(candidates, num_samples, random).order
        return Choice(_shuffled(order, random), focus=1.0)


@dataclass(frozen=True)
class RankedPerClass(Selection):
    """The same share of each class, from its subsets with the highest losses; shuffled.

    This departs from Algorithm 2, whose ranking over all classes may omit easy classes. Shares
    of all classes are equal to within one sample.
    """

    def choose(self, candidates: Candidates, num_samples: int, random: Generator) -> Choice:
        order = _ranked_per_group(candidates, candidates.labels, num_samples, random)
        return Choice(_shuffled(order, random), focus=1.0)


@dataclass(frozen=True)
class RankedInBatches(Selection):
    """The same share of each mini-batch of aggregated points, those with the highest losses.

    Aggregated points are dealt to mini-batches at random. The samples of a mini-batch's points
    are visited together, shuffled, so that training batches mix classes.

    Args:
        num_points_per_batch: Number of aggregated points in a mini-batch, at least 1.

    Raises:
        ValueError: If the number is out of range.

    References:
        The authors' earlier system SlimML (published code) drops the points of low loss within
        each mini-batch; in the paper's Algorithm 2, the ranking is over all points. SlimML
        measures losses before each step, and takes one step on all remaining samples; here
        losses are those of the last probe, and steps have the task's batch size.
    """

    num_points_per_batch: int = 64

    def __post_init__(self) -> None:
        check_ranges(self, num_points_per_batch="at least 1")

    def choose(self, candidates: Candidates, num_samples: int, random: Generator) -> Choice:
        dealt = torch.randperm(len(candidates.losses), generator=random)
        batches = dealt // self.num_points_per_batch
        order = _ranked_per_group(candidates, batches, num_samples, random)
        order = _shuffled(order, random)
        together = batches[candidates.subset_of[order]].argsort(stable=True)
        return Choice(order[together], focus=1.0)


@dataclass(frozen=True)
class Sampled(Selection):
    r"""Draw without replacement, with probability :math:`\propto e^{1/T}` for loss :math:`e`.

    The loss of a sample is that of its aggregated point. With a temperature :math:`T` of 2,
    draws are by the square root of the loss; 0.01 almost ranks, and 100 is almost random.

    Args:
        temperature: :math:`T`, above 0.

    Raises:
        ValueError: If `temperature` is out of range.

    References:
        The draw (largest of log-probability plus Gumbel noise): Vieira, "Gumbel-max trick and
        weighted reservoir sampling", 2014; Kool et al., arXiv:1903.06059.
    """

    temperature: float = 2.0

    def __post_init__(self) -> None:
        check_ranges(self, temperature="above 0")

    def choose(self, candidates: Candidates, num_samples: int, random: Generator) -> Choice:
        losses = candidates.losses[candidates.subset_of].double().clamp(min=1e-12)
        exponential = torch.empty_like(losses).exponential_(generator=random)
        # Minus the logarithm of an exponential variable is a Gumbel one.
        keys = losses.log() / self.temperature - exponential.log()
        return Choice(_shuffled(keys.topk(num_samples).indices, random), focus=1.0)


@dataclass(frozen=True)
class Importance(Selection):
    r"""Prefer high losses, but weight samples so that gradients stay unbiased.

    Sample :math:`i` is chosen with probability :math:`\pi_i`. The share `uniform_share` of this
    probability is equal for all samples, and the rest is proportional to the loss of the
    sample's aggregated point. If :math:`n` of :math:`N` samples are chosen, the weight is
    :math:`n / (N \pi_i)`, so the expected weighted mean is the mean over all samples.

    Args:
        uniform_share: Share of the probability that is equal for all samples, in (0, 1]; its
            inverse bounds the weights.

    Raises:
        ValueError: If `uniform_share` is out of range.

    References:
        Horvitz and Thompson, JASA 1952; Katharopoulos and Fleuret, "Not All Samples Are Created
        Equal", ICML 2018, arXiv:1803.00942.
    """

    uniform_share: float = 0.5

    def __post_init__(self) -> None:
        check_ranges(self, uniform_share="in (0, 1]")

    def choose(self, candidates: Candidates, num_samples: int, random: Generator) -> Choice:
        losses = candidates.losses[candidates.subset_of].double()
        share = losses / losses.sum().clamp(min=1e-12)
        need = self.uniform_share / len(losses) + (1 - self.uniform_share) * share
        return _unbiased(need, num_samples, random)


@dataclass(frozen=True)
class Pruned(Selection):
    r"""Randomly drop low-loss samples, and weight the remaining low-loss samples higher.

    This is InfoBatch's idea, applied to aggregated points. If the loss of a sample's aggregated
    point is below the mean, the sample's probability is multiplied by :math:`1 - p`; weights
    keep gradients unbiased. If there is time for all samples, none is dropped.

    Args:
        prune_ratio: :math:`p`, in [0, 1).

    Raises:
        ValueError: If `prune_ratio` is out of range.

    References:
        Qin et al., "InfoBatch: Lossless Training Speed Up by Unbiased Dynamic Data Pruning",
        ICLR 2024, arXiv:2303.04947. In the paper, :math:`p` determines the number of samples.
        Here the number is given, and the probabilities are scaled to it; there is no final
        phase on all data.
    """

    prune_ratio: float = 0.5

    def __post_init__(self) -> None:
        check_ranges(self, prune_ratio="in [0, 1)")

    def choose(self, candidates: Candidates, num_samples: int, random: Generator) -> Choice:
        losses = candidates.losses[candidates.subset_of].double()
        is_low = losses < losses.mean()
        return _unbiased(1 - self.prune_ratio * is_low.double(), num_samples, random)


@dataclass(frozen=True)
class Cyclic(Selection):
    """The least visited samples, with ties broken at random; covers all data at any share.

    Even if the end of a pass is omitted, numbers of visits differ by at most one.
    """

    needs_losses: ClassVar[bool] = False

    def choose(self, candidates: Candidates, num_samples: int, random: Generator) -> Choice:
        order = torch.randperm(candidates.num_samples, generator=random)
        return Choice(order[candidates.num_visits[order].argsort(stable=True)[:num_samples]])


@dataclass(frozen=True)
class Random(Selection):
    """Uniformly random samples, as a control."""

    needs_losses: ClassVar[bool] = False

    def choose(self, candidates: Candidates, num_samples: int, random: Generator) -> Choice:
        order = torch.randperm(candidates.num_samples, generator=random)
        return Choice(order[:num_samples])


@dataclass(frozen=True)
class Focused(Selection):
    r"""Revisit unlearned samples; the more redundant the data, the more often.

    The losses on aggregated points show how redundant the data is. Let :math:`c` be the mean
    probability that the model gives to the classes of newly measured points
    (:math:`e^{-\mathrm{loss}}`). Then the share

    .. math:: f = c^s / (c^s + (1 - c)^s)

    of the epoch is spent on high losses, and the rest on random samples. The model recognizes
    means of similar samples (:math:`f \to 1`: MNIST). It recognizes few means of different
    samples, even if it has memorized every sample (CIFAR-10). A share below `min_focus` counts
    as 0: where data is not redundant, `Focused` chooses exactly like `Random`. Training gives
    the losses of samples for free. Within each class, visits are proportional to a
    sample's last loss, up to `max_visits` per epoch. Even the fastest platforms therefore spend
    their time on unlearned samples. Unvisited samples count as having twice the mean loss.

    The positions are *not* all different. Losses are taken as plain cross-entropy; with strong
    label smoothing, no sample appears learned, and `Focused` chooses like `Random`. With little
    data and much time, `Focused` overfits slightly sooner than `Random`, so stop at the best
    accuracy.

    Args:
        max_visits: Maximum visits of a sample in an epoch for its high loss, at least 1.
        sharpness: :math:`s`, at least 1: steepness of the focus around c = 1/2.
        min_focus: Smallest :math:`f` that counts, in [0, 1]. 1/2 requires c to be at least 1/2,
            where :math:`f` jumps from 0 to 1/2.
        num_points: Number of aggregated points to probe before an epoch, at least 1. A few
            suffice for the mean: with 32, its standard deviation is at most 0.09.

    Raises:
        ValueError: If a number is out of range.

    References:
        Our own method, in place of Algorithm 2 of Han et al., "EdgeGossip", IEEE TPDS 32(7),
        2021.
    """

    max_visits: int = 3
    sharpness: float = 6.0
    min_focus: float = 0.5
    num_points: int | None = 32

    needs_sample_losses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ranges(self, max_visits="at least 1", sharpness="at least 1")
        check_ranges(self, min_focus="in [0, 1]", num_points="at least 1 or None")

    def choose(self, candidates: Candidates, num_samples: int, random: Generator) -> Choice:
        focus = self.focus(candidates)
        num_focused = round(focus * num_samples)
        if num_focused == 0:
            return Random().choose(candidates, num_samples, random)
        focused = self._revisit(candidates, num_focused, random)
        others = torch.randperm(candidates.num_samples, generator=random)
        others = others[: num_samples - num_focused]
        return Choice(_shuffled(torch.cat([focused, others]), random), focus=focus)

    def focus(self, candidates: Candidates) -> float:
        """Share of the epoch for high losses: 0, or in [`min_focus`, 1]."""
        if bool(candidates.sample_losses.isnan().all()):  # before any training
            return 0.0
        losses = candidates.losses[candidates.is_newest].double()
        confidence = float(torch.exp(-losses).mean())
        learned, rest = confidence**self.sharpness, (1 - confidence) ** self.sharpness
        focus = float(learned / (learned + rest))
        return focus if focus >= self.min_focus else 0.0

    def _revisit(self, candidates: Candidates, num_samples: int, random: Generator) -> Tensor:
        losses = candidates.sample_losses.double()
        # A thousandth of the mean for all: what is learned may have been forgotten.
        need = with_unvisited(losses) + 1e-3 * losses.nanmean() + 1e-12
        labels = candidates.labels[candidates.subset_of]
        visits = expected_visits_per_class(need, labels, num_samples, self.max_visits)
        return systematic(visits, num_samples, random, labels)


def with_unvisited(losses: Tensor) -> Tensor:
    """The last losses of samples, [N], where unvisited ones (NaN) have twice the mean loss."""
    return losses.nan_to_num(2 * float(losses.nanmean()))


SELECTIONS: dict[str, Selection] = {
    "focused": Focused(),
    "ranked": Ranked(),
    "ranked-shuffled": RankedShuffled(),
    "ranked-per-class": RankedPerClass(),
    "ranked-in-batches": RankedInBatches(),
    "sampled": Sampled(),
    "importance": Importance(),
    "pruned": Pruned(),
    "cyclic": Cyclic(),
    "random": Random(),
}


def selection(name: str) -> Selection:
    """Look up a selection by its name.

    - "focused" (`Focused`, ours, the default): unlearned samples; the more redundant the data,
      the more often
    - "ranked" (`Ranked`): whole subsets by descending loss; the paper's Algorithm 2, as
      published
    - "ranked-shuffled" (`RankedShuffled`): the same samples, shuffled
    - "ranked-per-class" (`RankedPerClass`): the subsets of the highest loss within each class
    - "ranked-in-batches" (`RankedInBatches`): those within mini-batches of random subsets
    - "sampled" (`Sampled`): drawn by loss, with a temperature
    - "importance" (`Importance`): drawn by loss, weighted so that gradients stay unbiased
    - "pruned" (`Pruned`): samples below the mean loss half as often, with a higher weight
    - "cyclic" (`Cyclic`) and "random" (`Random`): controls without losses

    Raises:
        ValueError: If the name is unknown.

    >>> selection("ranked-per-class")
    RankedPerClass()
    """
    if name not in SELECTIONS:
        raise ValueError(unknown_name("selection", name, SELECTIONS))
    return SELECTIONS[name]


def _shuffled(order: Tensor, random: Generator) -> Tensor:
    return order[torch.randperm(len(order), generator=random)]


def _ranked_per_group(
    candidates: Candidates, group_of: Tensor, num_samples: int, random: Generator
) -> Tensor:
    """The same share of each group of points, [M], to within one sample, by descending loss."""
    # Shuffled first, so that chance decides which samples of the last subset are in.
    order = torch.randperm(candidates.num_samples, generator=random)
    subsets = candidates.subset_of[order]
    ranked = order[candidates.losses[subsets].argsort(descending=True, stable=True)]
    groups = group_of[candidates.subset_of[ranked]]
    quantile = torch.empty(len(ranked))
    for group in groups.unique():  # type: ignore[no-untyped-call]
        members = (groups == group).nonzero()[:, 0]
        quantile[members] = (torch.arange(len(members)) + 0.5) / len(members)
    return ranked[quantile.argsort(stable=True)[:num_samples]]


def _unbiased(need: Tensor, num_samples: int, random: Generator) -> Choice:
    """Choose with probability proportional to `need`; weight by the inverse probability."""
    probability = expected_visits(need, num_samples, max_visits=1)
    order = _shuffled(systematic(probability, num_samples, random), random)
    return Choice(order, (num_samples / len(need) / probability[order]).float())
