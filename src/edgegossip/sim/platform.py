"""Platforms: the hardware of workers, with speed, executors and load."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_ranges
from edgegossip.machine.contention import Contention
from edgegossip.machine.energy import BUSY_WATTS, IDLE_WATTS, OMIT_DEFAULT, check_watts


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Slowdown of training by contention; hidden from algorithms.

    The slowdown is ``1 / (1 - cores * U.cores) + network * U.network + disk * U.disk``, so with
    `cores` close to 1, a task that loses half of the cores takes about twice as long.

    Args:
        cores: Sensitivity of training to the cores that other processes use, in [0, 1).
        network: Added slowdown per byte/s.
        disk: Added slowdown per byte/s.

    Raises:
        ValueError: If a number is out of range.
    """

    cores: float = 0.9
    network: float = 2e-9
    disk: float = 2e-9

    def __post_init__(self) -> None:
        if not 0 <= self.cores < 1 or self.network < 0 or self.disk < 0:
            raise ValueError(f"sensitivities must be >= 0 and that to cores < 1, got {self}")

    def slow_down(self, contention: Contention) -> float:
        """Time under `contention` divided by the time without it, at least 1."""
        # Cores are shared, so training takes longer by a factor. The network and the disk make
        # it wait, which adds time.
        alone = 1 / (1 - self.cores * contention.cores)
        return alone + self.network * contention.network + self.disk * contention.disk


@dataclass(frozen=True, slots=True)
class ContentionTrace:
    """Contention over time: `contentions[k]` from `times[k]` on, repeated after `period`.

    Args:
        times: Ascending seconds, beginning with 0.
        contentions: One for each time.
        period: Seconds until the trace repeats; infinite to keep the last contention.

    Raises:
        ValueError: If times and contentions do not match, or times do not ascend from 0 to
            below the period.
    """

    times: tuple[Seconds, ...]
    contentions: tuple[Contention, ...]
    period: Seconds = math.inf

    def __post_init__(self) -> None:
        _require_steps(self.times, self.contentions, self.period)

    def at(self, now: Seconds) -> tuple[Contention, Seconds]:
        """The contention at `now`, and the time at which it changes."""
        index, end = _step(self.times, self.period, now)
        return self.contentions[index], end


@dataclass(frozen=True, slots=True)
class ThrottlingTrace:
    """A slowdown, such as from heat, that no monitor shows: `slow_downs[k]` from `times[k]` on.

    Args:
        times: Ascending seconds, beginning with 0.
        slow_downs: Slowdown factors, at least 1; one for each time.
        period: Seconds until the trace repeats; infinite to keep the last slowdown.

    Raises:
        ValueError: If times and slowdowns do not match, times do not ascend from 0 to below the
            period, or a slowdown is below 1.
    """

    times: tuple[Seconds, ...]
    slow_downs: tuple[float, ...]
    period: Seconds = math.inf

    def __post_init__(self) -> None:
        _require_steps(self.times, self.slow_downs, self.period)
        if not all(1 <= slow_down < math.inf for slow_down in self.slow_downs):
            raise ValueError(f"slow-downs must be at least 1 and finite, got {self.slow_downs}")

    def at(self, now: Seconds) -> tuple[float, Seconds]:
        """The slowdown at `now`, and the time at which it changes."""
        index, end = _step(self.times, self.period, now)
        return self.slow_downs[index], end


def _require_steps(times: Sequence[Seconds], values: Sequence[object], period: Seconds) -> None:
    if len(times) != len(values) or not times:
        raise ValueError(
            f"a trace needs one value a time, got {len(times)} times and {len(values)} values"
        )
    is_ascending = all(a < b for a, b in pairwise(times))
    if times[0] != 0 or not is_ascending or period <= times[-1]:
        raise ValueError("times must ascend from 0 and end before the period")


def _step(times: Sequence[Seconds], period: Seconds, now: Seconds) -> tuple[int, Seconds]:
    """Index of the step at `now`, and the time at which the next step begins."""
    start = 0.0 if period == math.inf else now // period * period
    # Division rounds, so `now` may fall a hair outside [start, start + period).
    index = bisect.bisect_right(times, now - start) - 1
    end = start + (period if index + 1 == len(times) else times[index + 1])
    # The end must lie ahead, or the loops over steps would never end.
    return max(index, 0), end if end > now else math.nextafter(now, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The hardware of one worker.

    Args:
        name: Name for reports and messages.
        throughput: Training samples per second of one executor on an idle machine, for this
            workload.
        executors: Number of executors; their throughputs add up.
        trace: Contention over time; None for an idle machine.
        throttling: Additional slowdowns over time, hidden from monitors; None if there are
            none.
        sensitivity: Slowdown by contention; hidden from algorithms.
        uplink: Maximum bytes per second sent, for all messages together, above 0.
        downlink: Maximum bytes per second received, for all messages together, above 0.
        seconds_per_training: Seconds in which the idle machine begins and ends a training,
            whatever its length, at least 0.
        seconds_per_byte: Seconds of training that each byte of a message takes from the idle
            machine when it is sent, and when it is received, at least 0.
        seconds_per_message: Seconds of training that each message takes from the idle machine
            when it is sent, and when it is received, whatever its size, at least 0.
        idle_watts: Power of the whole machine while it is on and does not work, at least 0; by
            default that of a Raspberry Pi 4 (see `edgegossip.machine.energy`).
        busy_watts: Power while it trains, prepares data or evaluates, with all executors in
            use, at least `idle_watts`.

    Raises:
        ValueError: If a number is out of range.

    >>> Platform(throughput=100.0, executors=2).duration(start=0.0, cost=50)
    0.25
    """

    name: str = "platform"
    throughput: float
    executors: int = 1
    trace: ContentionTrace | None = None
    throttling: ThrottlingTrace | None = None
    sensitivity: Sensitivity = Sensitivity()
    uplink: float = math.inf
    downlink: float = math.inf
    seconds_per_training: Seconds = field(default=0.0, metadata=OMIT_DEFAULT)
    seconds_per_byte: Seconds = field(default=0.0, metadata=OMIT_DEFAULT)
    seconds_per_message: Seconds = field(default=0.0, metadata=OMIT_DEFAULT)
    idle_watts: float = field(default=IDLE_WATTS, metadata=OMIT_DEFAULT)
    busy_watts: float = field(default=BUSY_WATTS, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        check_ranges(self, throughput="above 0 samples/s and finite", executors="at least 1")
        check_ranges(self, uplink="above 0 bytes/s", downlink="above 0 bytes/s")
        check_ranges(self, seconds_per_training="in [0, inf) s")
        check_ranges(self, seconds_per_byte="in [0, inf) s")
        check_ranges(self, seconds_per_message="in [0, inf) s")
        check_watts(self.idle_watts, self.busy_watts)

    @property
    def total_throughput(self) -> float:
        """Samples per second of all executors together while the machine is idle."""
        return self.throughput * self.executors

    def contention(self, now: Seconds) -> Contention:
        """The contention at `now`."""
        return Contention() if self.trace is None else self.trace.at(now)[0]

    def mean_contention(self, start: Seconds, end: Seconds) -> Contention:
        """Mean contention from `start` to `end`, as a monitor would see it."""
        if self.trace is None or start >= end:
            return self.contention(end)
        now, sums = start, [0.0, 0.0, 0.0]
        while now < end:
            u, until = self.trace.at(now)
            share = (min(until, end) - now) / (end - start)
            for kind, used in enumerate((u.cores, u.network, u.disk)):
                sums[kind] += share * used
            now = until
        # Shares may add up to a hair more than 1.
        return Contention(min(1.0, sums[0]), sums[1], sums[2])

    def duration(self, start: Seconds, cost: float) -> Seconds:
        """Seconds from `start` for work of `cost` samples, under contention and throttling."""
        # The usual case, in one expression: it runs for each training.
        if self.trace is None and self.throttling is None:
            return cost / (self.throughput * self.executors)
        # Speed is constant between two changes of load, so work is done piece by piece.
        now, remaining = start, float(cost)
        while True:
            speed, end = self._speed(now)
            if remaining <= (end - now) * speed:
                return now - start + remaining / speed
            remaining -= (end - now) * speed
            now = end

    def work(self, start: Seconds, end: Seconds) -> float:
        """Work done from `start` to `end`, in samples; the inverse of `duration`."""
        now, done = start, 0.0
        while now < end:
            speed, until = self._speed(now)
            done += (min(until, end) - now) * speed
            now = until
        return done

    def _speed(self, now: Seconds) -> tuple[float, Seconds]:
        """Samples per second of all executors at `now`, and the time at which this changes."""
        speed, end = self.total_throughput, math.inf
        if self.trace is not None:
            contention, end = self.trace.at(now)
            speed /= self.sensitivity.slow_down(contention)
        # A processor that throttles is slower at whatever cores are left.
        if self.throttling is not None:
            slow_down, until = self.throttling.at(now)
            speed, end = speed / slow_down, min(end, until)
        return speed, end


UNEVEN_SPEEDS = (1.0, 0.8, 0.33, 0.25)


def uneven(
    num_workers: int = 4, throughput: float = 1000.0, speeds: Sequence[float] = UNEVEN_SPEEDS
) -> tuple[Platform, ...]:
    """Platforms whose speeds cycle through `speeds`, times `throughput` (samples/s).

    >>> [platform.throughput for platform in uneven(4)]
    [1000.0, 800.0, 330.0, 250.0]
    """
    kinds = [Platform(name=f"{speed:g}x", throughput=throughput * speed) for speed in speeds]
    return tuple(kinds[rank % len(kinds)] for rank in range(num_workers))


def paper(throughput: float = 250.0) -> tuple[Platform, ...]:
    """Make two CPU and two GPU platforms, like the four in the EdgeGossip paper.

    The paper does not state speeds. Here a CPU platform has four executors of `throughput`
    samples/s, and a GPU platform has one that is 12 times as fast. The resulting ratio of three
    is the smaller of the paper's two imbalances.

    >>> [platform.total_throughput for platform in paper()]
    [3000.0, 3000.0, 1000.0, 1000.0]
    """
    gpu = Platform(name="gpu", throughput=12 * throughput)
    cpu = Platform(name="cpu", throughput=throughput, executors=4)
    return (gpu, gpu, cpu, cpu)
