"""Sending in the background: a thread per receiver, so a slow receiver delays no other."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.runtime import Background, Runtime
from edgegossip.net.transport import Transport

_LOG = logging.getLogger("edgegossip.net")


class Outbox:
    """Frames waiting to be sent, by receiver.

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
        # Ended links, and the links that the caller knows, by receiver.
        self._ended: Counter[Rank] = Counter()
        self._known: Counter[Rank] = Counter()
        self._senders: dict[Rank, Background] = {}

    @property
    def is_empty(self) -> bool:
        """Whether everything has been handed to the transport."""
        with self._lock:
            return not any(self._waiting.values())

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
