"""The traffic over zenoh to and from one other worker, whichever process speaks for it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

import zenoh

from edgegossip.core.codec import Buffer
from edgegossip.core.protocol import Rank, Seconds
from edgegossip.net.chunks import Assembler, split
from edgegossip.net.dead_links import process_of
from edgegossip.net.fair_queue import TokenBucket
from edgegossip.net.reach import Reach
from edgegossip.net.transport import Incarnation, Listener
from edgegossip.net.twins import Claim, Claims

_MAX_ALIVE = 64
_MAX_HELD = 64
"""Pieces kept of a process that does not speak for its rank yet; by then it only introduces
itself.
"""
_SIGNS = (1.0, 64)
"""Sustained rate, per second, and burst of signs of life."""

# The last message to a worker that leaves.
_FAREWELL = b""


class ZenohPeer:
    """The traffic to and from one other worker.

    The youngest process speaks for the rank, because the token of a killed one may remain until
    its lease ends. It has to wait for `settle` seconds, in which an older process that still
    lives claims the rank (see `Twins`). If that process ends, it speaks at once.

    Args:
        rank: The other worker.
        listener: Receives the events.
        max_bytes: Maximum size of a frame, in bytes.
        reach: Knows which traffic leaves this machine.
        settle: Seconds for which an older process may claim the rank.
    """

    publisher: zenoh.Publisher

    def __init__(
        self,
        rank: Rank,
        listener: Listener,
        max_bytes: int,
        reach: Reach,
        settle: Seconds,
    ) -> None:
        self.incarnation: Incarnation | None = None
        # Traffic beyond this machine. One thread at a time adds to each counter.
        self.bytes_sent = self.bytes_received = 0
        self._reach = reach
        self._settle = settle
        self._session_id: str | None = None
        # Processes by their first sign of life, and those that may speak for the rank.
        self._alive: list[Incarnation] = []
        self._may_speak: set[Incarnation] = set()
        self._claims = Claims()
        self._held: defaultdict[Incarnation, list[bytes]] = defaultdict(list)
        self._signs = TokenBucket(*_SIGNS)
        self._rank = rank
        self._listener = listener
        self._serials = itertools.count()
        self._assembler = Assembler(max_bytes, lambda reason: listener.refused(rank, reason))
        self._sending = threading.Lock()
        # Held during calls of the listener, so that it gets one report at a time.
        self._telling = threading.Lock()
        self._is_closing = False
        self._left: Incarnation | None = None
        self._has_answered = threading.Event()
        self._answer: threading.Thread | None = None

    def send(self, frame: Sequence[Buffer]) -> None:
        """Send a frame, unless no process speaks for the rank."""
        with self._sending:
            incarnation = self.incarnation
            for piece in split(next(self._serials), frame):
                # The end of a frame is useless to a process that missed its beginning.
                if incarnation is None or self.incarnation != incarnation:
                    return
                self._put(piece)
                if self._reach.leave_machine(self._session_id):
                    self.bytes_sent += len(piece)

    def take(self, piece: bytes, session_id: str | None) -> None:
        """Receive a piece of a frame."""
        if piece == _FAREWELL:
            self._has_answered.set()
            return
        with self._telling:
            if self._reach.leave_machine(session_id):
                self.bytes_received += len(piece)
            process = process_of(session_id)
            if process is not None and process != self.incarnation and process in self._alive:
                if len(self._held[process]) < _MAX_HELD:
                    self._held[process].append(piece)
                return
            self._session_id = session_id
            self._add(piece)

    def _add(self, piece: bytes) -> None:
        frame = self._assembler.add(piece)
        if frame is not None:
            self._listener.received(self._rank, frame)

    def appear(self, incarnation: Incarnation) -> None:
        """Receive a sign of life."""
        with self._telling:
            if incarnation in self._alive or self._is_closing or not self._may_sign():
                return
            # A process that never undeclares its tokens must not make this list grow for ever.
            self._alive = [*self._alive[1 - _MAX_ALIVE :], incarnation]
            if self.incarnation is not None:
                timer = threading.Timer(self._settle, self._give_way, [incarnation])
                timer.daemon = True
                timer.start()
                return
            self._may_speak.add(incarnation)
            self._choose()

    def heard(self, claim: Claim) -> None:
        """Receive a process's claim that it was there before another one."""
        with self._telling:
            if self._may_sign():
                self._claims.add(claim)
                self._choose()

    def disappear(self, incarnation: Incarnation) -> None:
        """Receive the withdrawal of a sign of life."""
        with self._telling:
            if incarnation not in self._alive and not self._is_closing:
                return
            if incarnation in self._alive:
                self._alive.remove(incarnation)
            self._held.pop(incarnation, None)
            if not self._may_speak.intersection(self._alive):
                self._may_speak.update(self._alive)
            self._choose()
            leaves_too = self._is_closing and incarnation == self._left
        # A worker that leaves in order waits for this answer. It is sent from another thread,
        # because a reading thread of zenoh must not wait until another worker reads.
        answer = threading.Thread(target=self._put, args=(_FAREWELL,))
        answer.start()
        self._answer = answer  # set once the thread runs, because `close` may join it at once
        if leaves_too:
            # It may be gone before it notices our departure and answers. Its own farewell is as
            # good: all its messages have arrived before it, and it waits for our answer.
            self._has_answered.set()

    def leave(self, deadline: Seconds) -> bool:
        """Send nothing after the current frame; return whether the peer is present."""
        has_silence = self._sending.acquire(timeout=_until(deadline))
        with self._telling:
            self._is_closing = True
            self._has_answered.clear()
            self._left, self.incarnation = self.incarnation, None
        if has_silence:
            self._sending.release()
        return self._left is not None

    def lose(self) -> None:
        """Report the peer's disappearance to the listener, now that this worker has left."""
        with self._telling:
            self._alive = []
            self._held.clear()
            if self._left is not None:
                self._listener.disappeared(self._rank, self._left)

    def return_to_life(self) -> None:
        """Resume sending when the peer appears."""
        with self._telling:
            self._assembler.reset()
            self._is_closing = False

    def await_farewell(self, deadline: Seconds) -> None:
        """Wait until the peer confirms that it has read all frames."""
        self._has_answered.wait(_until(deadline))
        if self._answer is not None:
            self._answer.join(_until(deadline))

    def _put(self, piece: bytes) -> None:
        with suppress(zenoh.ZError):  # the session has been closed
            # The source tells the receiver which link the frame came over.
            source = zenoh.SourceInfo(self.publisher.id, 0)
            self.publisher.put(piece, source_info=source)

    def _may_sign(self) -> bool:
        """Whether another sign of life is accepted now."""
        if self._signs.take(time.monotonic()):
            return True
        self._listener.refused(self._rank, "more signs of life than any honest worker gives")
        return False

    def _give_way(self, incarnation: Incarnation) -> None:
        with self._telling:
            if incarnation in self._alive:
                self._may_speak.add(incarnation)
                self._choose()

    def _choose(self) -> None:
        """Turn to the process that speaks for the rank."""
        if self._is_closing:
            return
        self._may_speak.intersection_update(self._alive)
        ready = [each for each in self._alive if each in self._may_speak]
        unclaimed = [each for each in ready if not self._claims.is_beaten(each, self._alive)]
        chosen = next(reversed(unclaimed or ready), None)
        if chosen != self.incarnation:
            self._turn_to(chosen)

    def _turn_to(self, incarnation: Incarnation | None) -> None:
        before, self.incarnation = self.incarnation, incarnation
        self._assembler.reset()
        if before is not None:
            self._listener.disappeared(self._rank, before)
        if incarnation is not None:
            self._listener.appeared(self._rank, incarnation)
            for piece in self._held.pop(incarnation, []):
                self._add(piece)


def _until(deadline: Seconds) -> Seconds:
    return max(0.0, deadline - time.monotonic())
