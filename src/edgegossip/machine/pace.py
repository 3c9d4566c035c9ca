"""Times and progress of training, as reported by the training code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from edgegossip.contract.protocol import Seconds, Span
from edgegossip.machine.contention import Contention
from edgegossip.machine.history import History

_PIECE: Seconds = 0.25
"""Minimum length of a recorded piece of training; shorter steps are combined."""
_PAUSE: Seconds = 0.02
"""Pauses between two steps count as training if they are shorter than this."""
_MAX_PIECES = 256


class WorkHistory:
    """Spans of training, and work over time, in samples.

    Work is reported at the end of a stretch of training. During a long stretch with changing
    loads, more work was done at times of low load. Work is therefore spread over time with a
    constant :math:`t_0` that fits the duration of the stretch.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple[Seconds, Seconds, float]] = deque(maxlen=_MAX_PIECES)
        self._num_new = 0
        self._times = [0.0]
        self._totals = [0.0]

    def add(self, start: Seconds, end: Seconds, cost: float) -> None:
        """Record training from `start` to `end` that did work of `cost` samples."""
        if self._num_new:
            first, last, done = self._pieces[-1]
            if last - first < _PIECE and 0 <= start - last < _PAUSE:
                self._pieces[-1] = (first, end, done + cost)
                return
        self._pieces.append((start, end, cost))
        self._num_new = min(self._num_new + 1, _MAX_PIECES)

    def take(self, history: History, slow_down: Callable[[Contention], float]) -> list[Span]:
        """Return the spans of training since the last call; from now on `work` covers these
        times.

        `work` still covers earlier times, too: the last 256 ends of pieces or readings.
        """
        # Some of the spans taken before may not have been asked for.
        del self._times[:-_MAX_PIECES], self._totals[:-_MAX_PIECES]
        new = list(self._pieces)[len(self._pieces) - self._num_new :]
        for start, end, cost in new:
            bounds = [start, *history.readings(start, end), end]
            weights = [
                (span[1] - span[0]) / slow_down(history.mean_contention(span))
                for span in pairwise(bounds)
            ]
            shares = np.cumsum([0.0, *weights]) / sum(weights)
            self._times += bounds
            self._totals += list(self._totals[-1] + cost * shares)
        self._num_new = 0
        return [(start, end) for start, end, _ in new]

    def work(self, start: Seconds, end: Seconds) -> float:
        """Work from `start` to `end`, in samples."""
        before, after = np.interp((start, end), self._times, self._totals)
        return float(after - before)

    def spans(self, start: Seconds, end: Seconds) -> list[Span]:
        """Stored spans of training from `start` to `end`."""
        overlaps = ((max(start, s), min(end, e)) for s, e, _ in self._pieces)
        return [span for span in overlaps if span[0] < span[1]]

    def last(self) -> Span | None:
        """The most recent piece of training."""
        return self._pieces[-1][:2] if self._pieces else None
