"""The recent use of this machine by other processes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgegossip.contract.protocol import Seconds, Span
from edgegossip.machine.contention import Contention
from edgegossip.machine.counters import Counters, Reading
from edgegossip.machine.watch import MEMORY

_HALF_LIFE: Seconds = 10.0
"""Half-life of our use that the machine has not counted yet."""


@dataclass(slots=True)
class _Others:
    """Use by other processes, computed from total and own use.

    The two counts never agree exactly: a file reaches the disk long after we wrote it, and
    processor time comes in ticks. Our use that the total lacks is subtracted later, and slowly
    forgotten in case it never appears.
    """

    all: float
    own: float
    _owed: float = 0.0

    def until(self, all_used: float, own_used: float, seconds: Seconds) -> float:
        """Use by other processes since the last call, `seconds` ago; at least 0."""
        more = max(0.0, all_used - self.all)
        faded = self._owed * math.pow(0.5, seconds / _HALF_LIFE)
        owed = faded + max(0.0, own_used - self.own)
        self.all, self.own = all_used, own_used
        self._owed = max(0.0, owed - more)
        return max(0.0, more - owed)


class History:
    """Mean use by other processes between consecutive readings of the counters.

    Args:
        counters: Counters to read.
        clock: Monotonic clock in seconds.

    Attributes:
        times: Times of the stored readings, in order.
    """

    def __init__(self, counters: Counters, clock: Callable[[], Seconds]) -> None:
        self._counters = counters
        self._clock = clock
        first = counters.read()
        self.times = [clock()]
        # The integrals over time of cores, network and disk, at each reading.
        self._totals = [(0.0, 0.0, 0.0)]
        group = _group(first)
        self._outside = _Others(first.machine.cores, group)
        self._inside = _Others(group, first.own.cores)
        self._network = _Others(first.machine.network, first.own.network)
        self._disk = _Others(first.machine.disk, first.own.disk)

    def read(self) -> None:
        """Read the counters now; no effect if the clock has not advanced."""
        reading, now = self._counters.read(), self._clock()
        seconds = now - self.times[-1]
        if seconds <= 0:
            return
        machine, own, group = reading.machine, reading.own, _group(reading)
        outside = self._outside.until(machine.cores, group, seconds)
        inside = self._inside.until(group, own.cores, seconds)
        cores, network, disk = self._totals[-1]
        self._totals.append(
            (
                cores + seconds * self._share(outside / seconds, inside / seconds),
                network + self._network.until(machine.network, own.network, seconds),
                disk + self._disk.until(machine.disk, own.disk, seconds),
            )
        )
        self.times.append(now)
        if self.times[0] < now - 4 * MEMORY:
            kept = bisect_right(self.times, now - 2 * MEMORY) - 1
            del self.times[:kept], self._totals[:kept]

    def _share(self, outside: float, inside: float) -> float:
        """The share of our allowance that other processes use.

        Processes under our quota always use part of our allowance; processes outside the quota
        do so only if they leave fewer cores than the quota allows.
        """
        quota = self._counters.quota
        left = min(quota, self._counters.num_cores - outside) - inside
        return min(1.0, max(0.0, 1 - left / quota))

    def readings(self, after: Seconds, until: Seconds) -> list[Seconds]:
        """Times of the readings later than `after`, up to `until`."""
        return self.times[bisect_right(self.times, after) : bisect_right(self.times, until)]

    def mean_contention(self, *spans: Span) -> Contention:
        """The mean over the stored parts of `spans`, each (start, end).

        If no part is stored, this is the mean between the last two readings.
        """
        clipped = np.clip(spans, self.times[0], self.times[-1])
        lengths = np.diff(clipped).clip(0.0).ravel()
        if not lengths.sum():
            if len(self.times) == 1:
                return Contention()
            clipped = np.array([self.times[-2:]])
            lengths = np.diff(clipped).ravel()
        totals = np.array(self._totals)
        cores, network, disk = (
            max(0.0, float(np.diff(np.interp(clipped, self.times, total)).sum()))
            for total in totals.T
        )
        seconds = float(lengths.sum())
        return Contention(min(1.0, cores / seconds), network / seconds, disk / seconds)


def _group(reading: Reading) -> Seconds:
    """Use under our quota; without a quota, only our own."""
    return reading.own.cores if reading.group is None else reading.group
