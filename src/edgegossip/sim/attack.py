"""Attacks: what a poisoned worker sends in place of its model or update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from edgegossip.contract.protocol import Rank
from edgegossip.contract.ranges import check_ranges


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """The knowledge of an attacker that sends a vector; models and updates are never mixed.

    Attributes:
        base: The model before the sender's last training, or zeros if it sends an update,
            [num_params].
        honest: The last vector that each honest worker sent, by rank.
        honest_base: Mean of the honest workers' `base`; None before all have trained.
        target: The receiver's model, [num_params].
        heard: The last vectors that honest workers sent to this receiver, by rank.
        num_liars: Number of poisoned workers that send to this receiver, this one included.
        first: The first vector that the sender sent, [num_params].
    """

    base: Tensor
    honest: Mapping[Rank, Tensor]
    honest_base: Tensor | None
    target: Tensor
    heard: Mapping[Rank, Tensor]
    num_liars: int
    first: Tensor


class Attack(ABC):
    """A way to change vectors on their way; implementations are frozen dataclasses.

    Attributes:
        factor: Factor for tensors that are no whole vectors, such as compressed values; None to
            leave them as they are.
    """

    factor: ClassVar[float | None] = None

    @abstractmethod
    def vector(self, vector: Tensor, known: Knowledge) -> Tensor:
        """The vector to send in place of an honest one, [num_params]."""

    def numbers(self, numbers: Mapping[str, float]) -> Mapping[str, float]:
        """The numbers of the message to send; by default the honest ones."""
        return numbers


@dataclass(frozen=True, kw_only=True)
class Scaling(Attack):
    """Enlarge the progress of the sender's last training by a factor; -1 flips its sign.

    Args:
        by: The factor; any number.
    """

    by: float = -1.0

    @property
    def factor(self) -> float:  # type: ignore[override]
        return self.by

    def vector(self, vector: Tensor, known: Knowledge) -> Tensor:
        return known.base + self.by * (vector - known.base)


@dataclass(frozen=True)
class NegatedModel(Attack):
    """Send the negative of the whole vector."""

    factor: ClassVar[float | None] = -1.0

    def vector(self, vector: Tensor, known: Knowledge) -> Tensor:
        return -vector


@dataclass(frozen=True, kw_only=True)
class FalseWeight(Attack):
    """Claim another weight in push-sum or `GoSGD`, with the honest vector.

    Args:
        weight: The claimed weight, at least 0; networks allow at most 0.5 in `GoSGD`.

    Raises:
        ValueError: If `weight` is out of range.
    """

    weight: float = 0.5

    def __post_init__(self) -> None:
        check_ranges(self, weight="at least 0")

    def vector(self, vector: Tensor, known: Knowledge) -> Tensor:
        return vector

    def numbers(self, numbers: Mapping[str, float]) -> Mapping[str, float]:
        return {**numbers, "weight": self.weight} if "weight" in numbers else numbers


@dataclass(frozen=True, kw_only=True)
class ALIE(Attack):
    """Send the honest mean minus a few standard deviations, entry by entry.

    Args:
        deviations: Number of standard deviations, above 0.

    Raises:
        ValueError: If `deviations` is out of range.

    References:
        Baruch, Baruch & Goldberg, "A Little Is Enough", NeurIPS 2019, arXiv:1902.06156.
        Departures: the number is given, because the paper's is 0 with one liar of five; others'
        vectors are those of their last messages.
    """

    deviations: float = 1.5

    def __post_init__(self) -> None:
        check_ranges(self, deviations="above 0 and finite")

    def vector(self, vector: Tensor, known: Knowledge) -> Tensor:
        if len(known.honest) < 2:
            return vector
        stacked = torch.stack([*known.honest.values()])
        return stacked.mean(0) - self.deviations * stacked.std(0)


@dataclass(frozen=True, kw_only=True)
class InnerProduct(Attack):
    """Send the opposite of the honest workers' mean progress, times a factor.

    Args:
        epsilon: The factor, above 0.

    Raises:
        ValueError: If `epsilon` is out of range.

    References:
        Xie, Koyejo & Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product
        Manipulation", UAI 2019, arXiv:1903.03936. Departure: others' vectors are those of their
        last messages.
    """

    epsilon: float = 0.5

    def __post_init__(self) -> None:
        check_ranges(self, epsilon="above 0 and finite")

    def vector(self, vector: Tensor, known: Knowledge) -> Tensor:
        if not known.honest or known.honest_base is None:
            return vector
        mean = torch.stack([*known.honest.values()]).mean(0)
        return known.honest_base - self.epsilon * (mean - known.honest_base)


@dataclass(frozen=True, kw_only=True)
class Dissensus(Attack):
    """Cancel the receiver's pull towards its honest neighbors, so that models stay apart.

    Args:
        epsilon: Share of the pull to cancel, above 0; more than 1 drives models apart.

    Raises:
        ValueError: If `epsilon` is out of range.

    References:
        He, Karimireddy & Jaggi, arXiv:2202.01545, with equal weights. Departure: neighbors'
        models are those of their last messages.
    """

    epsilon: float = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, epsilon="above 0 and finite")

    def vector(self, vector: Tensor, known: Knowledge) -> Tensor:
        if not known.heard:
            return vector
        pull = sum((each - known.target for each in known.heard.values()), torch.zeros(()))
        return known.target - self.epsilon / known.num_liars * pull


@dataclass(frozen=True)
class StaleReplay(Attack):
    """Send the first vector again and again."""

    def vector(self, vector: Tensor, known: Knowledge) -> Tensor:
        return known.first
