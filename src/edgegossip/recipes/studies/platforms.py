"""Platforms with a given imbalance."""

from __future__ import annotations

import math

from edgegossip.contract.ranges import check_range
from edgegossip.sim.platform import UNEVEN_SPEEDS, Platform, uneven


def imbalanced(
    num_workers: int = 4, throughput: float = 1000.0, imbalance: float = 4.0
) -> tuple[Platform, ...]:
    """Make platforms like `uneven`, with the fastest `imbalance` times as fast as the slowest.

    The speeds 1 : 0.8 : 0.33 : 0.25 are raised to the power log(imbalance) / log(4), which
    keeps the shape of their spread.

    Args:
        num_workers: Number of platforms, at least 1.
        throughput: Training samples per second of the fastest platform.
        imbalance: T_max / T_min, at least 1.

    Raises:
        ValueError: If `imbalance` is below 1.

    >>> [round(platform.throughput) for platform in imbalanced(imbalance=16)]
    [1000, 640, 109, 62]
    """
    check_range("imbalance", imbalance, "at least 1 and finite")
    exponent = math.log(imbalance) / math.log(1 / min(UNEVEN_SPEEDS))
    speeds = [speed**exponent for speed in UNEVEN_SPEEDS]
    return uneven(num_workers, throughput, speeds)


def fast_and_slow(factor: float, throughput: float = 1000.0) -> tuple[Platform, ...]:
    """Make two fast platforms, and two that are `factor` times slower.

    >>> [platform.throughput for platform in fast_and_slow(5)]
    [1000.0, 1000.0, 200.0, 200.0]
    """
    return uneven(4, throughput, (1.0, 1.0, 1 / factor, 1 / factor))


def time_ratio(platforms: tuple[Platform, ...]) -> float:
    """T_max / T_min for equal shards on idle platforms.

    >>> time_ratio(fast_and_slow(5))
    5.0
    """
    speeds = [platform.total_throughput for platform in platforms]
    return max(speeds) / min(speeds)
