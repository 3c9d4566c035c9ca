"""Measurements of a link between two workers: round trips, and timed transfers of a model."""

from __future__ import annotations

import itertools
import logging
import math
import queue
import statistics
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.transport import TWIN, Incarnation, Listener, Transport

_LOG = logging.getLogger("edgegossip.net")
ROUND_TRIPS = 20
"""Number of round trips; the median counts."""
MAX_TRANSFER_BYTES = 2**26
"""Largest transfer that a worker sends on request."""
_MOST_REPEATED = MAX_TRANSFER_BYTES * 15 // 16
_WARM_UP = 3
_LONG: Seconds = 0.25
"""A transfer that takes this long outlasts the queues and buffers on its way."""
_ENOUGH: Seconds = 0.8 * _LONG
_LONGEST: Seconds = 2.0
"""A transfer that takes longer is not repeated."""
_ECHO, _ANSWER, _DATA, _GIVE = range(4)
_HEADER = struct.Struct("<BQQ")


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Measurements of the link from one worker to another.

    Args:
        round_trips: Seconds of each round trip of a small message.
        sent: Bytes per second of each transfer to the other worker.
        received: Bytes per second of each transfer from it.

    >>> LinkSpeed((0.01, 0.03, 0.012), (1e6,), (2e6,)).latency
    0.006
    """

    round_trips: tuple[Seconds, ...]
    sent: tuple[float, ...]
    received: tuple[float, ...]

    @property
    def latency(self) -> Seconds:
        """Half of the median round trip."""
        return statistics.median(self.round_trips) / 2


class _Request(NamedTuple):
    sender: Rank
    serial: int
    num_frames: int


class LinkMeter(Listener):
    """Measures links of this worker, and answers the measurements of others while it is open.

    The messages take the way that those of a run take: the transport's links, direct or
    relayed. A transfer is as many frames of a model's size as take a quarter of a second, both
    ways. Its time is that until the other worker confirms the last byte, less a round trip.

    Args:
        transport: Transport that is not open yet; the meter closes it.
        num_bytes: Size of the model in bytes, at least 1.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        transport: Transport,
        num_bytes: int,
        clock: Callable[[], Seconds] = time.perf_counter,
    ) -> None:
        self._transport = transport
        self._frame = bytes(num_bytes)
        self._clock = clock
        self._serials = itertools.count()
        self._here: set[Rank] = set()
        self._changed = threading.Condition()
        self._answers: queue.SimpleQueue[tuple[Rank, int]] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="link meter", daemon=True)

    def __enter__(self) -> LinkMeter:
        self._thread.start()
        self._transport.open(self, max_bytes=len(self._frame) + _HEADER.size)
        return self

    def __exit__(self, *error: object) -> None:
        self._transport.close()
        self._requests.put(None)

    def measure(self, other: Rank, patience: Seconds = 30.0) -> LinkSpeed:
        """Measure the link with another worker, which has a meter that is open.

        Args:
            other: Rank of the other worker.
            patience: Time limit until it appears, and for each answer.

        Raises:
            NetworkError: If the other worker does not appear or does not answer in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: other in self._here, patience):
                raise NetworkError(f"worker {other} cannot be reached within {patience:g} s")
        round_trips = [
            self._timed(other, _ECHO, 0, patience) for _ in range(_WARM_UP + ROUND_TRIPS)
        ][_WARM_UP:]
        usual = statistics.median(round_trips)
        sent, received = (self._rates(other, kind, usual, patience) for kind in (_ECHO, _GIVE))
        return LinkSpeed(tuple(round_trips), sent, received)

    def _rates(
        self, other: Rank, kind: int, round_trip: Seconds, patience: Seconds
    ) -> tuple[float, ...]:
        """Bytes per second of transfers: one of a model, or two of so many that take long."""
        size = len(self._frame)

        def rate(number: int) -> tuple[Seconds, float]:
            seconds = self._timed(other, kind, number, patience)
            # A short transfer may seem to end before it began.
            return seconds, number * size / max(seconds - round_trip, 0.1 * seconds)

        seconds, found = rate(1)
        if seconds >= _LONGEST:
            return (found,)
        most = max(1, _MOST_REPEATED // size)
        while True:
            number = min(most, max(1, math.ceil(_LONG * found / size)))
            seconds, found = rate(number)
            # A path begins slowly, so that the first transfers take less time than their rate
            # promises for the next.
            if seconds >= _ENOUGH or number == most:
                return found, rate(number)[1]

    def _timed(self, other: Rank, kind: int, number: int, patience: Seconds) -> Seconds:
        """Time of a request until its answer, with `number` frames to or from the other."""
        serial, began = next(self._serials), self._clock()
        if kind == _ECHO:
            self._send_frames(other, serial, number)
        self._transport.send(other, [_HEADER.pack(kind, serial, number)])
        end = began + patience
        while True:
            try:
                found = self._answers.get(timeout=max(0.0, end - self._clock()))
            except queue.Empty:
                raise NetworkError(
                    f"worker {other} did not answer within {patience:g} s"
                ) from None
            if found == (other, serial):  # else a late answer to an earlier request
                return self._clock() - began

    def _send_frames(self, other: Rank, serial: int, number: int) -> None:
        for _ in range(number):
            self._transport.send(other, [_HEADER.pack(_DATA, serial, 0), self._frame])

    def _answer(self) -> None:
        # In a thread of its own, because the transport's threads must not wait for a link.
        while (asked := self._requests.get()) is not None:
            self._send_frames(asked.sender, asked.serial, asked.num_frames)
            self._transport.send(asked.sender, [_HEADER.pack(_ANSWER, asked.serial, 0)])

    # Calls of the transport.

    def received(self, sender: Rank, frame: memoryview) -> None:
        """See `Listener`."""
        if len(frame) < _HEADER.size:
            self.refused(sender, "no message of a measurement")
            return
        kind, serial, number = _HEADER.unpack_from(frame)
        if kind == _ANSWER:
            self._answers.put((sender, serial))
        elif kind == _ECHO:
            self._requests.put(_Request(sender, serial, 0))
        elif kind == _GIVE and number * len(self._frame) <= MAX_TRANSFER_BYTES + len(
            self._frame
        ):
            self._requests.put(_Request(sender, serial, number))
        elif kind != _DATA:
            self.refused(sender, "no request of a measurement")

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """See `Listener`."""
        with self._changed:
            self._here.add(rank)
            self._changed.notify_all()

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """See `Listener`."""
        with self._changed:
            self._here.discard(rank)

    def interrupted(self, rank: Rank, incarnation: Incarnation) -> None:
        """See `Listener`; the measurement times out."""

    def refused(self, rank: Rank | None, reason: str) -> None:
        """See `Listener`."""
        if reason == TWIN:
            _LOG.error("another process measures as this worker; end one of them")
        else:
            _LOG.debug("refused from worker %s: %s", rank, reason)
