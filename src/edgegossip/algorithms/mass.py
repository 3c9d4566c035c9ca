"""Mass under way: the parts of numerators and weights that push-sum workers give each other.

A link leads from one worker to another and has an end at each. Its life is cut into *sessions*:
the sender begins a new one, named after its clock, whenever it or the receiver has been away.
Within a session every round in which the topology has the link is sent, and what arrives is let
through in order, and once. What belongs to an earlier session is refused: its sender has taken
it back, or is no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from edgegossip.core.protocol import Message, Rank, Seconds

NextRound: TypeAlias = Callable[[int], int]
"""The first round, from a given one on, in which a link is there."""


@dataclass(slots=True, eq=False)
class Mass:
    """A part of somebody's numerator, ``share * vector``, and the weight that goes with it.

    Attributes:
        sender: Who gave it.
        round: Of the sender; -1 for what belongs to none and is merged as soon as can be.
        vector: [num_params]; may be shared with others, and is never written to.
        share: What the vector is to be multiplied by.
        weight: At least 0.
    """

    sender: Rank
    round: int
    vector: Tensor
    share: float
    weight: float


@dataclass(slots=True, eq=False)
class Unacknowledged:
    """A message that may have been lost, the mass in it, and when to send it again.

    Attributes:
        message: As it was sent.
        mass: What it gave away.
        patience: How long to wait for the acknowledgment.
        due: When that is over.
    """

    message: Message
    mass: Mass
    patience: Seconds
    due: Seconds


@dataclass(slots=True, eq=False)
class Outlet:
    """The sender's end of a link.

    Attributes:
        session: When it began; 0 from the start of the run on.
        unacknowledged: By round, in ascending order; what opened the session comes before all
            rounds. Nothing is kept where links lose nothing.
    """

    session: Seconds = 0.0
    unacknowledged: dict[int, Unacknowledged] = field(default_factory=dict)

    @property
    def first(self) -> Unacknowledged | None:
        """What the receiver needs next; the rest it may have already."""
        return next(iter(self.unacknowledged.values()), None)

    def acknowledge(self, session: Seconds, next_round: int) -> None:
        """The receiver has all of `session` that was sent before round `next_round`."""
        if session == self.session:
            for round in [round for round in self.unacknowledged if round < next_round]:
                del self.unacknowledged[round]


@dataclass(slots=True, eq=False)
class Inlet:
    """The receiver's end of a link.

    Attributes:
        session: The one that is under way; minus infinity before the first.
        next_round: The first round that has not been let through.
        held: Messages that came too early, by session and round: of the session under way and
            the newest.
        has_restarted: The sender's clock may have begun anew.
    """

    session: Seconds
    next_round: int
    held: dict[tuple[Seconds, int], Message] = field(default_factory=dict)
    has_restarted: bool = False

    def open(self, session: Seconds, message: Message, next_round: NextRound) -> list[Message]:
        """Begin `session` with `message`, unless it has been begun before; let that through."""
        is_new = session > self.session or (self.has_restarted and session != self.session)
        if not is_new:
            return []
        self.session, self.has_restarted = session, False
        self.next_round = next_round(message.round)
        self.held = {key: held for key, held in self.held.items() if key[0] >= session}
        return [message, *self._release(next_round)]

    def accept(
        self, session: Seconds, message: Message, next_round: NextRound
    ) -> list[Message]:
        """Take in a round's message; let through what may now be let through, in order."""
        if session < self.session:
            return []
        if session == self.session:
            self.has_restarted = False
            if message.round < self.next_round:
                return []
        else:
            if session < max((held for held, _ in self.held), default=session):
                return []  # given up, for there is a newer one
            known = self.held.items()
            self.held = {key: m for key, m in known if key[0] in (self.session, session)}
        self.held[session, message.round] = message
        return self._release(next_round)

    def _release(self, next_round: NextRound) -> list[Message]:
        released = []
        while (message := self.held.pop((self.session, self.next_round), None)) is not None:
            released.append(message)
            self.next_round = next_round(self.next_round + 1)
        return released


def later(now: Seconds, last: Seconds) -> Seconds:
    """`now`, or just after `last` if that is not earlier."""
    return max(now, math.nextafter(last, math.inf))
