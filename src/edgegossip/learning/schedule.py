"""Learning rates that change while a worker trains.

A schedule says by what factor the optimizer's own rate is multiplied. It counts in epochs of
the worker's own, so that it means the same for slow and fast workers, for every batch size and
however they communicate. An epoch is a pass over the own shard where work is given in `Epochs`,
and as many samples as a shard has on average where it is given in `Steps`: workers that take
equally many steps, with shards of different sizes, thus keep to the same rate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from edgegossip.core.errors import unknown_name

Rise = Literal["constant", "linear"]


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """A small rate to begin with.

    Args:
        num_epochs: How long, above 0.
        start: The factor at the beginning, in (0, 1].
        rise: "constant" stays there and then jumps to 1, "linear" rises evenly up to 1.

    Raises:
        ValueError: If a number is out of range.

    References:
        Constant for one epoch at a tenth: the code behind Aketi, Singh and Rabaey,
        "Sparse-Push", arXiv:2102.05715, as He et al. (arXiv:1512.03385, section 4.2) did.
        Linear: Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677.

    >>> [WarmUp(rise="linear").factor(epochs) for epochs in (0.0, 0.5, 1.0, 7.0)]
    [0.1, 0.55, 1.0, 1.0]
    """

    num_epochs: float = 1.0
    start: float = 0.1
    rise: Rise = "constant"

    def __post_init__(self) -> None:
        _require_positive("num_epochs", self.num_epochs)
        if not 0 < self.start <= 1:
            raise ValueError(f"start must be in (0, 1], got {self.start}")
        if self.rise not in get_args(Rise):
            raise ValueError(unknown_name("rise", self.rise, get_args(Rise)))

    def factor(self, epochs: float) -> float:
        """What the rate is multiplied by, after `epochs`."""
        if epochs >= self.num_epochs:
            return 1.0
        risen = epochs / self.num_epochs if self.rise == "linear" else 0.0
        return self.start + (1 - self.start) * risen


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """How the learning rate changes over a worker's epochs.

    Args:
        warm_up: A small rate to begin with, times that of the schedule; None for none.
    """

    warm_up: WarmUp | None = None

    def factor(self, epochs: float) -> float:
        """What the optimizer's rate is multiplied by, after `epochs` of the worker's own."""
        # Shares of an epoch added up step by step are a hair off the whole.
        epochs = round(epochs, 6)
        warm = 1.0 if self.warm_up is None else self.warm_up.factor(epochs)
        return warm * self._decay(epochs)

    @abstractmethod
    def _decay(self, epochs: float) -> float:
        """The factor without the warm-up."""


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The rate that the optimizer has.

    >>> Constant(warm_up=WarmUp()).factor(0.0), Constant().factor(0.0)
    (0.1, 1.0)
    """

    def _decay(self, epochs: float) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class StepDecay(Schedule):
    """The rate times `decay` at each milestone.

    Args:
        milestones: Epochs, ascending, above 0.
        decay: Above 0, at most 1.

    Raises:
        ValueError: If a number is out of range.

    >>> [StepDecay(milestones=(30, 60), decay=0.5).factor(epochs) for epochs in (29, 30, 60)]
    [1.0, 0.5, 0.25]
    """

    milestones: tuple[float, ...]
    decay: float = 0.1

    def __post_init__(self) -> None:
        for milestone in self.milestones:
            _require_positive("milestones", milestone)
        if any(after <= before for before, after in pairwise(self.milestones)):
            raise ValueError(f"milestones must ascend, got {self.milestones}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")

    def _decay(self, epochs: float) -> float:
        return self.decay ** sum(epochs >= milestone for milestone in self.milestones)


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    r"""Half a wave of the cosine: from the whole rate down to nothing.

    After :math:`t` of :math:`T` epochs the factor is :math:`\frac12 (1 + \cos(\pi t / T))`, and
    0 from then on.

    Args:
        num_epochs: :math:`T`, above 0.

    Raises:
        ValueError: If it is not.

    References:
        Loshchilov and Hutter, "SGDR", ICLR 2017, arXiv:1608.03983, without restarts.

    >>> [round(Cosine(num_epochs=30).factor(epochs), 3) for epochs in (0, 10, 15, 30, 31)]
    [1.0, 0.75, 0.5, 0.0, 0.0]
    """

    num_epochs: float

    def __post_init__(self) -> None:
        _require_positive("num_epochs", self.num_epochs)

    def _decay(self, epochs: float) -> float:
        return (1 + math.cos(math.pi * min(1.0, epochs / self.num_epochs))) / 2


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value}")
