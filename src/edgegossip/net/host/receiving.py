"""Network events in a host's inbox."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import psutil
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Event, Message, Rank, Received, Seconds
from edgegossip.contract.schema import require_described
from edgegossip.net.guard.admission import FLOOD, Admission
from edgegossip.net.guard.envelope import Envelope, pack
from edgegossip.net.guard.seals import Seals, with_seals
from edgegossip.net.host.introduction import INTRODUCTION, SPEC, Introductions
from edgegossip.net.host.link_log import LinkLog
from edgegossip.net.host.peers import Peers
from edgegossip.net.host.sending import Outbox
from edgegossip.net.host.settings import HostSettings
from edgegossip.net.host.status import STATUS, Phase, WorkerStatus, spec
from edgegossip.net.host.trust import Trust
from edgegossip.net.runtime import REFUSED_COST, STATUS_COST, Sink, TokenBucket
from edgegossip.net.transport import Incarnation, Transport
from edgegossip.net.zenoh.twins import require_no_twin


@dataclass(slots=True, eq=False)
class Frame:
    """A frame has arrived."""

    sender: Rank
    data: memoryview


@dataclass(slots=True)
class Appeared:
    """A process has become reachable."""

    rank: Rank
    incarnation: Incarnation


@dataclass(slots=True)
class Disappeared:
    """A process is no longer reachable."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Refused:
    """The transport rejected input, once or several times."""

    rank: Rank | None
    reason: str


@dataclass(slots=True, eq=False)
class Left:
    """A message was handed to the transport, or is kept until this is possible."""

    receiver: Rank
    message: Message
    handed_over: Seconds


Item: TypeAlias = Frame | Appeared | Disappeared | Refused
ITEMS = (Frame, Appeared, Disappeared, Refused)


# A memory limit on arrived messages that are still needed.


_OVERHEAD = 512  # bytes that even the shortest frame takes
_GIB = 2**30
_SHARE = 3
_ROOM = 4096  # for the headers around the payload


class _Held(weakref.ref["np.ndarray"]):
    """Reports that a frame was freed, and its size; lighter than `weakref.finalize`."""

    __slots__ = ("num_bytes", "sender")
    sender: Rank
    num_bytes: int


class Holding:
    """Counts frames from their arrival until the last tensor made from them is freed.

    Each sender may always have three of the largest messages here: the current round's, the
    next round's, and one more. Otherwise a worker could reject the very message that all other
    workers wait for.

    `take` is thread-safe.

    Args:
        max_bytes: Limit, in bytes, on all frames together. None for an eighth of the machine's
            memory or 1 GiB, whichever is less, but at least eight of the largest messages.
        largest: Bytes of the largest message.

    Attributes:
        share: Bytes that are always accepted from each sender.
    """

    def __init__(self, max_bytes: int | None, largest: int) -> None:
        if max_bytes is None:
            max_bytes = max(8 * largest, min(_GIB, psutil.virtual_memory().total // 8))
        self.max_bytes = max_bytes
        self.share = _SHARE * (largest + _ROOM)
        self._lock = threading.Lock()
        self._held: Counter[Rank] = Counter()
        # Memory may be freed in any thread, even in one that has the lock.
        self._freed: deque[_Held] = deque()
        self._alive: dict[int, _Held] = {}  # by id, as arrays cannot be compared

    def take(self, sender: Rank, frame: memoryview) -> memoryview | None:
        """Count `frame`; return the frame to use instead, or None beyond the limit."""
        num_bytes = len(frame) + _OVERHEAD
        with self._lock:
            self._settle()
            is_too_much = self._held.total() + num_bytes > self.max_bytes
            if is_too_much and self._held[sender] + num_bytes > self.share:
                return None
            self._held[sender] += num_bytes
            owner = np.asarray(frame)  # not every buffer can report when it is freed
            held = _Held(owner, self._freed.append)
            held.sender, held.num_bytes = sender, num_bytes
            self._alive[id(held)] = held
        return owner.data

    @property
    def num_bytes(self) -> int:
        """Bytes currently held."""
        with self._lock:
            self._settle()
            return self._held.total()

    def _settle(self) -> None:
        while self._freed:
            held = self._freed.popleft()
            del self._alive[id(held)]
            self._held[held.sender] -= held.num_bytes


# A host's post: it validates input, numbers output, and tracks the other workers.


_LOG = logging.getLogger("edgegossip.net")
_HOLD: Seconds = 3.0
"""Seconds for which messages wait for the report of a worker whose link is back."""


class Post:
    """Sends and receives for one worker; a `Listener`.

    Threads other than the host's call only the listener's methods.

    Args:
        algorithm: Algorithm, which provides the schema of the messages.
        params: Initial parameters, [num_params].
        transport: Carries frames.
        items: Queue of items for `take`.
        peers: This worker's rank, and the state of the others.
        settings: Limits.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        params: Tensor,
        transport: Transport,
        items: Sink,
        peers: Peers,
        settings: HostSettings,
    ) -> None:
        self.peers = peers
        self.rank = rank = peers.rank
        self.phase = Phase.WAITING
        self.elapsed: Callable[[], Seconds] = lambda: 0.0
        self._transport = transport
        self._items = items
        self._run = settings.run
        self._clock = settings.runtime.clock
        self.introductions = Introductions(peers.num_workers, settings.introduction)
        self._links = LinkLog(transport.lease)
        own = {STATUS: spec(peers.num_workers), INTRODUCTION: SPEC}
        schema = {**algorithm.schema(params), **own}
        self._passed_on = {kind for kind, each in schema.items() if each.is_passed_on}
        self._seals: Seals | None = None
        if transport.credentials is not None and self._passed_on:
            self._seals = Seals(transport.credentials, rank, settings.run)
            schema = with_seals(schema, peers.num_workers)
        self._schema = schema
        self.trust = Trust(schema, params, peers, lambda other: algorithm.role(other).name)
        self._strikes = self.trust.strikes
        self._judged_with: tuple[int, ...] = ()  # what was known when messages were undecided
        self._buckets = {other: TokenBucket() for other, _ in peers}
        self.admission = Admission(
            run=settings.run,
            rank=rank,
            num_workers=peers.num_workers,
            schema=schema,
            plausibility=self.trust.plausibility,
            seals=self._seals,
            life_of=lambda other: peers[other].life,
        )
        self.spoke_at = dict.fromkeys((other for other, _ in peers), 0.0)
        """Time of the last status from each other worker."""
        # Introductions are rare and are read at once.
        largest = max(s.max_num_bytes for kind, s in schema.items() if kind != INTRODUCTION)
        self._holding = held = Holding(settings.max_waiting_bytes, largest)
        self._outbox = Outbox(transport, max(held.max_bytes, held.share), settings.runtime)
        self._told: dict[Rank, WorkerStatus] = {}
        # Workers whose link was cut and is back, or that came back in the same life. Such a
        # worker lacks messages, so it gets no new one before it has reported which. Otherwise
        # the new one would prove the older ones lost. By worker: the time when this ends.
        self._relinked: dict[Rank, Seconds] = {}
        self._lock = threading.Lock()
        self._refused: Counter[Refused] = Counter()

    @property
    def calls(self) -> tuple[str, ...]:
        """The endpoints to which the transport connects."""
        return self._transport.calls

    def open(self, keep_trying: Callable[[], bool] = lambda: True) -> None:
        self._transport.open(self, self.admission.max_bytes, keep_trying)

    def close(self, seconds: Seconds = 10.0) -> None:
        if self.phase == Phase.RUNNING:
            self.phase = Phase.GONE
            self.tell_all()
        self._outbox.close(seconds)
        self._transport.close()

    # Calls of the transport, from its threads.

    def received(self, sender: Rank, frame: memoryview) -> None:
        if sender in self._strikes.muted:
            self.refused(sender, "no longer heard")
            return
        bucket = self._buckets.get(sender)
        if bucket is not None and not bucket.take(self._clock()):
            self.refused(sender, FLOOD)
            return
        held = self._holding.take(sender, frame)
        if held is None:
            self.refused(sender, "more than can be held")
        else:
            self._items.put(Frame(sender, held))

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        self._items.put(Appeared(rank, incarnation))

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None:
        self._outbox.drop(rank)
        self._items.put(Disappeared(rank, incarnation))

    def refused(self, rank: Rank | None, reason: str) -> None:
        refused = Refused(rank, reason)
        with self._lock:
            self._refused[refused] += 1
            is_first = self._refused[refused] == 1
        if is_first:  # the rest will be counted together with it
            self._items.put(refused)

    # For the host, on its thread.

    def take(self, item: Item, own_round: int, now: Seconds) -> list[Event]:
        """Events for the algorithm that result from `item`.

        Raises:
            NetworkError: If another process was this worker before.
        """
        events = self._take(item, own_round, now)
        return [*events, *self.reconsider(own_round, now)]

    def _take(self, item: Item, own_round: int, now: Seconds) -> list[Event]:
        match item:
            case Frame(sender, data):
                return self._open_frame(sender, data, own_round, now)
            case Appeared(rank, incarnation):
                self._links.found(rank, incarnation, self._clock())
                if self.peers.has_begun:
                    self._relinked[rank] = self._clock() + _HOLD
                if incarnation != self.peers[rank].incarnation:
                    self.trust.forgive(rank)
                    self._buckets[rank].refill(self._clock())
                self.peers.appeared(rank, incarnation)
                self.introductions.appeared(rank, incarnation)
                self._post(rank, self.introductions.message, 0, None)
                self._told.pop(rank, None)
                self.tell(rank)
                return []
            case Disappeared(rank, incarnation):
                status, clock = self.peers[rank].status, self._clock()
                phase = None if status is None else status.phase
                self._links.lost(rank, incarnation, phase, clock)
                self._outbox.resume(rank)
                return self.peers.disappeared(rank, incarnation, clock)
            case Refused(rank, reason):
                require_no_twin(self.rank, rank, reason)
                with self._lock:
                    number = self._refused.pop(item)
                self.admission.refused(rank, reason, number=number)
                if reason == FLOOD and rank is not None and rank not in self._strikes.muted:
                    return self.trust.mute(rank, "it has sent more than any honest worker does")
        return []

    def _open_frame(
        self, sender: Rank, data: Buffer, own_round: int, now: Seconds
    ) -> list[Event]:
        if sender in self._strikes.muted:
            return []
        admitted = self.admission.admit(sender, data, own_round)
        offenders, self.admission.offenders = self.admission.offenders, []
        events = self.trust.punish(offenders)
        bucket = self._buckets[sender] if sender in self._buckets else TokenBucket()
        if admitted is None:
            undecided = self.admission.undecided
            if not undecided or undecided[-1][1] is not data:
                bucket.charge(REFUSED_COST)
            return events
        if admitted[1].kind in (STATUS, INTRODUCTION):
            bucket.charge(STATUS_COST)
        return [*events, *self._read(sender, *admitted, now)]

    def _read(
        self, sender: Rank, envelope: Envelope, message: Message, now: Seconds
    ) -> list[Event]:
        if message.kind == INTRODUCTION:
            self.introductions.take(sender, message)
        if difference := self.introductions.difference(sender):
            self.admission.refused(sender, "of other settings", difference)
            self.peers[sender].refuse()
            return self.peers.lose(sender)
        if message.kind == INTRODUCTION:
            # By now it knows that this worker can be reached. It may have forgotten messages
            # that were sent before it knew.
            self.tell(sender, again=True)
            return []
        if message.kind == STATUS:
            return self._read_status(sender, message, now)
        peer = self.peers[sender]
        if envelope.sender_life != peer.life or envelope.receiver_life != self.peers.life:
            return []  # between earlier lives of one of the two
        if envelope.number <= peer.received:
            return []  # resent by a resumed worker
        if number := envelope.number - peer.received - 1:
            peer.has_lost_some = True
            detail = "it never arrived, or was rejected"
            self.admission.refused(sender, "missing", detail, number)
        peer.heard(envelope.number, now)
        is_there = self.peers.has_begun and peer.is_reachable  # else it is old
        found = self.peers.find(sender) if is_there else []
        return [*found, Received(sender, message)]

    def _read_status(self, sender: Rank, message: Message, now: Seconds) -> list[Event]:
        status = WorkerStatus.parse(message)
        events = self.peers.told(sender, status, self._clock())
        if self.peers[sender].status is not status:
            return events  # from a superseded life
        self.spoke_at[sender] = now
        self._relink(sender)
        # It may have missed the message it waits for, or count a worker as lost that has
        # nothing more to send.
        waits = self.phase >= Phase.RUNNING and status.phase == Phase.WAITING
        if waits or (self.phase == Phase.FINISHED and status.phase == Phase.RUNNING):
            self.tell(sender, again=True)
        return events

    def reconsider(self, own_round: int, now: Seconds) -> list[Event]:
        """Events for the algorithm from blamed workers, and from messages that were undecided.

        Call this after training, which may show who is to blame, and what is usual.
        """
        events, self.trust.blamed = self.trust.blamed, []
        if not self.admission.undecided:  # as nearly always, and this is asked for every item
            return events
        known = self.trust.plausibility.num_changes, *self.trust.present
        if known != self._judged_with:
            self._judged_with = known
            undecided, self.admission.undecided = self.admission.undecided, []
            for sender, frame in undecided:
                events += self._open_frame(sender, frame, own_round, now)
        return events

    # Messages that the host sends.

    def send(
        self, receiver: Rank, message: Message, left: Callable[[], None] | None = None
    ) -> bool:
        """Send an algorithm's message; return whether it was sent.

        `left` is called, possibly from another thread, when the transport has the message, or
        when it is kept for a receiver that will report its missing messages.

        Raises:
            LocalProtocolError: If the algorithm's schema does not describe the message.
        """
        require_described(self._schema, message, self.rank)
        peer = self.peers[receiver]
        if not peer.is_known and (peer.is_lost or not peer.life):
            return False
        peer.sent += 1
        peer.log.add(peer.sent, message)
        # It has left for a moment, or has not reported its missing messages yet. If it resumes
        # its life, it gets this message after the earlier ones.
        is_held = receiver in self._relinked and peer.log.has(peer.sent)
        is_sent = True
        if peer.is_known and not is_held:
            is_sent = self._post(receiver, message, peer.sent, left)
        elif left is not None:
            left()
        self.trust.plausibility.sent(message)  # reads all of it while it is being sent
        return is_sent

    def send_again(self) -> None:
        """Send all present workers the messages that they lack."""
        for rank, peer in self.peers:
            if not peer.is_lost and peer.status is not None:
                self._send_missing(rank)

    def _relink(self, rank: Rank) -> None:
        """Send `rank`, whose link is back, the messages that its last report lacks."""
        if self._relinked.pop(rank, None) is not None:
            self._send_missing(rank)

    @property
    def release_at(self) -> Seconds:
        """Time, on this worker's clock, at which held messages are sent anyway; infinity
        if none are held.
        """
        return min(self._held.values(), default=math.inf)

    def release(self, clock: Seconds) -> None:
        """Send the messages held for workers whose report is overdue."""
        for rank in [rank for rank, at in self._held.items() if clock >= at]:
            self._relink(rank)

    @property
    def _held(self) -> dict[Rank, Seconds]:
        """The times until which messages to reachable workers are held."""
        return {r: at for r, at in self._relinked.items() if self.peers[r].is_known}

    def _send_missing(self, rank: Rank) -> None:
        """Send `rank` the messages that it lacks in its current life."""
        peer = self.peers[rank]
        assert peer.status is not None
        for number, message in [*peer.log.entries]:
            if number > peer.status.received[self.rank]:
                self._post(rank, message, number, None)

    def _post(
        self, receiver: Rank, message: Message, number: int, left: Callable[[], None] | None
    ) -> bool:
        envelope = Envelope(
            run=self._run,
            sender=self.rank,
            sender_life=self.peers.life,
            receiver_life=self.peers[receiver].life,
            number=number,
        )
        if self._seals is not None and message.kind in self._passed_on:
            message = self._seals.sealed(message, self.peers.life)
        frame = pack(envelope, message)
        self._links.sent(receiver, sum(map(len, frame)), self._clock())
        return self._outbox.put(receiver, frame, left)

    def tell(self, rank: Rank, *, again: bool = False) -> None:
        """Send `rank` this worker's status if `rank` is reachable and does not know it yet."""
        if not self.peers[rank].is_reachable:
            return
        status = self.peers.status_for(rank, self.phase, self.elapsed())
        if again or status.is_news(self._told.get(rank)):
            self._told[rank] = status
            self._post(rank, status.message(), 0, None)

    def tell_all(self, *, again: bool = False) -> None:
        """Send this worker's status to every worker that does not know it yet."""
        for rank, _ in self.peers:
            self.tell(rank, again=again)

    @property
    def refusals(self) -> dict[str, int]:
        """Number of rejected and missing messages, by sender and reason."""
        dropped = self.admission.dropped.items()
        return {f"worker {sender}: {reason}": n for (sender, reason), n in dropped}

    @property
    def is_over(self) -> bool:
        """Whether all present workers have finished and nothing is in flight."""
        peers = self.peers
        return (
            self.phase == Phase.FINISHED
            and self._outbox.is_empty
            and not peers.unfinished
            and peers.is_nothing_under_way
        )
