"""Sending beside everything else: one thread for each receiver, so that a slow one is alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from edgegossip.core.codec import Buffer
from edgegossip.core.protocol import Rank, Seconds
from edgegossip.net.background import Background
from edgegossip.net.transport import Transport

_LOG = logging.getLogger("edgegossip.net")


class Outbox:
    """What is waiting to be sent, by receiver.

    Args:
        transport: Where it goes.
        max_bytes: That may wait for one receiver; what would be more is not taken.
    """

    def __init__(self, transport: Transport, max_bytes: int) -> None:
        self._transport = transport
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting: dict[Rank, int] = {}
        self._senders: dict[Rank, Background] = {}

    @property
    def is_empty(self) -> bool:
        """Everything has been handed to the transport."""
        with self._lock:
            return not any(self._waiting.values())

    def put(
        self, receiver: Rank, frame: Sequence[Buffer], done: Callable[[], None] | None = None
    ) -> bool:
        """Take a frame, unless too much waits for `receiver` already; say whether it was.

        Args:
            receiver: Whom it is for.
            frame: In parts.
            done: Called from the sending thread when the frame has left.
        """
        num_bytes = sum(len(part) for part in frame)
        with self._lock:
            waiting = self._waiting.get(receiver, 0)
            # One is always taken, however large it is.
            if waiting and waiting + num_bytes > self._max_bytes:
                return False
            self._waiting[receiver] = waiting + num_bytes
        if receiver not in self._senders:
            self._senders[receiver] = Background(f"send to {receiver}")
        self._senders[receiver].submit(lambda: self._send(receiver, frame, num_bytes, done))
        return True

    def close(self, seconds: Seconds) -> None:
        """Send what waits, for at most so long."""
        deadline = time.monotonic() + seconds
        for sender in self._senders.values():
            sender.close(max(0.0, deadline - time.monotonic()))

    def _send(
        self,
        receiver: Rank,
        frame: Sequence[Buffer],
        num_bytes: int,
        done: Callable[[], None] | None,
    ) -> None:
        try:
            self._transport.send(receiver, frame)
        except Exception:  # the thread sends what comes after, too
            _LOG.exception("could not send to %d", receiver)
        with self._lock:
            self._waiting[receiver] -= num_bytes
        if done is not None:
            done()
