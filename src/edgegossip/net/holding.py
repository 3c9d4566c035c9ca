"""A memory limit on arrived messages that are still needed."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque

import numpy as np
import psutil

from edgegossip.core.protocol import Rank

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
