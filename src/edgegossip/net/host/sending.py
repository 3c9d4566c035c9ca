"""Sending: from the algorithm's effects to the transport, in order and with numbers."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Message, Rank, Seconds
from edgegossip.contract.schema import require_described
from edgegossip.net.guard.admission import Admission
from edgegossip.net.guard.envelope import Envelope, pack
from edgegossip.net.guard.plausibility import Plausibility
from edgegossip.net.host.link_log import LinkLog
from edgegossip.net.host.peers import PLACEHOLDER, Peers
from edgegossip.net.host.settings import HostSettings, OnLink
from edgegossip.net.host.status import Phase, WorkerStatus
from edgegossip.net.runtime import Background, RunClock, Runtime
from edgegossip.net.transport import Incarnation, Progress, Transport

_LOG = logging.getLogger("edgegossip.net")
SHARE = 3
"""Messages of each sender for which a receiver always has room; see `ReceiveBudget`."""
_SMALL = 4096
"""Bytes of a message below which other messages take as much."""
_HOLD: Seconds = 3.0
"""Seconds for which messages wait for the report of a worker whose link is back."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A frame that waits to be sent."""

    frame: Sequence[Buffer]
    message: Message | None
    number: int
    link: int
    done: Callable[[], None] | None
    has_begun: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.frame))


def _is_same(one: Message, other: Message) -> bool:
    """Whether two messages with tensors say the same, with the same tensors in memory.

    Messages without tensors may be counted by their receiver, and two of them may both count.
    """
    words = (one.kind, one.round, one.numbers, one.payload.keys())
    return words == (other.kind, other.round, other.numbers, other.payload.keys()) and (
        bool(one.payload)
        and all(tensor is other.payload[name] for name, tensor in one.payload.items())
    )


class Outbox:
    """Frames waiting to be sent: a thread per receiver, so a slow one delays no other.

    A frame for which no other one waits leaves in the caller's thread, as far as it can at
    once.

    Where frames wait, short ones of a second thread overtake them.

    Args:
        transport: Transport for the frames.
        max_bytes: Limit, in bytes, on frames waiting for all receivers together; more are
            rejected.
        runtime: Provides a thread for each receiver.
        share: Bytes that are always accepted for each receiver, beside one frame of any size.
    """

    def __init__(
        self, transport: Transport, max_bytes: int, runtime: Runtime, share: int = 0
    ) -> None:
        self._transport = transport
        self._max_bytes = max_bytes
        self._share = share
        self._runtime = runtime
        self._lock = threading.Lock()
        self._waiting: defaultdict[Rank, deque[_Waiting]] = defaultdict(deque)
        self._num_bytes: Counter[Rank] = Counter()
        self._sent: Counter[Rank] = Counter()
        # Ended links, and the links that the caller knows, by receiver.
        self._ended: Counter[Rank] = Counter()
        self._known: Counter[Rank] = Counter()
        # The last number that has begun to leave, by receiver.
        self._begun: Counter[Rank] = Counter()
        self._senders: dict[str, Background] = {}

    @property
    def is_empty(self) -> bool:
        """Whether everything has been handed to the transport."""
        with self._lock:
            return not any(self._waiting.values())

    @property
    def sent(self) -> dict[Rank, int]:
        """Bytes handed to the transport so far, by receiver; thread-safe."""
        with self._lock:
            return dict(self._sent)

    @property
    def waiting(self) -> dict[Rank, int]:
        """Bytes that wait, by receiver; thread-safe."""
        with self._lock:
            return dict(self._num_bytes)

    def num_numbered(self, receiver: Rank) -> int:
        """Number of frames with a number that wait for `receiver`, or are being sent."""
        with self._lock:
            return sum(each.number > 0 for each in self._waiting[receiver])

    def last_begun(self, receiver: Rank) -> int:
        """The last number of a frame that has begun to leave for `receiver`."""
        with self._lock:
            return self._begun[receiver]

    def put(
        self,
        receiver: Rank,
        frame: Sequence[Buffer],
        done: Callable[[], None] | None = None,
        *,
        message: Message | None = None,
        number: int = 0,
        overtakes: bool = False,
    ) -> bool:
        """Queue a frame unless too much already waits; return whether it was queued.

        Args:
            receiver: Receiver of the frame.
            frame: Frame in parts.
            message: The frame's message, for `holds`.
            done: Called from the sending thread when the frame has left or was dropped.
            number: Number of the frame's message; 0 for none.
            overtakes: Whether the frame may leave before those that wait.
        """
        num_bytes = sum(map(len, frame))
        with self._lock:
            waiting = self._waiting[receiver]
            # One message is always accepted, whatever its size.
            if (
                waiting
                and self._num_bytes[receiver] + num_bytes > self._share
                and self._num_bytes.total() + num_bytes > self._max_bytes
            ):
                return False
            item = _Waiting(frame, message, number, self._known[receiver], done)
            way = "overtake to" if overtakes and waiting else "send to"
            is_next = not waiting
            waiting.append(item)
            self._num_bytes[receiver] += num_bytes
        if is_next and self._begin(receiver, item) == Progress.ALL:
            self._left(receiver, item)
            return True
        name = f"{way} {receiver}"
        if name not in self._senders:
            self._senders[name] = self._runtime.background(name)
        self._senders[name].submit(
            lambda: self._send(receiver, item), lambda _: self._left(receiver, item)
        )
        return True

    def holds(self, receiver: Rank, message: Message) -> bool:
        """Whether the same message waits for a link that is up, or is being sent over it."""
        with self._lock:
            link = self._ended[receiver]
            return link == self._known[receiver] and any(
                item.link == link
                and item.message is not None
                and _is_same(item.message, message)
                for item in self._waiting[receiver]
            )

    def is_waiting(self, receiver: Rank, number: int) -> bool:
        """Whether the frame with this number waits for a link that is up."""
        with self._lock:
            return self._find(receiver, number) is not None

    def _find(self, receiver: Rank, number: int) -> _Waiting | None:
        if self._ended[receiver] != self._known[receiver]:
            return None
        # From the end, because only the last message is asked for.
        for item in reversed(self._waiting[receiver]):
            if item.number == number and item.link == self._ended[receiver]:
                return None if item.has_begun else item
        return None

    def replace(
        self, receiver: Rank, number: int, frame: Sequence[Buffer], message: Message | None
    ) -> bool:
        """Put `frame` in the place of a frame that has not begun to leave, if it waits.

        Without a message, nobody is told when the frame leaves.
        """
        with self._lock:
            item = self._find(receiver, number)
            if item is None:
                return False
            self._num_bytes[receiver] -= item.num_bytes
            item.frame, item.message = frame, message
            item.done = None if message is None else item.done
            self._num_bytes[receiver] += item.num_bytes
            return True

    def drop(self, receiver: Rank) -> None:
        """Drop everything that waits for `receiver`, after a link has ended.

        Frames on the link are lost, and none may arrive without its predecessors; the receiver
        will report its missing messages. New frames are also dropped until the caller, which
        may not know about the loss yet, calls `resume`. Thread-safe.
        """
        with self._lock:
            self._ended[receiver] += 1

    def resume(self, receiver: Rank) -> None:
        """Accept frames for the new link."""
        with self._lock:
            self._known[receiver] += 1

    def close(self, seconds: Seconds) -> None:
        """Send waiting frames for at most `seconds`."""
        deadline = self._runtime.clock() + seconds
        for sender in self._senders.values():
            sender.close(max(0.0, deadline - self._runtime.clock()))

    def _begin(self, receiver: Rank, item: _Waiting) -> Progress:
        """Send what leaves at once, in the caller's thread, which saves a change of thread."""
        with self._lock:
            if item.link != self._ended[receiver]:
                return Progress.NONE
        try:
            progress = self._transport.begin(receiver, item.frame)
        except Exception:
            _LOG.exception("could not send to %d", receiver)
            with self._lock:
                self._has_begun(receiver, item)  # it may have left
            return Progress.ALL
        with self._lock:
            if progress != Progress.NONE:
                self._has_begun(receiver, item)
            if progress == Progress.ALL:
                self._sent[receiver] += item.num_bytes
        return progress

    def _has_begun(self, receiver: Rank, item: _Waiting) -> None:
        item.has_begun = True
        if item.number:
            self._begun[receiver] = item.number

    def _send(self, receiver: Rank, item: _Waiting) -> None:
        with self._lock:
            is_rest = item.has_begun
            item.has_begun = True
            if item.link != self._ended[receiver]:
                return
            self._has_begun(receiver, item)
        try:
            if is_rest:
                self._transport.send_rest(receiver)
            else:
                self._transport.send(receiver, item.frame)
        except Exception:  # the thread must go on to send the next messages
            _LOG.exception("could not send to %d", receiver)
            return
        with self._lock:
            self._sent[receiver] += item.num_bytes

    def _left(self, receiver: Rank, item: _Waiting) -> None:
        with self._lock:
            self._waiting[receiver].remove(item)
            self._num_bytes[receiver] -= item.num_bytes
        if item.done is not None:
            item.done()


class Sending:
    """Numbers, seals and sends this worker's messages, and tells the others its status.

    Every message gets the next number between two lives and stays in the receiver's log until
    its checkpoint holds it. Numbers and statuses are all the acknowledgement there is: a status
    names the last number that arrived, and what lies behind it is sent again.

    Threads other than the host's call only `link_ended`.

    Args:
        transport: Carries frames.
        peers: This worker's rank, and the state of the others.
        admission: Admission of the same host; what it describes and seals may be sent.
        plausibility: Learns from this worker's own messages what is usual.
        settings: Name of the run, introduction and runtime.
        clock: The run's clock.
        max_waiting_bytes: Limit, in bytes, on frames that wait for all receivers together.
        share: Bytes that may wait for each receiver in any case.
        usual_bytes: Bytes of a model, or of the largest usual message if that is more.
        algorithm: Knows which messages become one, and which newer ones replace.
        on_link: As in `HostServices`.

    Attributes:
        phase: Phase of this worker, as told to the others.
        outbox: Frames that wait for the transport.
    """

    def __init__(
        self,
        transport: Transport,
        peers: Peers,
        admission: Admission,
        plausibility: Plausibility,
        settings: HostSettings,
        clock: RunClock,
        max_waiting_bytes: int,
        share: int,
        usual_bytes: int,
        algorithm: Algorithm[Any],
        on_link: OnLink | None = None,
    ) -> None:
        self.phase = Phase.WAITING
        self._peers = peers
        self._admission = admission
        self._plausibility = plausibility
        self._run = settings.run
        self._introduction = settings.introduction.message()
        self._clock = clock
        self._links = LinkLog()
        self._on_link = on_link
        self.outbox = Outbox(transport, max_waiting_bytes, settings.runtime, share)
        self._algorithm = algorithm
        self._usual_bytes = max(usual_bytes, _SMALL)
        # The last message to each receiver, and its number, unless it left for a lost link.
        self._last: dict[Rank, tuple[int, Message]] = {}
        self._told: dict[Rank, WorkerStatus] = {}
        # Statuses that keep their place among the messages, until they have left.
        self._in_place: defaultdict[Rank, set[WorkerStatus]] = defaultdict(set)
        # Workers whose link was cut and is back, or that came back in the same life. Such a
        # worker lacks messages, so it gets no new one before it has reported which. Otherwise
        # the new one would prove the older ones lost. By worker: the time when this ends.
        self._relinked: dict[Rank, Seconds] = {}
        # The first number that a worker whose link has ended cannot have got, until it reports.
        self._held_from: dict[Rank, int] = {}

    @property
    def is_idle(self) -> bool:
        """Whether everything has been handed to the transport."""
        return self.outbox.is_empty

    @property
    def is_congested(self) -> bool:
        """Whether a reachable worker's messages are held, or more wait for it than should."""
        if self._held:
            return True
        known = (rank for rank, peer in self._peers if peer.is_known)
        return any(self._is_congested(rank) for rank in known)

    def _is_congested(self, rank: Rank) -> bool:
        number = self.outbox.num_numbered(rank)
        # One round's messages may wait while the next round's are made, but not those of two.
        is_much = number > 1 and self.outbox.waiting[rank] >= 2 * self._usual_bytes
        return is_much or number > SHARE

    def close(self, seconds: Seconds = 10.0) -> None:
        """Send what waits, for at most `seconds`."""
        if self.phase == Phase.RUNNING:  # it leaves before its end
            self.phase = Phase.GONE
            self.tell_all()
        self.outbox.close(seconds)

    # The algorithm's messages.

    def send(
        self, receiver: Rank, message: Message, report: Callable[[], None] | None = None
    ) -> bool:
        """Send an algorithm's message; return whether it was sent.

        `report` is called, possibly from another thread, when the transport has the message, or
        when it is kept for a receiver that will report its missing messages.

        Raises:
            LocalProtocolError: If the algorithm's schema does not describe the message.
        """
        peers = self._peers
        require_described(self._admission.schema, message, peers.rank)
        peer = peers[receiver]
        if not peer.is_known and (peer.is_lost or not peer.life):
            return False
        # On a slow link, an answer is asked for again before it has arrived.
        if self.outbox.holds(receiver, message):
            if report is not None:
                report()
            return True
        if self._join(receiver, message):
            return True
        self._drop_replaced(receiver, message)
        # Numbered and logged even if it cannot leave now: the receiver may resume its life, and
        # then asks for all that it lacks.
        peer.sent += 1
        peer.log.add(peer.sent, message)
        self._last[receiver] = peer.sent, message
        # It has left for a moment, or has not reported its missing messages yet. If it resumes
        # its life, it gets this message after the earlier ones.
        is_held = receiver in self._relinked and peer.log.has(peer.sent)
        is_sent = True
        if peer.is_known and not is_held:
            is_sent = self._post(receiver, message, peer.sent, report)
        elif report is not None:
            report()
        # Only now, because this reads all of it; meanwhile another thread sends it.
        self._plausibility.sent(message)
        return is_sent

    def _drop_replaced(self, receiver: Rank, message: Message) -> None:
        """Drop what `message` makes needless, whether it waits or may have to be sent again.

        A placeholder keeps each one's number, so the receiver misses none.
        """
        # Asked once: most messages replace none, and the log may be long.
        if not self._algorithm.replaces(message, message):
            return
        peer = self._peers[receiver]
        if peer.status is None:
            return  # a new process, which may have kept anything
        for number, older in reversed(peer.log.entries):
            if number <= peer.status.received[self._peers.rank]:
                return
            if self._algorithm.replaces(message, older):
                peer.log.replace(number, PLACEHOLDER)
                frame = self._frame(receiver, PLACEHOLDER, number)
                self.outbox.replace(receiver, number, frame, None)

    def _join(self, receiver: Rank, message: Message) -> bool:
        """Send `message` as a part of the last one, if that one still waits; report success.

        The joined message has the number of the last one, so the receiver misses none. What
        waits on a slow link is then at most one message, whatever its age.
        """
        log = self._peers[receiver].log
        number, last = self._last.get(receiver, (0, None))
        if last is None or number != self._peers[receiver].sent:
            return False
        is_held = number >= self._held_from.get(receiver, math.inf) and log.has(number)
        if not is_held and not self.outbox.is_waiting(receiver, number):
            return False
        joined = self._algorithm.joined(last, message)
        if joined is None:
            return False
        if not is_held:
            frame = self._frame(receiver, joined, number)
            if not self.outbox.replace(receiver, number, frame, joined):
                return False  # it has just begun to leave
        log.replace(number, joined)
        self._last[receiver] = number, joined
        self._plausibility.sent(message)
        return True

    def _post(
        self,
        receiver: Rank,
        message: Message,
        number: int = 0,
        report: Callable[[], None] | None = None,
        *,
        overtakes: bool = False,
    ) -> bool:
        """Seal, pack and queue a message; introductions and statuses have no number."""
        frame = self._frame(receiver, message, number)
        queued = message if number else None
        return self.outbox.put(
            receiver, frame, report, message=queued, number=number, overtakes=overtakes
        )

    def _frame(self, receiver: Rank, message: Message, number: int) -> list[Buffer]:
        """Seal and pack a message."""
        peers, seals = self._peers, self._admission.seals
        envelope = Envelope(self._run, peers.rank, peers.life, peers[receiver].life, number)
        if seals is not None and self._admission.schema[message.kind].is_passed_on:
            # Sealed at the last moment, because the log outlives lives and certificates.
            message = seals.sealed(message, peers.life)
        return pack(envelope, message)

    # Links that end and come back.

    def link_ended(self, rank: Rank) -> None:
        """Drop what waits for `rank`; thread-safe, and called before the host knows."""
        self.outbox.drop(rank)

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Introduce this worker to a process of `rank`, which has become reachable."""
        clock = self._clock.read()
        self._tell_link(rank, self._links.found(rank, incarnation, clock), is_up=True)
        self._introduce(rank)

    def interrupted(self, rank: Rank) -> None:
        """Send again what `rank` lacks, as soon as it has reported what has arrived."""
        self._end_link(rank)
        self._introduce(rank)

    def _introduce(self, rank: Rank) -> None:
        clock = self._clock.read()
        if self._peers.has_begun:
            self._relinked[rank] = clock + _HOLD
            self._held_from.setdefault(rank, self._peers[rank].sent + 1)
        self._post(rank, self._introduction)
        self._told.pop(rank, None)
        self.tell(rank)

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Take note of the loss of a process of `rank`."""
        status = self._peers[rank].status
        phase = None if status is None else status.phase
        reason = self._links.lost(rank, incarnation, phase, self._clock.read())
        self._tell_link(rank, reason, is_up=False)
        self._end_link(rank)

    def _end_link(self, rank: Rank) -> None:
        # From here on, the host acts in the knowledge of the loss, so its frames are for the
        # next link.
        self.outbox.resume(rank)
        if not self._peers.has_begun:
            return
        # What was on its way may have arrived, so nothing can be added to it. What had not
        # begun to leave has not: a link that is often lost does not let pushes pile up.
        self._held_from[rank] = self.outbox.last_begun(rank) + 1
        if self._held_from[rank] > self._peers[rank].sent:
            self._last.pop(rank, None)

    def _tell_link(self, rank: Rank, reason: str | None, *, is_up: bool) -> None:
        # Before the run begins, there is no time of the run.
        if self._on_link is not None and reason is not None and self._peers.has_begun:
            self._on_link(self._clock.now, rank, reason, is_up)

    def reported(self, rank: Rank) -> None:
        """Hold messages to `rank` no longer: it has reported what has arrived.

        They leave at the next `release`, after the algorithm's answer to the return of `rank`,
        which may make them needless.
        """
        if rank in self._relinked:
            self._relinked[rank] = -math.inf

    @property
    def release_at(self) -> Seconds:
        """Time, on the machine's clock, at which held messages are sent anyway; infinity if
        none are held.
        """
        return min(self._held.values(), default=math.inf)

    def release(self, clock: Seconds) -> None:
        """Send the messages that a worker lacks by its report, or whose report is overdue."""
        for rank in [rank for rank, at in self._held.items() if clock >= at]:
            del self._relinked[rank], self._held_from[rank]
            self._send_missing(rank)

    @property
    def _held(self) -> dict[Rank, Seconds]:
        """The times until which messages to reachable workers are held."""
        return {r: at for r, at in self._relinked.items() if self._peers[r].is_known}

    def send_again(self) -> None:
        """Send all present workers the messages that they lack."""
        for rank, peer in self._peers:
            if not peer.is_lost and peer.status is not None:
                self._send_missing(rank)

    def _send_missing(self, rank: Rank) -> None:
        """Send `rank` the messages that it lacks in its current life."""
        peer = self._peers[rank]
        assert peer.status is not None
        for number, message in [*peer.log.entries]:
            if number > peer.status.received[self._peers.rank]:
                self._post(rank, message, number)

    # Statuses.

    def tell(self, rank: Rank, *, again: bool = False) -> None:
        """Send `rank` this worker's status if `rank` is reachable and does not know it yet."""
        if not self._peers[rank].is_reachable:
            return
        elapsed = 0.0 if self.phase == Phase.WAITING else self._clock.now
        # Before its report, nobody knows what was lost with the link, and is to be sent again.
        num_waiting = self.outbox.num_numbered(rank) + (rank in self._relinked)
        status = self._peers.status_for(rank, self.phase, elapsed, num_waiting)
        told = self._told.get(rank)
        if again or status.is_news(told):
            self._told[rank] = status
            # A sign of life need not wait for models. A new phase or life must: it says what
            # holds after the messages before it. No later status may tell it before that.
            in_place = self._in_place[rank]
            if status.continues(told) and not in_place:
                self._post(rank, status.message(), overtakes=True)
                return
            in_place.add(status)
            if not self._post(rank, status.message(), report=lambda: in_place.discard(status)):
                in_place.discard(status)

    def tell_all(self, *, again: bool = False) -> None:
        """Send this worker's status to every worker that does not know it yet."""
        for rank, _ in self._peers:
            self.tell(rank, again=again)
