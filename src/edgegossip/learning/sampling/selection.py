"""Selection of the samples to train on where there is no time for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from edgegossip.core.errors import unknown_name
from edgegossip.core.ranges import check_ranges
from edgegossip.learning.sampling.visits import (
    expected_visits,
    expected_visits_per_class,
    systematic,
)


@dataclass(slots=True, kw_only=True, eq=False)
class Candidates:
    """Data that a selection chooses from, at the start of an epoch.

    Attributes:
        losses: [M] loss of each aggregated point when it was last looked at.
        is_newest: [M] whether that was in the newest look.
        labels: [M] class of each aggregated point.
        subset_of: [N] which aggregated point stands for each sample.
        num_visits: [N] how often each sample was trained on so far.
        sample_losses: [N] loss of each sample when it was last trained on, NaN for never:
            what training tells for free.
    """

    losses: Tensor
    is_newest: Tensor
    labels: Tensor
    subset_of: Tensor
    num_visits: Tensor
    sample_losses: Tensor

    @property
    def num_samples(self) -> int:
        """Samples to choose from."""
        return len(self.subset_of)


@dataclass(slots=True, eq=False)
class Choice:
    """Samples that an epoch visits.

    Attributes:
        order: [num_samples] positions, in the order of visiting.
        weights: [num_samples] weight of each sample's loss, mean about 1; None for all 1.
        focus: Share that was chosen for its high loss, in [0, 1]; as in `Trained`.
    """

    order: Tensor
    weights: Tensor | None = None
    focus: float = 0.0


class Selection(Protocol):
    """Chooses samples; a frozen dataclass of hyperparameters that derives from this.

    `choose` gives exactly `num_samples` positions, all different unless the selection says
    otherwise, in an order that depends on `random` and the candidates only.

    Attributes:
        num_points: How many aggregated points to look at before an epoch; None for all.
    """

    num_points: int | None = None
    needs_losses: ClassVar[bool] = True
    needs_sample_losses: ClassVar[bool] = False
    keeps_subsets_whole: ClassVar[bool] = False

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        """Choose `num_samples` (1 to all) of the samples."""


@dataclass(frozen=True)
class Ranked(Selection):
    """Algorithm 2 to the letter: whole subsets, those of the highest loss first, unshuffled.

    Neighbors in the ranking are of one class, and so are batches; on CIFAR-10 training breaks
    down. The last subset is cut so that the number of samples is exact.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 32(7), 2021, Algorithm 2.
    """

    keeps_subsets_whole: ClassVar[bool] = True

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        rank = candidates.losses.argsort(descending=True, stable=True).argsort()
        order = rank[candidates.subset_of].argsort(stable=True)
        return Choice(order[:num_samples], focus=1.0)


@dataclass(frozen=True)
class RankedShuffled(Selection):
    """The samples of `Ranked`, in random order: batches mix subsets and classes."""

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        order = Ranked().choose(candidates, num_samples, random).order
        return Choice(_shuffled(order, random), focus=1.0)


@dataclass(frozen=True)
class RankedPerClass(Selection):
    """The same share of each class, within it the subsets of the highest loss; shuffled.

    Departs from Algorithm 2, whose ranking over all classes may leave out the easy ones.
    Shares of classes differ by less than one sample.
    """

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        # Shuffled first, so that chance decides which samples of the last subset are in.
        order = torch.randperm(candidates.num_samples, generator=random)
        subsets = candidates.subset_of[order]
        ranked = order[candidates.losses[subsets].argsort(descending=True, stable=True)]
        labels = candidates.labels[candidates.subset_of[ranked]]
        quantile = torch.empty(len(ranked))
        for label in labels.unique():  # type: ignore[no-untyped-call]
            members = (labels == label).nonzero()[:, 0]
            quantile[members] = (torch.arange(len(members)) + 0.5) / len(members)
        order = ranked[quantile.argsort(stable=True)[:num_samples]]
        return Choice(_shuffled(order, random), focus=1.0)


@dataclass(frozen=True)
class Sampled(Selection):
    r"""Draw without replacement, with probability :math:`\propto e^{1/T}` for loss :math:`e`.

    Each sample has the loss of its aggregated point, to the power of one over the temperature
    :math:`T`: 2 draws by the square root, 0.01 ranks, 100 is as good as random.

    Args:
        temperature: :math:`T`, above 0.

    References:
        The draw (largest of log-probability plus Gumbel noise): Vieira, "Gumbel-max trick and
        weighted reservoir sampling", 2014; Kool et al., arXiv:1903.06059.
    """

    temperature: float = 2.0

    def __post_init__(self) -> None:
        check_ranges(self, temperature="above 0")

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        losses = candidates.losses[candidates.subset_of].double().clamp(min=1e-12)
        exponential = torch.empty_like(losses).exponential_(generator=random)
        # Minus the logarithm of an exponential variable is a Gumbel one.
        keys = losses.log() / self.temperature - exponential.log()
        return Choice(_shuffled(keys.topk(num_samples).indices, random), focus=1.0)


@dataclass(frozen=True)
class Importance(Selection):
    r"""Prefer high losses but weigh samples so that gradients stay unbiased.

    Sample :math:`i` is in with probability :math:`\pi_i`, half of which is the same for all and
    half in proportion to the loss of its aggregated point, and weighs
    :math:`n / (N \pi_i)`: the weighted mean over the choice is, in expectation, the mean over
    all samples.

    Args:
        uniform_share: Share of the probability that is the same for all samples, in (0, 1];
            bounds the weights by one over it.

    References:
        Horvitz and Thompson, JASA 1952; Katharopoulos and Fleuret, "Not All Samples Are Created
        Equal", ICML 2018, arXiv:1803.00942.
    """

    uniform_share: float = 0.5

    def __post_init__(self) -> None:
        check_ranges(self, uniform_share="in (0, 1]")

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        losses = candidates.losses[candidates.subset_of].double()
        share = losses / losses.sum().clamp(min=1e-12)
        need = self.uniform_share / len(losses) + (1 - self.uniform_share) * share
        return _unbiased(need, num_samples, random)


@dataclass(frozen=True)
class Pruned(Selection):
    r"""Thin out what is below the mean loss, at random, and let the rest of it weigh more.

    InfoBatch's idea with aggregated points. A sample whose aggregated point has less than the
    mean loss is kept with a probability lower by the factor :math:`1 - p`; weights keep
    gradients unbiased. Where there is time for all samples, none is left out.

    Args:
        prune_ratio: :math:`p`, in [0, 1).

    References:
        Qin et al., "InfoBatch: Lossless Training Speed Up by Unbiased Dynamic Data Pruning",
        ICLR 2024, arXiv:2303.04947. There the number of samples follows from :math:`p`; here it
        is given, and the probabilities are scaled to it. There is no final phase on all data.
    """

    prune_ratio: float = 0.5

    def __post_init__(self) -> None:
        check_ranges(self, prune_ratio="in [0, 1)")

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        losses = candidates.losses[candidates.subset_of].double()
        is_low = losses < losses.mean()
        return _unbiased(1 - self.prune_ratio * is_low.double(), num_samples, random)


@dataclass(frozen=True)
class Cyclic(Selection):
    """Those least often visited, ties at random: passes over all data, however small the share.

    In that order: where the end of a pass is left out, visits still differ by at most one.
    """

    needs_losses: ClassVar[bool] = False

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        order = torch.randperm(candidates.num_samples, generator=random)
        return Choice(order[candidates.num_visits[order].argsort(stable=True)[:num_samples]])


@dataclass(frozen=True)
class Random(Selection):
    """Any samples, all alike: the control."""

    needs_losses: ClassVar[bool] = False

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        order = torch.randperm(candidates.num_samples, generator=random)
        return Choice(order[:num_samples])


@dataclass(frozen=True)
class Focused(Selection):
    r"""Revisit what is not learnt yet, the more so the more redundant the data prove.

    Aggregated points tell how redundant: with :math:`c` the mean probability that the model
    gives to the classes of those newly looked at (:math:`e^{-\mathrm{loss}}`), the part

    .. math:: f = c^s / (c^s + (1 - c)^s)

    of the epoch is spent on high losses and the rest on any samples, as by `Random`. Means of
    alike samples are recognised (:math:`f \to 1`: MNIST); those of samples that differ are
    not, however well the model has memorised each of them (:math:`f` below 0.01: CIFAR-10).
    Training has shown for free which samples are hard: within each class, a sample is visited
    in proportion to its loss when it was last trained on, up to `max_visits` times an epoch. So
    the fastest platforms too spend their time where there is something left to learn. Samples
    never trained on count twice the mean.

    The positions are *not* all different.

    Args:
        max_visits: Visits of a sample in one epoch for its high loss, at least 1.
        sharpness: :math:`s`, at least 1: how suddenly the focus sets in around c = 1/2.
        num_points: Aggregated points to look at before an epoch, at least 1. A few tell the
            mean: by 32 it is known within 0.09 at worst (one standard deviation).

    References:
        Ours; in place of Algorithm 2 of Han et al., "EdgeGossip", IEEE TPDS 32(7), 2021.
    """

    max_visits: int = 3
    sharpness: float = 6.0
    num_points: int | None = 32

    needs_sample_losses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ranges(self, max_visits="at least 1", sharpness="at least 1")
        check_ranges(self, num_points="at least 1 or None")

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        focus = self.focus(candidates)
        num_focused = round(focus * num_samples)
        focused = self._revisit(candidates, num_focused, random)
        others = torch.randperm(candidates.num_samples, generator=random)
        others = others[: num_samples - num_focused]
        return Choice(_shuffled(torch.cat([focused, others]), random), focus=focus)

    def focus(self, candidates: Candidates) -> float:
        """Share of the epoch that goes to high losses, in [0, 1]: 0 before any training."""
        if bool(candidates.sample_losses.isnan().all()):
            return 0.0
        losses = candidates.losses[candidates.is_newest].double()
        confidence = float(torch.exp(-losses).mean())
        learnt, rest = confidence**self.sharpness, (1 - confidence) ** self.sharpness
        return float(learnt / (learnt + rest))

    def _revisit(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Tensor:
        if num_samples == 0:
            return torch.empty(0, dtype=torch.int64)
        losses = candidates.sample_losses.double()
        mean = losses.nanmean()
        # A thousandth of the mean for all: what is learnt may have been forgotten.
        need = losses.nan_to_num(2 * float(mean)) + 1e-3 * mean + 1e-12
        labels = candidates.labels[candidates.subset_of]
        visits = expected_visits_per_class(need, labels, num_samples, self.max_visits)
        return systematic(visits, num_samples, random, labels)


SELECTIONS: dict[str, Selection] = {
    "focused": Focused(),
    "ranked": Ranked(),
    "ranked-shuffled": RankedShuffled(),
    "ranked-per-class": RankedPerClass(),
    "sampled": Sampled(),
    "importance": Importance(),
    "pruned": Pruned(),
    "cyclic": Cyclic(),
    "random": Random(),
}


def selection(name: str) -> Selection:
    """Look a selection up by its name.

    Raises:
        ValueError: There is none of that name.

    >>> selection("ranked-per-class")
    RankedPerClass()
    """
    if name not in SELECTIONS:
        raise ValueError(unknown_name("selection", name, SELECTIONS))
    return SELECTIONS[name]


def _shuffled(order: Tensor, random: torch.Generator) -> Tensor:
    return order[torch.randperm(len(order), generator=random)]


def _unbiased(need: Tensor, num_samples: int, random: torch.Generator) -> Choice:
    """Choose with probability in proportion to `need`, weigh by one over the probability."""
    probability = expected_visits(need, num_samples, max_visits=1)
    order = _shuffled(systematic(probability, num_samples, random), random)
    return Choice(order, (num_samples / len(need) / probability[order]).float())
