"""A ledger of the messages between real hosts: what was sent, handed over, and lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from tests.oracles import ViolationError

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Event, Message, Rank, Received, Seconds
from edgegossip.net.guard.envelope import Envelope
from edgegossip.net.host.host import Host
from edgegossip.net.host.peers import PLACEHOLDER
from edgegossip.net.runtime import Life

Way: TypeAlias = tuple[Rank, Life, Rank, Life]
"""A sender and a receiver, each with its life: what numbers of messages count for."""


@dataclass
class Gap:
    """Numbers that a process has not got before one that it has, which may be its first."""

    process: int
    is_first: bool
    way: Way
    after: int
    before: int
    at: Seconds


@dataclass
class Deliveries:
    """Each numbered message is handed over at most once, in order, and as it was sent.

    Args:
        clock: Virtual time.
        report: Takes what is wrong.

    Attributes:
        sent: What went under a number; workers that resume may send it again, or another.
        unsent: Messages to workers that nothing could be sent to.
        last: By process, the last number handed over on each way.
        heard: Processes and ways on which something was handed over.
        processes: By rank, its last process.
        resumed: Processes that have resumed.
        sent_by: By way and number, the process that sent the message.
        gaps: Numbers that were passed over, although something was sent under them.
        again: Ways and numbers of messages that came although they had arrived.
    """

    clock: Callable[[], Seconds]
    report: Callable[[ViolationError], None]
    sent: dict[Way, dict[int, list[Message]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    unsent: list[Message] = field(default_factory=list)
    last: dict[int, dict[Way, int]] = field(default_factory=lambda: defaultdict(dict))
    handed_over: set[tuple[Way, int]] = field(default_factory=set)
    heard: set[tuple[int, Way]] = field(default_factory=set)
    processes: dict[Rank, int] = field(default_factory=dict)
    resumed: set[int] = field(default_factory=set)
    sent_by: dict[tuple[Way, int], int] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    again: list[tuple[Way, int]] = field(default_factory=list)

    def watch(
        self,
        host: Host[Any],
        process: int,
        taken: list[Received],
        kept: dict[Way, int] | None,
    ) -> None:
        """Follow a host; one that resumes goes on after what it had `kept`.

        All that it takes is added to `taken`.
        """
        self._watch_sending(host)
        self._watch_receiving(host, process, taken)
        self.processes[host.rank] = process
        if kept is not None:
            self.resumed.add(process)
            self.last[process] = dict(kept)

    def _watch_sending(self, host: Host[Any]) -> None:
        peers, send = host.peers, host.sending.send

        def sends(
            receiver: Rank, message: Message, report: Callable[[], None] | None = None
        ) -> bool:
            before, last = peers[receiver].sent, host.sending._last.get(receiver)
            is_sent, peer = send(receiver, message, report), peers[receiver]
            if peer.sent == before and is_sent:
                if host.sending._last.get(receiver) is last:  # the same one still waits
                    return True
                _, message = host.sending._last[receiver]  # it is a part of the one before
            elif peer.sent == before:
                self.unsent.append(message)
                return False
            way = (peers.rank, peers.life, receiver, peer.life)
            self.sent[way][peer.sent].append(message)
            self.sent_by[way, peer.sent] = self.processes[peers.rank]
            return is_sent

        host.sending.send = sends  # type: ignore[method-assign]

    def _watch_receiving(self, host: Host[Any], process: int, taken: list[Received]) -> None:
        peers = host.peers

        def counting(take: Callable[..., list[Event]]) -> Callable[..., list[Event]]:
            def takes(*args: Any) -> list[Event]:  # noqa: ANN401
                events = take(*args)
                if not events:
                    return events
                by_sender: dict[Rank, list[Message]] = defaultdict(list)
                for event in events:
                    if isinstance(event, Received):
                        taken.append(event)
                        by_sender[event.sender].append(event.message)
                for sender, messages in by_sender.items():
                    peer = peers[sender]
                    way = (sender, peer.life, peers.rank, peers.life)
                    try:
                        self._hand_over(process, way, peer.received, messages)
                    except ViolationError as violation:
                        self.report(violation)
                return events

            return takes

        read = host.receiving._read

        def reads(
            sender: Rank, envelope: Envelope, message: Message, now: Seconds
        ) -> list[Event]:
            way = (sender, envelope.sender_life, peers.rank, envelope.receiver_life)
            is_current = (peers[sender].life, peers.life) == (way[1], way[3])
            if is_current and 0 < envelope.number <= peers[sender].received:
                self.again.append((way, envelope.number))
            elif is_current and message.kind == PLACEHOLDER.kind:
                self._pass_over(process, way, envelope.number, host._algorithm)
            return read(sender, envelope, message, now)

        # What arrives, and what could not be judged when it did.
        host.receiving._take = counting(host.receiving._take)  # type: ignore[method-assign]
        host.receiving.reconsider = counting(  # type: ignore[method-assign]
            host.receiving.reconsider
        )
        host.receiving._read = reads  # type: ignore[method-assign]

    def _pass_over(
        self, process: int, way: Way, number: int, algorithm: Algorithm[Any]
    ) -> None:
        """Take a placeholder, which stands only for what a newer message has replaced."""
        known = self.sent[way]
        newer = [each for later in known if later > number for each in known[later]]
        for older in known.get(number, []):
            if not any(algorithm.replaces(each, older) for each in newer):
                self.report(
                    ViolationError(
                        f"worker {way[2]} gets a placeholder for message {number} of worker "
                        f"{way[0]}, which no newer one replaces: {older.kind}"
                    )
                )
        self.heard.add((process, way))
        self.last[process][way] = number
        self.handed_over.add((way, number))

    def _hand_over(self, process: int, way: Way, number: int, messages: list[Message]) -> None:
        sender, _, receiver, _ = way
        last, is_first = self.last[process].get(way, 0), (process, way) not in self.heard
        self.heard.add((process, way))
        if number - last < len(messages):
            raise ViolationError(
                f"worker {receiver} was handed message {number} of worker {sender} after {last}"
            )
        self.last[process][way] = number
        self.handed_over.add((way, number))
        if len(messages) > 1:  # nobody could judge them before, so their numbers are not known
            self.handed_over.update((way, each) for each in range(last + 1, number))
            return
        missing = [each for each in range(last + 1, number) if each in self.sent[way]]
        if process in self.resumed and is_first:
            # The sender was killed before, and the receiver's checkpoint is older.
            now = self.processes[sender]
            missing = [each for each in missing if self.sent_by[way, each] == now]
        if missing:
            self.gaps.append(Gap(process, is_first, way, last, number, self.clock()))
        if not any(is_same(messages[0], each) for each in self.sent[way].get(number, [])):
            raise ViolationError(
                f"worker {receiver} was handed as message {number} of worker {sender} what "
                f"that one has not sent: {messages[0].kind} of round {messages[0].round}"
            )

    def lost(self) -> Iterator[tuple[Way, int, Message]]:
        """Messages that were sent and never handed over."""
        for way, numbers in self.sent.items():
            for number, messages in numbers.items():
                if (way, number) not in self.handed_over:
                    yield way, number, messages[-1]


def is_same(one: Message, other: Message) -> bool:
    """Whether two messages say the same."""
    return (
        (one.kind, one.round, one.numbers) == (other.kind, other.round, other.numbers)
        and one.payload.keys() == other.payload.keys()
        and all(torch.equal(x, other.payload[name]) for name, x in one.payload.items())
    )
