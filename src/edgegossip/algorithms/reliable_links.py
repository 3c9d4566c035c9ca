"""Links that lose nothing: what is sent is kept until it is answered, and taken in once.

`Awaiting` is what every message needs that is sent again: `ADPSGD` keeps its open request so.
`ReliableLinks` are built on it: each message is acknowledged, and let through in order and
once. Push-sum needs that, whose messages carry mass.

A link leads from one worker to another and has an end at each. Its life is cut into *sessions*:
the sender begins a new one, named after its clock, whenever it or the receiver has been away.
Within a session every round in which the topology has the link is sent. What belongs to an
earlier session is refused: its sender has taken it back, or is no more.

Where a message that is lost takes nothing with it, none of this is needed. `ChocoGossip` asks
for what it has missed and is sent the whole replica; `DiLoCo` compares models, part by part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar

from edgegossip.core.protocol import Effect, Message, Rank, Seconds, Send, SetTimer

NextRound: TypeAlias = Callable[[int], int]
"""The first round, from a given one on, in which a link is there."""
RESEND = "resend"
"""The timer of what is awaited."""

C = TypeVar("C")


@dataclass(slots=True, eq=False)
class Awaiting(Generic[C]):
    """A message that may have been lost, and when to send it again.

    Attributes:
        send: The message, and to whom.
        content: What it gave away, to be taken back if the receiver is lost.
        patience: How long to wait for the answer.
        due: When that is over.
    """

    send: Send
    content: C
    patience: Seconds
    due: Seconds

    @staticmethod
    def of(send: Send, content: C, now: Seconds, patience: Seconds | None) -> Awaiting[C]:
        """What is sent now; `patience` None never sends it again."""
        patience = math.inf if patience is None else patience
        return Awaiting(send, content, patience, now + patience)


def send_again(
    awaiting: Sequence[Awaiting[C]], now: Seconds, growth: float = 1.0
) -> list[Effect]:
    """Send again what was waited for too long, and set the timer for what is due next.

    Args:
        awaiting: All that the timer is for.
        now: On the worker's clock.
        growth: What patience is multiplied by each time.
    """
    effects: list[Effect] = []
    for each in awaiting:
        if each.due <= now:
            each.patience *= growth
            each.due = now + each.patience
            effects.append(each.send)
    return [*effects, *timer(awaiting)]


def timer(awaiting: Sequence[Awaiting[C]]) -> list[Effect]:
    """Wake the worker when the first of them is due."""
    due = min((each.due for each in awaiting), default=math.inf)
    return [SetTimer(RESEND, due)] if due < math.inf else []


@dataclass(slots=True, eq=False)
class Outlet(Generic[C]):
    """The sender's end of a link.

    Attributes:
        session: When it began; 0 from the start of the run on.
        awaiting: What is not acknowledged, by round in ascending order; what opened the session
            comes before all rounds. Nothing is kept where links lose nothing.
        is_open: The message that opens the session has been sent.
    """

    session: Seconds = 0.0
    awaiting: dict[int, Awaiting[C]] = field(default_factory=dict)
    is_open: bool = True

    def acknowledge(self, session: Seconds, next_round: int) -> None:
        """The receiver has all of `session` that was sent before round `next_round`."""
        if session == self.session:
            for round in [round for round in self.awaiting if round < next_round]:
                del self.awaiting[round]


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

    def open(self, message: Message, next_round: NextRound) -> list[Message]:
        """Begin a session with `message`, unless it has been begun before; let that through."""
        session = message.numbers["session"]
        is_new = session > self.session or (self.has_restarted and session != self.session)
        if not is_new:
            return []
        self.session, self.has_restarted = session, False
        self.next_round = next_round(message.round)
        self.held = {key: held for key, held in self.held.items() if key[0] >= session}
        return [message, *self._release(next_round)]

    def accept(self, message: Message, next_round: NextRound) -> list[Message]:
        """Take in a round's message; let through what may now be let through, in order."""
        session = message.numbers["session"]
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


@dataclass(slots=True, eq=False)
class ReliableLinks(Generic[C]):
    """This worker's ends of all its links.

    Attributes:
        inlets: The links that others send to it on, by sender.
        outlets: The links that it sends on, by receiver.
        first_session: The session that links to it are in at first: none for a worker that
            has come back, until it is told.
        last_session: The last one that it has begun.
    """

    inlets: dict[Rank, Inlet] = field(default_factory=dict)
    outlets: dict[Rank, Outlet[C]] = field(default_factory=dict)
    first_session: Seconds = 0.0
    last_session: Seconds = 0.0

    # Sending.

    @property
    def is_idle(self) -> bool:
        """All that was sent has been acknowledged, as far as it is to be."""
        return not any(link.awaiting for link in self.outlets.values())

    def begin(self, receiver: Rank, now: Seconds) -> None:
        """Begin a new session, which the next message opens."""
        self.last_session = max(now, math.nextafter(self.last_session, math.inf))
        self.outlets[receiver] = Outlet(self.last_session, is_open=False)

    def send(
        self, to: Rank, message: Message, content: C, now: Seconds, patience: Seconds | None
    ) -> list[Effect]:
        """Send `message`, and keep it until it is acknowledged.

        Args:
            to: At the other end.
            message: Gets the number "session" besides its own.
            content: Given back by `take_back` if the receiver is lost.
            now: On the worker's clock.
            patience: Seconds until it is sent again; None keeps nothing.
        """
        link = self.outlets.setdefault(to, Outlet())
        numbers = {**message.numbers, "session": link.session}
        send = Send(to, replace(message, numbers=numbers))
        number, link.is_open = message.round if link.is_open else -1, True
        if patience is None:
            return [send]
        link.awaiting[number] = Awaiting.of(send, content, now, patience)
        return [send, *timer(self._firsts())]

    def resend(self, now: Seconds) -> list[Effect]:
        """Send again what links have waited for too long."""
        # A link that is full would never become free of what is sent over and over.
        return send_again(self._firsts(), now, growth=1.5)

    def acknowledge(self, sender: Rank, message: Message) -> list[Effect]:
        """Account for the other end's acknowledgment."""
        if (link := self.outlets.get(sender)) is not None:
            link.acknowledge(message.numbers["session"], message.round)
        return timer(self._firsts())

    def take_back(self, receiver: Rank) -> list[C]:
        """Forget what a receiver that is lost has not acknowledged; returns the contents."""
        if (link := self.outlets.get(receiver)) is None:
            return []
        taken, link.awaiting = link.awaiting, {}
        return [each.content for each in taken.values()]

    def _firsts(self) -> list[Awaiting[C]]:
        """What each receiver needs next; the rest it may have already."""
        links = [link.awaiting for link in self.outlets.values() if link.awaiting]
        return [next(iter(awaiting.values())) for awaiting in links]

    # Receiving.

    def inlet(self, sender: Rank, next_round: NextRound) -> Inlet:
        """The end of the link from `sender`."""
        link = self.inlets.get(sender)
        if link is None:
            link = self.inlets[sender] = Inlet(self.first_session, next_round(0))
        return link

    def forget(self, sender: Rank) -> None:
        """Drop what came from `sender` too early."""
        if (link := self.inlets.get(sender)) is not None:
            link.held.clear()

    def acknowledgment(self, sender: Rank, session: Seconds) -> list[Effect]:
        """Say how far `session` has come, if it is under way."""
        link = self.inlets[sender]
        if session != link.session:
            return []
        told = Message("acknowledged", link.next_round, numbers={"session": session})
        return [Send(sender, told)]
