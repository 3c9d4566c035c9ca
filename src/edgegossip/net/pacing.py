"""Pacing: how many bytes may be under way to one worker, and in pieces of which size."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from edgegossip.contract.protocol import Seconds

LEAST = 2048
"""Bytes of the smallest pieces. An acknowledgement waits behind the other end's pieces."""
_FIRST = 6 * LEAST
"""Bytes that may be under way before anything is known, and always: one and a half seconds of
64 kbit/s. A path that carries less than four times that is shared evenly by all whose windows
are this one. Windows in proportion to the measured rate give more to who has more already, so
that one worker's path is full while another's is not (`benchmarks/thin_links.py`).
"""
_TOGETHER = 2 * _FIRST
"""Bytes of such windows to all workers together that are being sent to, unless they would be
smaller than a piece.
"""
_AHEAD: Seconds = 0.25
"""Seconds of the measured rate that are under way beyond a round trip. A message that is sent
first waits for as long. With less, a path whose rate varies would run dry.
"""
_LONGEST_QUEUE: Seconds = 1.25
"""Seconds beyond the shortest round trip that count as the path's own, if round trips have
become longer. Without them, a path that others fill would be left to them; with more, this
worker would take its own queue for the path.
"""
_MEMORY: Seconds = 3.0
"""Seconds, or round trips if they are longer, for which the best rate and round trip count."""
_ROUND_TRIPS = 4
_PIECES = 4
"""Pieces in a window."""
_UNANSWERED: Seconds = 1.0
"""Seconds and two round trips after which a piece leaves without an acknowledgement."""


@dataclass(slots=True)
class _Mark:
    """A piece that is to be acknowledged."""

    end: int  # bytes sent, with the piece
    at: Seconds
    arrived: int  # bytes acknowledged when it left, and when that was found
    arrived_at: Seconds
    is_full: bool  # whether the window was


class Pace:
    """Limits what is under way to one worker to what the path carries in a moment.

    TCP alone fills buffers of megabytes: minutes of a slow path, in which no sign of life
    passes, and a link that is closed because a piece takes longer than its lease. Therefore the
    bytes under way (the *window*) are at most those that the path carries in a round trip and
    a second, and never more than in two seconds beyond its shortest round trip. The rate
    is the highest of the last seconds, as acknowledgements show it. As with TCP, the window
    begins small and at most doubles with each round trip. Pieces are a fourth of it.

    Thread-safe.

    Args:
        clock: Time in seconds; it never decreases.
        largest: Bytes of the largest pieces.
        together: The paces to all workers; this one is added.

    References:
        Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016: the
        rate is that of what was acknowledged between two moments, and its maximum counts.

    >>> pace = Pace(clock=lambda: 0.0, largest=262_144)
    >>> pace.piece_bytes
    3072
    """

    def __init__(
        self, clock: Callable[[], Seconds], largest: int, together: list[Pace] | None = None
    ) -> None:
        self._clock = clock
        self._largest = largest
        self._together = [] if together is None else together
        self._together.append(self)
        self._changed = threading.Condition()
        # Not from 0: an acknowledgement of an earlier link must not fit this one.
        self._sent = self._arrived = 0
        self._forget()

    def _forget(self) -> None:
        self._marks: deque[_Mark] = deque()
        self._arrived = self._sent
        self._arrived_at = self._sent_at = self._clock()
        self._proven = _FIRST  # bytes under way that have arrived before
        self._rate: float | None = None
        self._rates: deque[tuple[Seconds, float]] = deque()
        self._shortest: Seconds = math.inf
        self._round_trips: deque[tuple[Seconds, Seconds]] = deque()

    @property
    def rate(self) -> float | None:
        """Measured bytes per second; None before the first acknowledgement."""
        with self._changed:
            return self._rate

    @property
    def piece_bytes(self) -> int:
        """Bytes of the next piece."""
        with self._changed:
            return int(min(max(self._window / _PIECES, LEAST), self._largest))

    @property
    def window(self) -> int:
        """Bytes that may be under way."""
        with self._changed:
            return int(self._window)

    @property
    def _window(self) -> float:
        # Others count as they are at this moment, without their locks.
        number = sum(each._sent != each._arrived for each in self._together)
        least = max(LEAST, min(_FIRST, _TOGETHER / max(1, number)))
        if self._rate is None:
            return least
        recent = min(seconds for _, seconds in self._round_trips)
        ahead = self._rate * (min(recent, self._shortest + _LONGEST_QUEUE) + _AHEAD)
        return max(least, min(ahead, 2 * self._proven))

    def wait(self, num_bytes: int, delay: Seconds, goes_on: Callable[[], bool]) -> None:
        """Wait until a piece may leave, at least for `delay` seconds.

        A `reset` after which `goes_on` returns false ends the wait at once.
        """
        with self._changed:
            since = self._clock()
            while goes_on():
                if (left := since + delay - self._clock()) > 0:
                    self._changed.wait(left)
                    continue
                under_way = self._sent - self._arrived
                if not under_way or under_way + num_bytes <= self._window:
                    return
                # Acknowledgements can be lost, so a piece that asks for one leaves anyway.
                last = max(since, self._arrived_at, self._sent_at)
                last_trip = self._round_trips[-1][1] if self._round_trips else 0.0
                patience = _UNANSWERED + 2 * last_trip
                left = last + patience - self._clock()
                if left <= 0:
                    return
                self._changed.wait(left)

    def sent(self, num_bytes: int) -> int:
        """Count a piece that leaves now; return the mark to be acknowledged, or 0 for none."""
        with self._changed:
            now, under_way = self._clock(), self._sent - self._arrived
            if not under_way:  # the path was idle, which says nothing about its rate
                self._arrived_at = now
            self._sent, self._sent_at = self._sent + num_bytes, now
            last = self._marks[-1].end if self._marks else self._arrived
            # Often enough to go on without a pause, but not for each of many small messages.
            due = min(self._window / _PIECES, self._largest)
            if self._sent - last < due:
                return 0
            is_full = under_way + 2 * num_bytes > self._window
            mark = _Mark(self._sent, now, self._arrived, self._arrived_at, is_full)
            self._marks.append(mark)
            return mark.end

    def acknowledged(self, end: int) -> None:
        """Record that everything up to a mark has arrived."""
        with self._changed:
            found = None
            while self._marks and self._marks[0].end <= end:
                found = self._marks.popleft()
            if found is None or found.end != end:
                return
            now = self._clock()
            trip = now - found.at
            memory = max(_MEMORY, _ROUND_TRIPS * trip)
            self._shortest = min(self._shortest, trip)
            _remember(self._round_trips, (now, trip), memory)
            # What had been under way when it left has arrived, so as much may be again.
            self._proven = max(self._proven, end - found.arrived)
            self._arrived, self._arrived_at = end, now
            rate = (end - found.arrived) / max(now - found.arrived_at, 1e-6)
            if found.is_full or rate > (self._rate or 0.0):
                _remember(self._rates, (now, rate), memory)
                self._rate = max(each for _, each in self._rates)
            self._changed.notify_all()

    def reset(self) -> None:
        """Forget a link that has ended, and wake all that wait."""
        with self._changed:
            self._forget()
            self._changed.notify_all()


def _remember(
    values: deque[tuple[Seconds, float]], value: tuple[Seconds, float], memory: Seconds
) -> None:
    values.append(value)
    while values[0][0] < value[0] - memory:
        values.popleft()


class UploadLimit:
    """A limit on what this worker sends to all others together; thread-safe.

    Args:
        rate: Bytes per second, above 0; infinity for no limit.
        clock: Time in seconds; it never decreases.

    >>> limit = UploadLimit(1000.0, clock=lambda: 5.0)
    >>> [limit.delay(500) for _ in range(3)]
    [0.0, 0.5, 1.0]
    """

    def __init__(self, rate: float, clock: Callable[[], Seconds]) -> None:
        self.rate = rate
        self._clock = clock
        self._free_at = -math.inf
        self._lock = threading.Lock()

    def delay(self, num_bytes: int) -> Seconds:
        """Take part in the rate; return the seconds after which these bytes may leave."""
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + num_bytes / self.rate
            return begin - now


_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]bit)")


def bytes_per_second(rate: str) -> float:
    """Read a rate such as 10mbit.

    Raises:
        ValueError: If `rate` is not a number above 0 with kbit, mbit or gbit.

    >>> bytes_per_second("10mbit")
    1250000.0
    """
    match = _RATE.fullmatch(rate.strip().lower())
    found = float(match[1]) * _BITS[match[2]] / 8 if match else 0.0
    if not found:
        raise ValueError(
            f"a rate is a number of bits per second with a unit (kbit, mbit or gbit), such as "
            f"10mbit, got {rate!r}"
        )
    return found


UNLIMITED = UploadLimit(math.inf, time.monotonic)
