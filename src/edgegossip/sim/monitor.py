"""What a monitor on a simulated platform sees, and what is forecast from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

from edgegossip.balance.predictor import Forecast, PerformancePredictor
from edgegossip.balance.profile import MIN_ROWS, Profile
from edgegossip.core.contention import Contention
from edgegossip.core.protocol import Predicted, Rank, Seconds
from edgegossip.core.randomness import generator
from edgegossip.sim.platform import Platform

FORECAST_SECONDS: Seconds = 1e-3
"""What a forecast takes: reading counters, accounting for what was measured, regression."""

_MEMORY: Seconds = 60.0
"""How far back a monitor remembers."""
_SHORTEST: Seconds = 0.1
"""Between two readings of the counters: the system's own count in hundredths of a second."""
_MAX_SPANS = 256
"""Of training with pauses between them, to remember."""
_STRETCH: Seconds = 0.25
"""Of training, at most: a few batches, over which their differences average out."""


class Predictor(Protocol):
    """What a monitor feeds and asks; `PerformancePredictor` is one."""

    def observe(
        self, executor: int, contention: Contention, seconds_per_sample: Seconds
    ) -> None:
        """Account for what `executor` needed for each sample under `contention`."""

    def forecast(
        self, present: Sequence[Contention], usual: Sequence[Contention] | None = None
    ) -> Forecast:
        """What to expect, from what others use on each executor now, and on average."""

    def state_dict(self) -> dict[str, Any]:
        """All that changes, as plain numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state_dict`."""


MakePredictor = Callable[[Rank], Predictor]
"""Makes the predictor of a worker, and another one for each of its incarnations."""


class Monitor:
    """Watches one platform, and forecasts its throughput.

    It reads its counters once a second, and when a forecast is asked for, so it knows what
    others used on average between two readings. Of the training task it knows how long each
    stretch of at most a quarter of a second took. It sees neither sensitivity nor throttling.
    What others use now is that of the last reading, what they usually use the mean of a minute.

    Args:
        platform: What it watches.
        make_predictor: Called when the first forecast is asked for.
        start: When it begins to watch.
    """

    __slots__ = (
        "_last_reading",
        "_make_predictor",
        "_platform",
        "_predictor",
        "_spans",
        "_start",
    )

    def __init__(
        self, platform: Platform, make_predictor: Callable[[], Predictor], start: Seconds = 0.0
    ) -> None:
        self._platform = platform
        self._make_predictor = make_predictor
        self._predictor: Predictor | None = None
        self._start = self._last_reading = start
        # When training ran since the last forecast.
        self._spans: list[tuple[Seconds, Seconds]] = []

    def trained(self, start: Seconds, end: Seconds) -> None:
        """The training task ran from `start` to `end`."""
        spans = self._spans
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], end)
            return
        spans.append((start, end))
        if len(self._spans) > _MAX_SPANS:
            # Those who never ask for a forecast must not pay for it.
            del self._spans[: _MAX_SPANS // 2]

    def forecast(self, now: Seconds) -> Predicted:
        """Forecast the throughput of the work that begins at `now`."""
        predictor = self._predictor = self._predictor or self._make_predictor()
        readings = self._readings(now)
        executors = range(self._platform.executors)
        for contention, seconds in self._observations(readings):
            for executor in executors:
                predictor.observe(executor, contention, seconds)
        present = self._platform.mean_contention(readings[-2], now)
        usual = self._platform.mean_contention(max(self._start, now - _MEMORY), now)
        forecast = predictor.forecast([present for _ in executors], [usual for _ in executors])
        self._last_reading = now
        self._spans.clear()
        return Predicted(forecast.throughput, forecast.relative_error)

    def _readings(self, now: Seconds) -> list[Seconds]:
        """When the counters were read since the last forecast, and when before that."""
        first = max(self._start, now - _MEMORY, min(self._last_reading, now - _SHORTEST))
        last = now - _SHORTEST
        ticks = range(math.floor(first + _SHORTEST) + 1, math.floor(last) + 1)
        return [first, *ticks, now]

    def _observations(self, readings: list[Seconds]) -> Iterator[tuple[Contention, Seconds]]:
        """What was used, and seconds per sample of an executor, stretch by stretch."""
        for begin, end in pairwise(readings):
            contention = self._platform.mean_contention(begin, end)
            for start, stop in self._spans:
                for left, right in _stretches(max(start, begin), min(stop, end)):
                    work = self._platform.work(left, right)
                    yield contention, (right - left) * self._platform.executors / work

    def state_dict(self) -> dict[str, Any]:
        """All that a later forecast depends on."""
        return {
            "start": self._start,
            "last_reading": self._last_reading,
            "spans": list(self._spans),
            "predictor": None if self._predictor is None else self._predictor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state_dict` of a monitor made alike."""
        self._start, self._last_reading = state["start"], state["last_reading"]
        self._spans = list(state["spans"])
        self._predictor = None
        if state["predictor"] is not None:
            self._predictor = self._make_predictor()
            self._predictor.load_state_dict(state["predictor"])


def _stretches(start: Seconds, end: Seconds) -> Iterator[tuple[Seconds, Seconds]]:
    """Equal pieces of at most `_STRETCH`; none if `end` is not after `start`."""
    num = math.ceil((end - start) / _STRETCH)
    bounds = [start + (end - start) * k / num for k in range(num)]
    return pairwise([*bounds, end])


def default_predictor(platform: Platform) -> PerformancePredictor:
    """Without a profile: as fast as the machine alone, and then as it lately was."""
    return PerformancePredictor(platform.executors, seconds_alone=1 / platform.throughput)


def profile(
    platform: Platform, num_samples: int = 100, seed: int = 0, noise: float = 0.02
) -> Profile:
    """Profile `platform` as a session on it would: train under random loads, and measure.

    Args:
        platform: What to measure; its trace and throttling play no part.
        num_samples: Loads to try, at least 10; the first is none at all.
        seed: Of loads and noise.
        noise: Standard deviation of the measured times, relative; at least 0.

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
        # Jobs often leave one of the three alone, and no load must be among the loads.
        is_used = (torch.rand(3, generator=random) > 1 / 3) & (number > 0)
        cores, network, disk = (share * is_used).tolist()
        # A gigabit link and a hard disk, filled.
        contention = Contention(0.9 * cores, 125e6 * network, 250e6 * disk)
        error = noise * float(torch.randn(1, generator=random))
        slow_down = platform.sensitivity.slow_down(contention)
        contentions.append(contention)
        seconds.append(slow_down * math.exp(error) / platform.throughput)
    return Profile(tuple(contentions), tuple(seconds))
