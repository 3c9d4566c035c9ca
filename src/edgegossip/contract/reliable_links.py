"""Reliable links: messages are kept until they are answered, and delivered once.

`Awaiting` holds a message that may be resent, such as the open request of `ADPSGD`.
`ReliableLinks` builds on it: each message is acknowledged, and delivered once and in order.
Push-sum needs such links, because its messages carry mass.

A link leads from one worker to another and has an end at each. A link is used in *sessions*:
the sender begins a new session, numbered by its clock, whenever either end has been away. A
session has a message for every round in which the topology has the link. A message from an
earlier session is rejected, because its sender has taken it back or has restarted.

In an open run, a receiver does not know in which rounds a sender has the link. Messages are
then counted ("index"), and each counts.

Algorithms whose messages carry no mass do not need reliable links. `ChocoGossip` asks for the
whole replica after a missed increment, and `DiLoCo` averages models part by part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar

from edgegossip.contract.protocol import Effect, Message, Rank, Seconds, Send, SetTimer

NextRound: TypeAlias = Callable[[int], int]
"""Returns the first round, at or after a given round, in which the link exists."""
RESEND = "resend"
"""The timer for awaited answers."""

C = TypeVar("C")


@dataclass(slots=True, eq=False)
class Awaiting(Generic[C]):
    """A message that may have been lost, and the time to resend it.

    Attributes:
        send: The message and its receiver.
        content: Content to take back if the receiver is lost.
        patience: Seconds to wait for the answer.
        due: Time at which the wait ends.
    """

    send: Send
    content: C
    patience: Seconds
    due: Seconds

    @staticmethod
    def of(send: Send, content: C, now: Seconds, patience: Seconds | None) -> Awaiting[C]:
        """Await the answer to `send`, which is sent now; without `patience`, never resend."""
        patience = math.inf if patience is None else patience
        return Awaiting(send, content, patience, now + patience)

    @staticmethod
    def resend(
        awaiting: Sequence[Awaiting[C]], now: Seconds, growth: float = 1.0
    ) -> list[Effect]:
        """Resend overdue messages, and set the timer for the next one.

        Args:
            awaiting: All messages that share the timer.
            now: Time on the worker's clock.
            growth: Factor by which each resend multiplies the patience.
        """
        effects: list[Effect] = []
        for each in awaiting:
            if each.due <= now:
                each.patience *= growth
                each.due = now + each.patience
                effects.append(each.send)
        return [*effects, *Awaiting.timer(awaiting)]

    @staticmethod
    def timer(awaiting: Sequence[Awaiting[C]]) -> list[Effect]:
        """Wake the worker when the first unanswered message is due."""
        due = min((each.due for each in awaiting), default=math.inf)
        # No timer is canceled: one that fires after the answer finds nothing to resend.
        return [SetTimer(RESEND, due)] if due < math.inf else []


@dataclass(slots=True, eq=False)
class Outlet(Generic[C]):
    """The sender's end of a link.

    Attributes:
        session: Start time of the session; 0 for the start of the run.
        awaiting: Unacknowledged messages, by round in ascending order; the message that opened
            the session comes first. Empty if messages are never resent.
        is_open: Whether the message that opens the session has been sent.
        num_sent: Number of messages after that one.
    """

    session: Seconds = 0.0
    awaiting: dict[int, Awaiting[C]] = field(default_factory=dict)
    is_open: bool = True
    num_sent: int = 0

    def acknowledge(self, session: Seconds, next_round: int) -> None:
        """Drop the session's messages before `next_round`, which the receiver has."""
        # A late acknowledgment of an earlier session says nothing about this one, whose numbers
        # may be the same.
        if session == self.session:
            for round in [round for round in self.awaiting if round < next_round]:
                del self.awaiting[round]


@dataclass(slots=True, eq=False)
class Inlet:
    """The receiver's end of a link.

    Attributes:
        session: The current session; minus infinity before the first.
        next_round: The first undelivered round.
        held: Early messages of the current and of the newest session, by session and round.
        has_restarted: Whether the sender's clock may have restarted.
    """

    session: Seconds
    next_round: int
    held: dict[tuple[Seconds, int], Message] = field(default_factory=dict)
    has_restarted: bool = False

    def open(self, message: Message, next_round: NextRound) -> list[Message]:
        """Begin a session with `message`, unless it has already begun; deliver all messages
        that are now in order.
        """
        session = message.numbers["session"]
        # Sessions are clock times, so a larger one is newer, unless the clock has restarted.
        is_new = session > self.session or (self.has_restarted and session != self.session)
        if not is_new:
            return []
        self.session, self.has_restarted = session, False
        self.next_round = next_round(_number_of(message))
        self.held = {key: held for key, held in self.held.items() if key[0] >= session}
        return [message, *self._release(next_round)]

    def accept(self, message: Message, next_round: NextRound) -> list[Message]:
        """Accept a round's message; deliver all messages that are now in order."""
        session = message.numbers["session"]
        if session < self.session:
            return []
        if session == self.session:
            self.has_restarted = False
            if _number_of(message) < self.next_round:
                return []
        else:
            # A message may overtake the one that opens its session. It is held until then, but
            # only for one future session, so that memory stays bounded.
            if session < max((held for held, _ in self.held), default=session):
                return []  # given up, because there is a newer one
            known = self.held.items()
            self.held = {key: m for key, m in known if key[0] in (self.session, session)}
        self.held[session, _number_of(message)] = message
        return self._release(next_round)

    def _release(self, next_round: NextRound) -> list[Message]:
        released = []
        while (message := self.held.pop((self.session, self.next_round), None)) is not None:
            released.append(message)
            self.next_round = next_round(self.next_round + 1)
        return released


def _number_of(message: Message) -> int:
    return int(message.numbers.get("index", message.round))


@dataclass(slots=True, eq=False)
class ReliableLinks(Generic[C]):
    """This worker's ends of all its links.

    Attributes:
        inlets: Incoming links, by sender.
        outlets: Outgoing links, by receiver.
        first_session: Initial session of incoming links; a worker that has come back has none.
        last_session: The last session that this worker began.
        is_counting: Whether messages are counted, as in an open run.
    """

    inlets: dict[Rank, Inlet] = field(default_factory=dict)
    outlets: dict[Rank, Outlet[C]] = field(default_factory=dict)
    first_session: Seconds = 0.0
    last_session: Seconds = 0.0
    is_counting: bool = False

    # Sending.

    @property
    def is_idle(self) -> bool:
        """Whether all messages are acknowledged."""
        return not any(link.awaiting for link in self.outlets.values())

    def begin(self, receiver: Rank, now: Seconds) -> None:
        """Begin a new session, which the next message opens."""
        # Two sessions that begin at the same time still need different numbers.
        self.last_session = max(now, math.nextafter(self.last_session, math.inf))
        self.outlets[receiver] = Outlet(self.last_session, is_open=False)

    def send(
        self, to: Rank, message: Message, content: C, now: Seconds, patience: Seconds | None
    ) -> list[Effect]:
        """Send `message`, and keep it until it is acknowledged.

        Args:
            to: Receiver at the other end.
            message: Message to send, to which the number "session" is added.
            content: Content that `take_back` returns if the receiver is lost.
            now: Time on the worker's clock.
            patience: Seconds until the message is resent; None neither keeps nor resends it.
        """
        link = self.outlets.setdefault(to, Outlet())
        numbers = {**message.numbers, "session": link.session}
        number = message.round
        if self.is_counting:
            # The message that opens a session has the number of the first one after it.
            number = numbers["index"] = link.num_sent
            link.num_sent += link.is_open
        send = Send(to, replace(message, numbers=numbers))
        number, link.is_open = number if link.is_open else -1, True
        if patience is None:
            return [send]
        link.awaiting[number] = Awaiting.of(send, content, now, patience)
        return [send, *Awaiting.timer(self._firsts())]

    def resend(self, now: Seconds) -> list[Effect]:
        """Resend overdue messages of all links."""
        # Fixed intervals would repeat messages on a full link faster than the link drains.
        return Awaiting.resend(self._firsts(), now, growth=1.5)

    def acknowledge(self, sender: Rank, message: Message) -> list[Effect]:
        """Handle the other end's acknowledgment."""
        if (link := self.outlets.get(sender)) is not None:
            link.acknowledge(message.numbers["session"], message.round)
        return Awaiting.timer(self._firsts())

    def take_back(self, receiver: Rank) -> list[C]:
        """Forget the unacknowledged messages of a lost receiver; return their contents."""
        if (link := self.outlets.get(receiver)) is None:
            return []
        taken, link.awaiting = link.awaiting, {}
        return [each.content for each in taken.values()]

    def _firsts(self) -> list[Awaiting[C]]:
        """The first message that each receiver still needs."""
        # An acknowledgment is cumulative: the receiver may already have the later messages, and
        # the answer to the first will say so.
        links = [link.awaiting for link in self.outlets.values() if link.awaiting]
        return [next(iter(awaiting.values())) for awaiting in links]

    # Receiving.

    def inlet(self, sender: Rank, next_round: NextRound) -> Inlet:
        """This worker's end of the link from `sender`."""
        link = self.inlets.get(sender)
        if link is None:
            link = self.inlets[sender] = Inlet(self.first_session, next_round(0))
        return link

    def forget(self, sender: Rank) -> None:
        """Drop early messages from `sender`."""
        if (link := self.inlets.get(sender)) is not None:
            link.held.clear()

    def acknowledgment(self, sender: Rank, session: Seconds) -> list[Effect]:
        """Acknowledge the progress of `session`, if it is the current one."""
        link = self.inlets[sender]
        if session != link.session:
            return []
        told = Message("acknowledged", link.next_round, numbers={"session": session})
        return [Send(sender, told)]
