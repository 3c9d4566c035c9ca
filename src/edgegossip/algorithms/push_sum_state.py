"""What a push-sum worker keeps, and what it offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from edgegossip.algorithms.mass import Inlet, Mass, Outlet
from edgegossip.algorithms.rounds import RoundState
from edgegossip.core.protocol import Payload, Rank, Seconds

HARDLY_ANY = 2.0**-30
"""The weight of a worker that has lost what it had: its parameters are out of date."""


@dataclass(slots=True, kw_only=True)
class PushSumState(RoundState):
    """State of one worker.

    Attributes:
        params: The numerator, [num_params].
        weight: The push-sum weight, above 0.
        before_exchange: Numerator and weight as they were before this round's shares were
            given away; None once those of the others are merged.
        arrived: Mass that waits to be merged.
        inlets: The links that others send to it on, by sender.
        outlets: The links that it sends on, by receiver.
        first_session: The session that links to it are in at first: none for a worker that
            has come back, until it is told.
        last_session: The last one that it has begun.
        needy: Workers that have lost what they had, and are to be given some mass, as keys.
        has_ended: Its rounds are over; whatever still arrives is merged at once.
        has_finished: It has said so.
    """

    weight: float = 1.0
    before_exchange: tuple[Tensor, float] | None = None
    arrived: list[Mass] = field(default_factory=list)
    inlets: dict[Rank, Inlet] = field(default_factory=dict)
    outlets: dict[Rank, Outlet] = field(default_factory=dict)
    first_session: Seconds = 0.0
    last_session: Seconds = 0.0
    needy: dict[Rank, None] = field(default_factory=dict)
    has_ended: bool = False
    has_finished: bool = False

    @property
    def estimate(self) -> Tensor:
        """The numerator over the weight, [num_params]; amid an exchange, as it was before it.

        What is given away may be far from a share of the numerator, as with `SparsePush`, and
        what others give for it is yet to come.
        """
        params, weight = self.before_exchange or (self.params, self.weight)
        return params / weight


@dataclass(slots=True, eq=False)
class Offer:
    """What some receivers are given in a round: ``share * vector`` each, told as `payload`."""

    receivers: Sequence[Rank]
    payload: Payload
    vector: Tensor
    share: float
    kind: str = "push"
