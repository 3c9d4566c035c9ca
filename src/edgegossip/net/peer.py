"""A worker's view of one other worker, and the messages that it can resend to it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from edgegossip.core.metrics import payload_num_bytes
from edgegossip.core.protocol import Message, Seconds
from edgegossip.net.runtime import Life
from edgegossip.net.status import Phase, WorkerStatus
from edgegossip.net.transport import Incarnation

_OVERHEAD = 1024
"""Memory of a message in addition to its payload, in bytes."""


@dataclass(slots=True, kw_only=True)
class SentLog:
    """Messages to one worker that are not in its checkpoint, for resending.

    Args:
        max_bytes: Memory limit, in bytes; the oldest messages are dropped first.
    """

    max_bytes: int
    entries: deque[tuple[int, Message]] = field(default_factory=deque)
    num_bytes: int = 0

    def add(self, number: int, message: Message) -> None:
        self.entries.append((number, message))
        self.num_bytes += payload_num_bytes(message.payload) + _OVERHEAD
        while self.num_bytes > self.max_bytes:
            self._drop()

    def forget(self, number: int) -> None:
        """Drop the messages up to `number`, which are in the receiver's checkpoint."""
        while self.entries and self.entries[0][0] <= number:
            self._drop()

    def has(self, number: int) -> bool:
        """Whether the log still has message `number`, the last one added."""
        return bool(self.entries) and self.entries[-1][0] == number

    def _drop(self) -> None:
        _, message = self.entries.popleft()
        self.num_bytes -= payload_num_bytes(message.payload) + _OVERHEAD


@dataclass(slots=True, kw_only=True)
class Peer:
    """State kept for one other worker.

    Attributes:
        log: Messages that can be resent.
        incarnation: Incarnation of its process; 0 before the first.
        is_reachable: Whether the transport can reach the worker.
        is_refused: Whether this process is ignored; its statements then confirm nothing.
        status: Newest status of that process.
        began_at: Time at which it began, by its status but on this worker's clock.
        life: Life for which messages are numbered.
        num_lives: Number of its lives in the current process.
        sent: Number of the last message to that life.
        received: Number of the last message from it.
        kept: Number of the last message from it in this worker's checkpoint.
        known_life: Last life that the algorithm knows about; 0 for none.
        is_lost: Whether the algorithm knows of the loss, or will learn of it when it starts.
        heard_at: Time at which the last algorithm message arrived.
        num_gaps: Number of consecutive statuses that reported more messages than have arrived.
        has_lost_some: Whether a message has arrived without its predecessor.
        num_returns: Number of its returns without a missing message, and of its lies, since
            its last message.
        return_at: Time of its next such return; infinity if none is scheduled.
    """

    log: SentLog
    incarnation: Incarnation = 0
    is_reachable: bool = False
    is_refused: bool = False
    status: WorkerStatus | None = None
    began_at: Seconds = 0.0
    life: Life = 0
    num_lives: int = 0
    sent: int = 0
    received: int = 0
    kept: int = 0
    known_life: Life = 0
    is_lost: bool = False
    heard_at: Seconds = 0.0
    num_gaps: int = 0
    has_lost_some: bool = False
    num_returns: int = 0
    return_at: Seconds = math.inf

    @property
    def is_known(self) -> bool:
        """Whether the worker is reachable and has sent a status."""
        return self.is_reachable and self.status is not None

    @property
    def has_left(self) -> bool:
        """Whether the worker has left the run before its end, for good."""
        return self.status is not None and self.status.phase == Phase.GONE

    def turn_to(self, life: Life) -> None:
        """Restart the numbering of messages if this is another life."""
        if life != self.life:
            self.life = life
            self.num_lives += 1
            self.count_anew()

    def heard(self, number: int, now: Seconds) -> None:
        """Record the arrival of message `number`."""
        self.received, self.heard_at = number, now
        self.forget_returns()

    def forget_returns(self) -> None:
        """Do not delay the next return because of earlier ones."""
        self.num_returns, self.return_at = 0, math.inf

    def refuse(self) -> None:
        """Ignore this process from now on."""
        self.status, self.is_refused = None, True

    def count_anew(self) -> None:
        """Restart the numbering of messages with an empty log."""
        self.sent = self.received = self.kept = self.num_gaps = 0
        self.has_lost_some = False
        self.forget_returns()
        self.log = SentLog(max_bytes=self.log.max_bytes)
