"""Receiving: from the transport's threads to events for the algorithm."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import psutil
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.codec import Buffer
from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import (
    Event,
    Message,
    Rank,
    Received,
    Seconds,
    WorkerJoined,
)
from edgegossip.contract.schema import MessageSpec
from edgegossip.contract.topology import Topology
from edgegossip.net.guard.admission import (
    FLOOD,
    MUTED,
    Admission,
    Admitted,
    Refusals,
    Refused,
    Undecided,
)
from edgegossip.net.guard.envelope import Envelope
from edgegossip.net.guard.plausibility import Plausibility
from edgegossip.net.guard.seals import Seals, with_seals
from edgegossip.net.host.introduction import INTRODUCTION, SPEC, Introductions
from edgegossip.net.host.peers import PLACEHOLDER, Peers
from edgegossip.net.host.sending import SHARE, Sending
from edgegossip.net.host.settings import HostSettings, OnLink
from edgegossip.net.host.status import STATUS, Phase, WorkerStatus, spec
from edgegossip.net.runtime import REFUSED_COST, STATUS_COST, RunClock, Sink, TokenBucket
from edgegossip.net.transport import TWIN, Incarnation, Transport

_LOG = logging.getLogger("edgegossip.net")
_OVERHEAD = 512  # bytes that even the shortest frame takes
_GIB = 2**30
_ROOM = 4096  # for the headers around the payload
_OWN_KINDS = {INTRODUCTION: SPEC, PLACEHOLDER.kind: MessageSpec(max_round=0)}


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


@dataclass(slots=True)
class Interrupted:
    """Frames to a process that is reachable may be lost."""

    rank: Rank


Item: TypeAlias = Frame | Appeared | Disappeared | Interrupted | Refused


class _Held(weakref.ref["np.ndarray"]):
    """Reports that a frame was freed, and its size; lighter than `weakref.finalize`."""

    __slots__ = ("num_bytes", "sender")
    sender: Rank
    num_bytes: int


class ReceiveBudget:
    """Counts frames from their arrival until the last tensor made from them is freed.

    Each sender may always have three of the largest messages here: the current round's, the
    next round's, and one more. Otherwise a worker could reject the very message that all other
    workers wait for.

    Everything is thread-safe.

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
        self.share = SHARE * (largest + _ROOM)
        self._lock = threading.Lock()
        self._held: Counter[Rank] = Counter()
        self._accepted: Counter[Rank] = Counter()
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
            self._accepted[sender] += len(frame)
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

    @property
    def accepted(self) -> dict[Rank, int]:
        """Bytes of all frames accepted so far, by sender."""
        with self._lock:
            return dict(self._accepted)

    def _settle(self) -> None:
        while self._freed:
            held = self._freed.popleft()
            del self._alive[id(held)]
            self._held[held.sender] -= held.num_bytes


class Receiving:
    """Turns what the transport reports into events for the algorithm; a `Listener`.

    Threads other than the host's call only the listener's methods.

    Args:
        sending: Answers the others.
        admission: Judges each frame.
        plausibility: Knows which values are usual.
        budget: Limits the memory of frames.
        inbox: Queue of items for `take`.
        peers: This worker's rank, and the state of the others.
        introductions: Compares the others' settings with this worker's.
        clock: The run's clock.

    Attributes:
        admission: As given.
        introductions: As given.
        budget: As given.
        spoke_at: Time of the last status from each other worker.
    """

    def __init__(
        self,
        sending: Sending,
        admission: Admission,
        plausibility: Plausibility,
        budget: ReceiveBudget,
        inbox: Sink,
        peers: Peers,
        introductions: Introductions,
        clock: RunClock,
    ) -> None:
        self.admission = admission
        self.introductions = introductions
        self.spoke_at = dict.fromkeys((other for other, _ in peers), 0.0)
        self._sending = sending
        self._strikes = admission.strikes
        self._plausibility = plausibility
        self.budget = budget
        self._inbox = inbox
        self._peers = peers
        self._clock = clock
        self._buckets = {other: TokenBucket() for other, _ in peers}
        self._refusals = Refusals({other for other, _ in peers})
        # Frames whose values nobody can judge yet, and what was known when that was found.
        self._undecided: list[tuple[Rank, Buffer]] = []
        self._judged_with: tuple[int, ...] = ()
        self._lock = threading.Lock()  # guards the counter below
        self._refused: Counter[Refused] = Counter()

    # Calls of the transport, from its threads.

    def received(self, sender: Rank, frame: memoryview) -> None:
        if (held := self._held(sender, frame)) is not None:
            self._inbox.put(held)

    def read(self, sender: Rank, frame: memoryview) -> Callable[[], None]:
        if (held := self._held(sender, frame)) is None:
            return lambda: None
        self._inbox.add(held)
        return self._inbox.help

    def _held(self, sender: Rank, frame: memoryview) -> Frame | None:
        # Only what needs no look into the frame, because reading it would take this worker as
        # long as writing it took the sender.
        if sender in self._strikes.muted:
            self.refused(sender, MUTED)
            return None
        bucket = self._buckets.get(sender)
        if bucket is not None and not bucket.take(self._clock.read()):
            self.refused(sender, FLOOD)
            return None
        held = self.budget.take(sender, frame)
        if held is None:
            self.refused(sender, "more than can be held")
            return None
        return Frame(sender, held)

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        self._inbox.put(Appeared(rank, incarnation))

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None:
        # At once: a frame that leaves before the host hears of this would arrive over the next
        # link without its predecessors.
        self._sending.link_ended(rank)
        self._inbox.put(Disappeared(rank, incarnation))

    def interrupted(self, rank: Rank, incarnation: Incarnation) -> None:
        self._sending.link_ended(rank)
        self._inbox.put(Interrupted(rank))

    def refused(self, rank: Rank | None, reason: str) -> None:
        refused = Refused(rank, reason)
        with self._lock:
            self._refused[refused] += 1
            is_first = self._refused[refused] == 1
        # The rest is counted together with the first, so a flood fills no inbox.
        if is_first:
            self._inbox.put(refused)

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
                return self._admit(sender, data, own_round, now)
            case Appeared(rank, incarnation):
                # Only a new process gets a new record. Otherwise a liar would be heard again as
                # soon as it cuts its link.
                if incarnation != self._peers[rank].incarnation:
                    self._strikes.forgive(rank)
                    self._plausibility.acquit(rank)
                    self._buckets[rank].refill(self._clock.read())
                    self.introductions.forget(rank)
                self._peers.appeared(rank, incarnation)
                self._sending.appeared(rank, incarnation)
                return []
            case Disappeared(rank, incarnation):
                self._sending.disappeared(rank, incarnation)
                return self._peers.disappeared(rank, incarnation, self._clock.read())
            case Interrupted(rank):
                self._sending.interrupted(rank)
                return []
            case Refused(rank, reason):
                if (rank, reason) == (self._peers.rank, TWIN):
                    raise NetworkError(
                        f"another process is worker {rank}, and was in the run before this "
                        "one; end the other one first, or give this one its own --rank"
                    )
                with self._lock:
                    number = self._refused.pop(item)
                self._refusals.add(item, number)
                # Several threads may have reported the flood before the sender was muted.
                if reason == FLOOD and rank is not None and rank not in self._strikes.muted:
                    return self.mute(rank, "it has sent more than any honest worker does")
        return []

    def _admit(self, sender: Rank, data: Buffer, own_round: int, now: Seconds) -> list[Event]:
        match verdict := self.admission.admit(sender, data, own_round):
            case Undecided():
                self._undecided.append((sender, data))
                return []
            case Admitted(envelope) if envelope.number and self._has_undecided(sender):
                # After the undecided one, which would otherwise count as repeated.
                self._undecided.append((sender, data))
                return []
            case Admitted(envelope, message, left_out):
                events = [event for each in left_out for event in self._refuse(each)]
                if message.kind in (STATUS, INTRODUCTION):
                    self._charge(sender, STATUS_COST)
                return [*events, *self._read(sender, envelope, message, now)]
            case Refused(reason=reason) if reason == MUTED:
                return []  # it had arrived before its sender was muted
            case _:
                self._charge(sender, REFUSED_COST)
                return self._refuse(verdict)

    def _has_undecided(self, sender: Rank) -> bool:
        return any(rank == sender for rank, _ in self._undecided)

    def _charge(self, sender: Rank, cost: int) -> None:
        if sender in self._buckets:
            self._buckets[sender].charge(cost)

    def _read(
        self, sender: Rank, envelope: Envelope, message: Message, now: Seconds
    ) -> list[Event]:
        """Events for the algorithm that result from an admitted message."""
        # Settings first: nothing that a worker of other settings says may count.
        if message.kind == INTRODUCTION:
            self.introductions.take(sender, message)
        if difference := self.introductions.difference(sender):
            self._refusals.add(Refused(sender, "of other settings", difference))
            self._peers[sender].refuse()
            return self._peers.lose(sender)
        if message.kind == INTRODUCTION:
            # By now it knows that this worker can be reached. It may have forgotten messages
            # that were sent before it knew.
            self._sending.tell(sender, again=True)
            return []
        if message.kind == STATUS:
            return self._read_status(sender, envelope, message, now)
        peer = self._peers[sender]
        # Numbers count between two lives, so the lives come before the number.
        if envelope.sender_life != peer.life or envelope.receiver_life != self._peers.life:
            # Dropped, not refused: it is from an earlier life of one of the two, or the status
            # that told of a new life was lost. The answer shows which lives this worker knows.
            self._sending.tell(sender, again=True)
            return []
        if envelope.number <= peer.received:
            return []  # resent by a resumed worker
        # A link keeps its frames in order, so what this one has overtaken is lost for good.
        if number := envelope.number - peer.received - 1:
            peer.has_lost_some = True
            detail = "it never arrived, or was rejected"
            self._refusals.add(Refused(sender, "missing", detail), number)
        peer.heard(envelope.number, now)
        is_there = self._peers.has_begun and peer.is_reachable  # else it is old
        found = self._peers.find(sender) if is_there else []
        if found:  # it may have lost this worker, too, and hear nothing more of it
            self._sending.tell(sender, again=True)
        if message.kind == PLACEHOLDER.kind:
            self._peers.count_on()
            return found
        return [*found, Received(sender, message)]

    def _read_status(
        self, sender: Rank, envelope: Envelope, message: Message, now: Seconds
    ) -> list[Event]:
        status = WorkerStatus.parse(message)
        if envelope.receiver_life != self._peers.life:
            # It counts what an earlier life of this worker has sent, and nothing of this one.
            status = status.without_receipts(self._peers.rank)
        events = self._peers.told(sender, status, self._clock.read())
        if self._peers[sender].status is not status:
            return events  # from a superseded life
        self.spoke_at[sender] = now
        self._sending.reported(sender)
        # It may have missed the message it waits for, or count a worker as lost that has
        # nothing more to send: that one may be this worker, also since its last status.
        phase = self._sending.phase
        waits = phase >= Phase.RUNNING and status.phase == Phase.WAITING
        goes_on = phase == Phase.FINISHED and status.phase == Phase.RUNNING
        is_back = any(isinstance(event, WorkerJoined) for event in events)
        knows_another_life = envelope.receiver_life not in (0, self._peers.life)
        if waits or goes_on or is_back or knows_another_life:
            self._sending.tell(sender, again=True)
        return events

    def reconsider(self, own_round: int, now: Seconds) -> list[Event]:
        """Events for the algorithm from messages that were undecided.

        Call this after training, which may show what is usual.
        """
        if not self._undecided:  # as nearly always, and this is asked for every item
            return []
        known = self._plausibility.num_changes, *self._peers.trusted
        if known == self._judged_with:
            return []
        self._judged_with = known
        undecided, self._undecided = self._undecided, []
        events: list[Event] = []
        for sender, frame in undecided:
            events += self._admit(sender, frame, own_round, now)
        return events

    # Lies.

    def _refuse(self, refused: Refused) -> list[Event]:
        """Count a refusal; punish its author if it is a lie. No worker waits for a lie."""
        self._refusals.add(refused)
        if not refused.is_lie or refused.rank is None:
            return []
        if self._strikes.add(refused.rank):
            return self.mute(
                refused.rank, "it has sent what no honest worker sends, three times"
            )
        return self._peers.lied(refused.rank)

    def mute(self, rank: Rank, why: str) -> list[Event]:
        """Ignore `rank` until another process of its rank appears."""
        _LOG.warning("ignoring worker %d until it is restarted: %s", rank, why)
        self._strikes.muted.add(rank)
        self._plausibility.acquit(rank)
        # Its statuses confirm nothing any more, so no run begins or ends because of them.
        self._peers[rank].refuse()
        return self._peers.lied(rank)

    @property
    def refusals(self) -> dict[str, int]:
        """Number of rejected and missing messages, by sender and reason."""
        counts = self.refusals_by_author.items()
        return {f"worker {sender}: {reason}": n for (sender, reason), n in counts}

    @property
    def refusals_by_author(self) -> dict[tuple[Rank | None, str], int]:
        """The same by author, None outside this run, and reason; other threads may ask."""
        return dict(self._refusals.counts)


def connect(
    algorithm: Algorithm[Any],
    params: Tensor,
    transport: Transport,
    inbox: Sink,
    peers: Peers,
    settings: HostSettings,
    clock: RunClock,
    on_link: OnLink | None = None,
) -> tuple[Sending, Receiving, Plausibility]:
    """Connect a host with its transport: the two directions, and what they learn together.

    Args:
        algorithm: Algorithm, which provides the schema of the messages.
        params: Initial parameters, [num_params].
        transport: Carries frames.
        inbox: Queue of the host, for `Receiving.take`.
        peers: This worker's rank, and the state of the others.
        settings: Limits.
        clock: The run's clock.
        on_link: As in `HostServices`.

    Returns:
        Both directions, and the memory of usual values that they share with the host.
    """
    rank, num_workers = peers.rank, peers.num_workers
    described = algorithm.schema(params)
    schema = {**described, STATUS: spec(num_workers), **_OWN_KINDS}
    seals = None
    if transport.credentials is not None and any(each.is_passed_on for each in schema.values()):
        seals = Seals(transport.credentials, rank, settings.run)
        schema = with_seals(schema, num_workers)
    # Introductions are rare and are read at once.
    largest = max(each.max_num_bytes for kind, each in schema.items() if kind != INTRODUCTION)
    plausibility = Plausibility(
        schema,
        params,
        rank,
        present=lambda: peers.trusted,
        senders=lambda: _senders(algorithm.traits.topology, peers),
        role=lambda other: algorithm.role(other).name,
    )
    admission = Admission(
        run=settings.run,
        rank=rank,
        num_workers=num_workers,
        schema=schema,
        plausibility=plausibility,
        seals=seals,
        life_of=lambda other: peers[other].life,
    )
    budget = ReceiveBudget(settings.max_waiting_bytes, largest)
    # Wrappers may send more than a model. What is optional is seldom sent all at once.
    usual = max([params.nbytes, *(each.usual_num_bytes for each in described.values())])
    waiting = max(budget.max_bytes, budget.share), budget.share, usual, algorithm
    sending = Sending(
        transport, peers, admission, plausibility, settings, clock, *waiting, on_link
    )
    introductions = Introductions(num_workers, settings.introduction)
    receiving = Receiving(
        sending, admission, plausibility, budget, inbox, peers, introductions, clock
    )
    return sending, receiving, plausibility


def _senders(topology: Topology | None, peers: Peers) -> Collection[Rank]:
    """The workers that are present, not ignored, and send to this one in some round."""
    present = peers.trusted
    if topology is None:
        return present
    absent = {*range(peers.num_workers)} - {peers.rank, *present}
    return {*topology.present(absent).all_in_neighbors(peers.rank)}.intersection(present)
