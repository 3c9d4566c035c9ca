"""The hardware that a worker runs on: how fast, how many executors, how loaded."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgegossip.core.protocol import Seconds


@dataclass(frozen=True, slots=True)
class Contention:
    """What everything but the training task uses of a machine: what a monitor would see.

    Args:
        cores: Share of the cores, in [0, 1].
        network: Bytes per second, at least 0.
        disk: Bytes per second, at least 0.

    Raises:
        ValueError: If a number is out of range.
    """

    cores: float = 0.0
    network: float = 0.0
    disk: float = 0.0

    def __post_init__(self) -> None:
        is_finite = self.network < math.inf and self.disk < math.inf
        if not (0 <= self.cores <= 1 and self.network >= 0 and self.disk >= 0 and is_finite):
            raise ValueError(f"cores must be in [0, 1], the others finite and >= 0, got {self}")


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How much contention slows training down; algorithms never see it.

    The slow-down is ``1 / (1 - cores * U.cores) + network * U.network + disk * U.disk``: a task
    that loses half of the cores takes twice as long.

    Args:
        cores: In [0, 1): how far training depends on the cores that others use.
        network: Added slow-down per byte/s.
        disk: Added slow-down per byte/s.
    """

    cores: float = 0.9
    network: float = 2e-9
    disk: float = 2e-9

    def __post_init__(self) -> None:
        if not 0 <= self.cores < 1 or self.network < 0 or self.disk < 0:
            raise ValueError(f"sensitivities must be >= 0 and that to cores < 1, got {self}")

    def slow_down(self, contention: Contention) -> float:
        """Time under `contention` over time alone, at least 1."""
        alone = 1 / (1 - self.cores * contention.cores)
        return alone + self.network * contention.network + self.disk * contention.disk


@dataclass(frozen=True, slots=True)
class ContentionTrace:
    """Contention over time: `contentions[k]` holds from `times[k]` on; repeats after `period`.

    Args:
        times: Seconds, ascending, beginning with 0.
        contentions: One for each time.
        period: Seconds after which it starts again; infinite to let the last one hold.

    Raises:
        ValueError: If times and contentions do not fit together.
    """

    times: tuple[Seconds, ...]
    contentions: tuple[Contention, ...]
    period: Seconds = math.inf

    def __post_init__(self) -> None:
        if len(self.times) != len(self.contentions) or not self.times:
            raise ValueError(
                f"a trace needs one contention a time, got {len(self.times)} times and "
                f"{len(self.contentions)} contentions"
            )
        is_ascending = all(a < b for a, b in pairwise(self.times))
        if self.times[0] != 0 or not is_ascending or self.period <= self.times[-1]:
            raise ValueError("times must ascend from 0 and end before the period")

    def at(self, now: Seconds) -> tuple[Contention, Seconds]:
        """The contention at `now`, and the time at which the next one begins."""
        start = 0.0 if self.period == math.inf else now // self.period * self.period
        # Division rounds, so `now` may fall a hair outside [start, start + period).
        index = bisect.bisect_right(self.times, now - start) - 1
        is_last = index + 1 == len(self.times)
        end = start + (self.period if is_last else self.times[index + 1])
        return self.contentions[max(index, 0)], end if end > now else math.nextafter(
            now, math.inf
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The hardware of one worker.

    Args:
        name: For people.
        throughput: Training samples per second of one executor, alone, for the workload.
        executors: Nodes of the platform; their throughputs add up.
        trace: Contention over time; None for an idle machine.
        sensitivity: How contention slows it down; hidden from algorithms.

    Raises:
        ValueError: If a number is out of range.

    >>> Platform(throughput=100.0, executors=2).duration(start=0.0, cost=50)
    0.25
    """

    name: str = "platform"
    throughput: float
    executors: int = 1
    trace: ContentionTrace | None = None
    sensitivity: Sensitivity = Sensitivity()

    def __post_init__(self) -> None:
        if not 0 < self.throughput < math.inf:
            raise ValueError(
                f"throughput must be above 0 samples/s and finite, got {self.throughput}"
            )
        if self.executors < 1:
            raise ValueError(f"executors must be at least 1, got {self.executors}")

    @property
    def total_throughput(self) -> float:
        """Samples per second of all executors together, alone."""
        return self.throughput * self.executors

    def contention(self, now: Seconds) -> Contention:
        """What a monitor would see at `now`."""
        return Contention() if self.trace is None else self.trace.at(now)[0]

    def duration(self, start: Seconds, cost: float) -> Seconds:
        """Seconds that `cost` (in samples) takes from `start` on, through the contention."""
        if self.trace is None:
            return cost / self.total_throughput
        now, remaining = start, float(cost)
        while True:
            contention, end = self.trace.at(now)
            speed = self.total_throughput / self.sensitivity.slow_down(contention)
            if remaining <= (end - now) * speed:
                return now + remaining / speed - start
            remaining -= (end - now) * speed
            now = end


UNEVEN_SPEEDS = (1.0, 0.8, 0.33, 0.25)


def uneven(
    num_workers: int = 4, throughput: float = 1000.0, speeds: Sequence[float] = UNEVEN_SPEEDS
) -> tuple[Platform, ...]:
    """Platforms whose speeds cycle through 1, 0.8, 0.33 and 0.25 of `throughput` (samples/s).

    >>> [platform.throughput for platform in uneven(4)]
    [1000.0, 800.0, 330.0, 250.0]
    """
    chosen = [speeds[rank % len(speeds)] for rank in range(num_workers)]
    return tuple(
        Platform(name=f"{speed:g}x", throughput=throughput * speed) for speed in chosen
    )


def paper(throughput: float = 250.0) -> tuple[Platform, ...]:
    """Two CPU and two GPU platforms, the kinds of the EdgeGossip paper's four.

    The paper prints no speeds. Here a CPU platform has four executors of `throughput`
    samples/s, a GPU platform one that is 12 times as fast: three times in all, the smaller of
    the two imbalances that it evaluates.

    >>> [platform.total_throughput for platform in paper()]
    [3000.0, 3000.0, 1000.0, 1000.0]
    """
    gpu = Platform(name="gpu", throughput=12 * throughput)
    cpu = Platform(name="cpu", throughput=throughput, executors=4)
    return (gpu, gpu, cpu, cpu)
