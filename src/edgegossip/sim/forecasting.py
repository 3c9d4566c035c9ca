"""Monitors of simulated platforms, and their forecasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from edgegossip.core.protocol import Rank, Seconds
from edgegossip.core.randomness import generator
from edgegossip.machine.contention import Contention
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.machine.profile import MIN_ROWS, Profile
from edgegossip.machine.watch import Predictor, Watch
from edgegossip.sim.platform import Platform

FORECAST_SECONDS: Seconds = 1e-3
"""Time that a forecast takes: reading counters, accounting for measurements, regression."""

MakePredictor = Callable[[Rank], Predictor]
"""Makes the predictor of each incarnation of a worker."""


class SimulatedMonitor(Watch):
    """Watches one platform and forecasts its throughput.

    It reads the platform's counters at every full second; sensitivity and throttling are hidden
    from it.

    Args:
        platform: Watched platform.
        make_predictor: Called for the first forecast.
        start: Start time.
    """

    __slots__ = ()

    def __init__(
        self, platform: Platform, make_predictor: Callable[[], Predictor], start: Seconds = 0.0
    ) -> None:
        super().__init__(platform, _whole_seconds, make_predictor, start)


def _whole_seconds(after: Seconds, until: Seconds) -> range:
    return range(math.floor(after) + 1, math.floor(until) + 1)


def default_predictor(platform: Platform) -> PerformancePredictor:
    """Make a predictor without a profile.

    The predictor forecasts the idle speed first, and later the last measured speed.
    """
    return PerformancePredictor(platform.executors, seconds_alone=1 / platform.throughput)


def profiled(platforms: Sequence[Platform], profiles: Mapping[Rank, Profile]) -> MakePredictor:
    """Make predictors fitted to the workers' profiles; the default if there is no profile."""

    def make(rank: Rank) -> PerformancePredictor:
        if rank not in profiles:
            return default_predictor(platforms[rank])
        return PerformancePredictor(platforms[rank].executors).fit(profiles[rank])

    return make


def profile(
    platform: Platform, num_samples: int = 100, seed: int = 0, noise: float = 0.02
) -> Profile:
    """Profile `platform` as on a real machine: train under random loads, and measure.

    Args:
        platform: Platform to measure; its trace and throttling are ignored.
        num_samples: Number of loads, at least 10; the first is empty.
        seed: Seed of loads and noise.
        noise: Relative standard deviation of the measured times, in [0, 1).

    Raises:
        ValueError: If a number is out of range.

    >>> from edgegossip.sim.platform import Platform
    >>> round(profile(Platform(throughput=100.0), noise=0.0).seconds[0], 6)
    0.01
    """
    if num_samples < MIN_ROWS or not 0 <= noise < 1:
        raise ValueError(
            f"num_samples must be at least {MIN_ROWS} and noise in [0, 1), got {num_samples} "
            f"and {noise}"
        )
    random = generator(seed, "profile")
    contentions, seconds = [], []
    for number in range(num_samples):
        share = torch.rand(3, generator=random)
        # Jobs often do not use one of the three resources, and one load must be empty.
        is_used = (torch.rand(3, generator=random) > 1 / 3) & (number > 0)
        cores, network, disk = (share * is_used).tolist()
        # A saturated gigabit link and hard disk.
        contention = Contention(0.9 * cores, 125e6 * network, 250e6 * disk)
        error = noise * float(torch.randn(1, generator=random))
        slow_down = platform.sensitivity.slow_down(contention)
        contentions.append(contention)
        seconds.append(slow_down * math.exp(error) / platform.throughput)
    return Profile(tuple(contentions), tuple(seconds))
