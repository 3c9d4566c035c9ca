"""Sending: from the algorithm's effects to the transport, in order and with numbers."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Message, Rank, Seconds
from edgegossip.contract.schema import require_described
from edgegossip.net.guard.admission import Admission
from edgegossip.net.guard.envelope import Envelope, pack
from edgegossip.net.guard.plausibility import Plausibility
from edgegossip.net.host.link_log import LinkLog
from edgegossip.net.host.peers import Peers
from edgegossip.net.host.settings import HostSettings, OnLink
from edgegossip.net.host.status import Phase, WorkerStatus
from edgegossip.net.runtime import Background, RunClock, Runtime
from edgegossip.net.transport import Incarnation, Transport

_LOG = logging.getLogger("edgegossip.net")
_HOLD: Seconds = 3.0
"""Seconds for which messages wait for the report of a worker whose link is back."""


class Outbox:
    """Frames waiting to be sent: a thread per receiver, so a slow one delays no other.

    Args:
        transport: Transport for the frames.
        max_bytes: Limit, in bytes, on frames waiting for one receiver; more are rejected.
        runtime: Provides a thread for each receiver.
    """

    def __init__(self, transport: Transport, max_bytes: int, runtime: Runtime) -> None:
        self._transport = transport
        self._max_bytes = max_bytes
        self._runtime = runtime
        self._lock = threading.Lock()
        self._waiting: dict[Rank, int] = {}
        self._sent: Counter[Rank] = Counter()
        # Ended links, and the links that the caller knows, by receiver.
        self._ended: Counter[Rank] = Counter()
        self._known: Counter[Rank] = Counter()
        self._senders: dict[Rank, Background] = {}

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
            return dict(self._waiting)

    def put(
        self, receiver: Rank, frame: Sequence[Buffer], done: Callable[[], None] | None = None
    ) -> bool:
        """Queue a frame unless too much already waits for `receiver`; return whether it was
        queued.

        Args:
            receiver: Receiver of the frame.
            frame: Frame in parts.
            done: Called from the sending thread when the frame has left or was dropped.
        """
        num_bytes = sum(map(len, frame))
        with self._lock:
            waiting = self._waiting.get(receiver, 0)
            # One message is always accepted, whatever its size.
            if waiting and waiting + num_bytes > self._max_bytes:
                return False
            self._waiting[receiver] = waiting + num_bytes
            link = self._known[receiver]
        if receiver not in self._senders:
            self._senders[receiver] = self._runtime.background(f"send to {receiver}")

        def left(_: None) -> None:
            with self._lock:
                self._waiting[receiver] -= num_bytes
            if done is not None:
                done()

        self._senders[receiver].submit(lambda: self._send(receiver, frame, link), left)
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

    def _send(self, receiver: Rank, frame: Sequence[Buffer], link: int) -> None:
        with self._lock:
            if link != self._ended[receiver]:
                return
        try:
            self._transport.send(receiver, frame)
        except Exception:  # the thread must go on to send the next messages
            _LOG.exception("could not send to %d", receiver)
            return
        with self._lock:
            self._sent[receiver] += sum(map(len, frame))


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
        max_waiting_bytes: Limit, in bytes, on frames that wait for one receiver.
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
        on_link: OnLink | None = None,
    ) -> None:
        self.phase = Phase.WAITING
        self._peers = peers
        self._admission = admission
        self._plausibility = plausibility
        self._run = settings.run
        self._introduction = settings.introduction.message()
        self._clock = clock
        self._links = LinkLog(transport.lease)
        self._on_link = on_link
        self.outbox = Outbox(transport, max_waiting_bytes, settings.runtime)
        self._told: dict[Rank, WorkerStatus] = {}
        # Workers whose link was cut and is back, or that came back in the same life. Such a
        # worker lacks messages, so it gets no new one before it has reported which. Otherwise
        # the new one would prove the older ones lost. By worker: the time when this ends.
        self._relinked: dict[Rank, Seconds] = {}

    @property
    def is_idle(self) -> bool:
        """Whether everything has been handed to the transport."""
        return self.outbox.is_empty

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
        # Numbered and logged even if it cannot leave now: the receiver may resume its life, and
        # then asks for all that it lacks.
        peer.sent += 1
        peer.log.add(peer.sent, message)
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

    def _post(
        self,
        receiver: Rank,
        message: Message,
        number: int = 0,
        report: Callable[[], None] | None = None,
    ) -> bool:
        """Seal, pack and queue a message; introductions and statuses have no number."""
        peers, seals = self._peers, self._admission.seals
        envelope = Envelope(self._run, peers.rank, peers.life, peers[receiver].life, number)
        if seals is not None and self._admission.schema[message.kind].is_passed_on:
            # Sealed at the last moment, because the log outlives lives and certificates.
            message = seals.sealed(message, peers.life)
        frame = pack(envelope, message)
        self._links.sent(receiver, sum(map(len, frame)), self._clock.read())
        return self.outbox.put(receiver, frame, report)

    # Links that end and come back.

    def link_ended(self, rank: Rank) -> None:
        """Drop what waits for `rank`; thread-safe, and called before the host knows."""
        self.outbox.drop(rank)

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Introduce this worker to a process of `rank`, which has become reachable."""
        clock = self._clock.read()
        self._tell_link(rank, self._links.found(rank, incarnation, clock), is_up=True)
        if self._peers.has_begun:
            self._relinked[rank] = clock + _HOLD
        self._post(rank, self._introduction)
        self._told.pop(rank, None)
        self.tell(rank)

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Take note of the loss of a process of `rank`."""
        status = self._peers[rank].status
        phase = None if status is None else status.phase
        reason = self._links.lost(rank, incarnation, phase, self._clock.read())
        self._tell_link(rank, reason, is_up=False)
        # From here on, the host acts in the knowledge of the loss, so its frames are for the
        # next link.
        self.outbox.resume(rank)

    def _tell_link(self, rank: Rank, reason: str | None, *, is_up: bool) -> None:
        # Before the run begins, there is no time of the run.
        if self._on_link is not None and reason is not None and self._peers.has_begun:
            self._on_link(self._clock.now, rank, reason, is_up)

    def reported(self, rank: Rank) -> None:
        """Send `rank`, whose link is back, the messages that its last report lacks."""
        if self._relinked.pop(rank, None) is not None:
            self._send_missing(rank)

    @property
    def release_at(self) -> Seconds:
        """Time, on the machine's clock, at which held messages are sent anyway; infinity if
        none are held.
        """
        return min(self._held.values(), default=math.inf)

    def release(self, clock: Seconds) -> None:
        """Send the messages held for workers whose report is overdue."""
        for rank in [rank for rank, at in self._held.items() if clock >= at]:
            self.reported(rank)

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
        status = self._peers.status_for(rank, self.phase, elapsed)
        if again or status.is_news(self._told.get(rank)):
            self._told[rank] = status
            self._post(rank, status.message())

    def tell_all(self, *, again: bool = False) -> None:
        """Send this worker's status to every worker that does not know it yet."""
        for rank, _ in self._peers:
            self.tell(rank, again=again)
