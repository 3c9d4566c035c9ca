"""State of a push-sum worker, and offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from edgegossip.algorithms.reliable_links import ReliableLinks
from edgegossip.algorithms.rounds import RoundState
from edgegossip.core.protocol import Payload, Rank

HARDLY_ANY = 2.0**-30
"""The weight of a worker that has lost its mass and whose parameters are out of date."""


@dataclass(slots=True, eq=False)
class Mass:
    """A part of a worker's numerator, ``share * vector``, with its weight.

    Attributes:
        sender: Worker that gave the mass.
        round: Round of the sender; -1 for mass that belongs to no round and is merged at once.
        vector: [num_params]; may be shared, and is never written to.
        share: Factor of the vector.
        weight: Weight of the mass, at least 0.
    """

    sender: Rank
    round: int
    vector: Tensor
    share: float
    weight: float


@dataclass(slots=True, kw_only=True)
class PushSumState(RoundState):
    """State of one worker.

    Attributes:
        params: The numerator, [num_params].
        weight: The push-sum weight, above 0.
        before_exchange: Numerator and weight before this round's shares were given away; None
            once the others' shares are merged.
        arrived: Mass that waits to be merged.
        links: Links to and from the worker's neighbors.
        needy: Workers that have lost their mass and need new mass, as keys.
        has_ended: Whether the worker's rounds are over; arriving mass is then merged at once.
        has_finished: Whether the worker has returned `Finish`.
    """

    weight: float = 1.0
    before_exchange: tuple[Tensor, float] | None = None
    arrived: list[Mass] = field(default_factory=list)
    links: ReliableLinks[Mass] = field(default_factory=ReliableLinks)
    needy: dict[Rank, None] = field(default_factory=dict)
    has_ended: bool = False
    has_finished: bool = False

    @property
    def estimate(self) -> Tensor:
        """The numerator over the weight, [num_params]; during an exchange, the value before it.

        During an exchange the numerator is meaningless: the vector given away may be far from a
        share of it, as in `SparsePush`, and the others' vectors have not arrived yet.
        """
        params, weight = self.before_exchange or (self.params, self.weight)
        return params / weight


@dataclass(slots=True, eq=False)
class Offer:
    """An offer in a round: each receiver gets ``share * vector``, sent as `payload`."""

    receivers: Sequence[Rank]
    payload: Payload
    vector: Tensor
    share: float
    kind: str = "push"
