"""Observations for a predictor, from training times and use by other processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from edgegossip.contract.protocol import Predicted, Seconds, Span
from edgegossip.machine.contention import Contention

MEMORY: Seconds = 60.0
"""Seconds that a monitor remembers."""
SHORTEST: Seconds = 0.1
"""Minimum seconds between two readings; the system counts in hundredths of a second."""
_STRETCH: Seconds = 0.25
"""Longest stretch of training: a few batches, so that their differences average out."""
_MAX_SPANS = 256
"""Maximum number of spans of training, with pauses between them, to remember."""


class Predictor(Protocol):
    """The predictor of a monitor; `PerformancePredictor` is one."""

    def observe(
        self, executor: int, contention: Contention, seconds_per_sample: Seconds
    ) -> None:
        """Record the time per sample of `executor` under `contention`."""

    def forecast(
        self, present: Sequence[Contention], usual: Sequence[Contention] | None = None
    ) -> Predicted:
        """Forecast the throughput from each executor's present and mean contention."""

    def state_dict(self) -> dict[str, Any]:
        """All mutable state, as plain numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""


class Watched(Protocol):
    """A machine as its monitor sees it: a simulated platform, or this machine."""

    @property
    def executors(self) -> int:
        """Number of executors."""

    def mean_contention(self, start: Seconds, end: Seconds) -> Contention:
        """Mean use by other processes from `start` to `end`."""

    def work(self, start: Seconds, end: Seconds) -> float:
        """Training work from `start` to `end`, in samples, during uninterrupted training."""


Readings = Callable[[Seconds, Seconds], Iterable[Seconds]]
"""``readings(after, until)``: times at which counters were read, in (`after`, `until`]."""


class Watch:
    """Watches one machine and forecasts its throughput.

    Counters are read once a second and for each forecast; two readings give the mean use by
    other processes between them. The watch times training in stretches of an eighth to a
    quarter of a second, without pauses. The present use is the mean since the previous reading,
    and the usual use is the mean over a minute.

    Args:
        watched: The machine.
        readings: Returns the times at which counters were read.
        make_predictor: Makes the predictor at the first forecast.
        start: Start time.
    """

    __slots__ = (
        "_began",
        "_ended",
        "_has_observed",
        "_last_reading",
        "_make_predictor",
        "_observed_until",
        "_predictor",
        "_readings",
        "_spans",
        "_start",
        "_watched",
    )

    def __init__(
        self,
        watched: Watched,
        readings: Readings,
        make_predictor: Callable[[], Predictor],
        start: Seconds = 0.0,
    ) -> None:
        self._watched = watched
        self._readings = readings
        self._make_predictor = make_predictor
        self._predictor: Predictor | None = None
        self._start = self._last_reading = self._observed_until = start
        self._has_observed = False
        # Spans of training that were not observed yet: the last one, which training without a
        # pause extends, and those before it.
        self._began = self._ended = start
        self._spans: list[Span] = []

    def trained(self, start: Seconds, end: Seconds) -> None:
        """Record that training ran from `start` to `end`."""
        if start != self._ended:
            if self._began < self._ended:
                self._spans.append((self._began, self._ended))
            self._began = start
            if len(self._spans) >= _MAX_SPANS:
                # Most runs never ask for a forecast, which would empty the list.
                del self._spans[: _MAX_SPANS // 2]
        self._ended = end

    def _all_spans(self) -> list[Span]:
        last = (self._began, self._ended)
        return [*self._spans, last] if self._began < self._ended else self._spans

    def forecast(self, now: Seconds) -> Predicted:
        """Forecast the throughput of the work that begins at `now`."""
        predictor = self._predictor = self._predictor or self._make_predictor()
        self._observe(predictor, now)
        executors = range(self._watched.executors)
        last = self._readings_since(self._last_reading, now)[-2]
        present = self._watched.mean_contention(last, now)
        usual = self._watched.mean_contention(max(self._start, now - MEMORY), now)
        self._last_reading = now
        return predictor.forecast([present for _ in executors], [usual for _ in executors])

    def _readings_since(self, moment: Seconds, now: Seconds) -> list[Seconds]:
        """Times of the readings since `moment`, and of the reading before them."""
        first = max(self._start, now - MEMORY, min(moment, now - SHORTEST))
        return [first, *self._readings(first + SHORTEST, now - SHORTEST), now]

    def _observe(self, predictor: Predictor, now: Seconds) -> None:
        """Report to `predictor` the training since the last report, stretch by stretch.

        Short training is held back until there is more, because a round in blocks may end with
        a single step.
        """
        readings = self._readings_since(self._observed_until, now)
        trained = _length(self._trained_within(readings[0], now))
        if 0 < trained < 0.5 * _STRETCH and self._has_observed:
            return
        for begin, end in pairwise(self._with_training_between(readings)):
            contention = self._watched.mean_contention(begin, end)
            for stretch in _equal_stretches(self._trained_within(begin, end)):
                work = sum(self._watched.work(*span) for span in stretch)
                for executor, parts in self._parts(stretch).items():
                    seconds = _length(stretch) * parts / work
                    predictor.observe(executor, contention, seconds)
        self._has_observed |= trained > 0
        self._observed_until = now
        self._began = self._ended
        self._spans = []

    def _parts(self, stretch: list[Span]) -> Mapping[int, float]:
        """All work of a stretch divided by that of each executor; here they share equally."""
        number = self._watched.executors
        return dict.fromkeys(range(number), number)

    def _with_training_between(self, readings: list[Seconds]) -> list[Seconds]:
        """The first and last `readings`, and further ones with over half a stretch of training
        between them.
        """
        kept = readings[:1]
        for reading in readings[1:]:
            if _length(self._trained_within(kept[-1], reading)) > 0.5 * _STRETCH:
                kept.append(reading)
        # The remainder belongs to the last stretch.
        return [*kept[: max(1, len(kept) - 1)], readings[-1]]

    def _trained_within(self, begin: Seconds, end: Seconds) -> list[Span]:
        """Spans of training from `begin` to `end`."""
        overlaps = ((max(start, begin), min(stop, end)) for start, stop in self._all_spans())
        return [(start, stop) for start, stop in overlaps if start < stop]

    def state_dict(self) -> dict[str, Any]:
        """All state that later forecasts depend on."""
        return {
            "start": self._start,
            "last_reading": self._last_reading,
            "observed_until": self._observed_until,
            "has_observed": self._has_observed,
            "spans": self._all_spans(),
            "predictor": None if self._predictor is None else self._predictor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the `state_dict` of an equal monitor."""
        self._start, self._last_reading = state["start"], state["last_reading"]
        self._observed_until = state["observed_until"]
        self._has_observed = state["has_observed"]
        *self._spans, (self._began, self._ended) = state["spans"] or [(self._start,) * 2]
        self._predictor = None
        if state["predictor"] is not None:
            self._predictor = self._make_predictor()
            self._predictor.load_state_dict(state["predictor"])


def _equal_stretches(spans: list[Span]) -> Iterator[list[Span]]:
    """Cut `spans`, without the pauses between them, into stretches of equal length.

    A span may be as short as one step. Scheduling can halve or double the duration of such a
    span, so it is observed alone only if there are no other spans.
    """
    total = _length(spans)
    length = total / max(1, math.ceil(total / _STRETCH))
    stretch: list[Span] = []
    missing = length
    for start, end in spans:
        left = start
        while end - left >= missing:
            yield [*stretch, (left, left + missing)]
            left, stretch, missing = left + missing, [], length
        stretch.append((left, end))
        missing -= end - left
    if missing < 0.5 * length:  # by rounding, the last one may not have been full
        yield stretch


def _length(spans: list[Span]) -> Seconds:
    return sum(end - start for start, end in spans)
