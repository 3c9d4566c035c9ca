"""A monitor of this machine, which forecasts its training speed."""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, Self

import numpy as np
import psutil

from edgegossip.contract.protocol import Predicted, Seconds, Span
from edgegossip.machine.contention import Contention
from edgegossip.machine.counters import Counters, Reading, SystemCounters
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.machine.telemetry import Journal, Sample
from edgegossip.machine.watch import MEMORY, SHORTEST, Watch

_HALF_LIFE: Seconds = 10.0
"""Half-life of our use that the machine has not counted yet."""
_INTERVAL: Seconds = 1.0
"""Seconds between two readings of the counters."""
_OVERDUE: Seconds = 0.25
"""Training that ends this many seconds after the last reading causes another reading."""
_STALE: Seconds = 10.0
"""Length of a pause after which the load of the last training is stale."""
_SAMPLE: Seconds = 60.0
"""Time over which a telemetry sample is averaged."""
_PIECE: Seconds = 0.25
"""Minimum length of a recorded piece of training; shorter steps are combined."""
_PAUSE: Seconds = 0.02
"""Pauses between two steps count as training if they are shorter than this."""
_MAX_PIECES = 256
_log = logging.getLogger("edgegossip.machine")


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


class LoadHistory:
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


class _Piece(NamedTuple):
    """A piece of training."""

    start: Seconds
    end: Seconds
    cost: float
    shares: Sequence[float]

    @property
    def span(self) -> Span:
        return self.start, self.end


class TrainingHistory:
    """Spans of training, and work over time, in samples.

    Work is reported at the end of a stretch of training. During a long stretch with changing
    loads, more work was done at times of low load. Work is therefore spread over time with a
    constant :math:`t_0` that fits the duration of the stretch.
    """

    def __init__(self) -> None:
        self._pieces: deque[_Piece] = deque(maxlen=_MAX_PIECES)
        self._num_new = 0
        self._times = [0.0]
        self._totals = [0.0]

    def add(
        self, start: Seconds, end: Seconds, cost: float, shares: Sequence[float] = (1,)
    ) -> None:
        """Record training from `start` to `end` that did work of `cost` samples.

        Args:
            start: Start of the training.
            end: Its end.
            cost: Its work, in samples.
            shares: Samples of each executor; only their ratios matter.
        """
        if self._num_new:
            last = self._pieces[-1]
            if last.end - last.start < _PIECE and 0 <= start - last.end < _PAUSE:
                both = [a + b for a, b in zip(last.shares, shares, strict=True)]
                self._pieces[-1] = _Piece(last.start, end, last.cost + cost, both)
                return
        self._pieces.append(_Piece(start, end, cost, shares))
        self._num_new = min(self._num_new + 1, _MAX_PIECES)

    def take(
        self, history: LoadHistory, slow_down: Callable[[Contention], float]
    ) -> list[Span]:
        """Return the spans of training since the last call; from now on `work` covers these
        times.

        `work` still covers earlier times, too: the last 256 ends of pieces or readings.
        """
        # Some of the spans taken before may not have been asked for.
        del self._times[:-_MAX_PIECES], self._totals[:-_MAX_PIECES]
        new = list(self._pieces)[len(self._pieces) - self._num_new :]
        for start, end, cost, _ in new:
            bounds = [start, *history.readings(start, end), end]
            weights = [
                (span[1] - span[0]) / slow_down(history.mean_contention(span))
                for span in pairwise(bounds)
            ]
            shares = np.cumsum([0.0, *weights]) / sum(weights)
            self._times += bounds
            self._totals += list(self._totals[-1] + cost * shares)
        self._num_new = 0
        return [each.span for each in new]

    def work(self, start: Seconds, end: Seconds) -> float:
        """Work from `start` to `end`, in samples."""
        before, after = np.interp((start, end), self._times, self._totals)
        return float(after - before)

    def spans(self, start: Seconds, end: Seconds) -> list[Span]:
        """Stored spans of training from `start` to `end`."""
        overlaps = ((max(start, p.start), min(end, p.end)) for p in self._pieces)
        return [span for span in overlaps if span[0] < span[1]]

    def parts(self, spans: Sequence[Span]) -> dict[int, float]:
        """All work within `spans` divided by that of each executor that has worked."""
        sums: list[float] = []
        for piece in self._pieces:
            seconds = sum(
                max(0.0, min(end, piece.end) - max(start, piece.start)) for start, end in spans
            )
            if seconds:
                rates = [seconds / (piece.end - piece.start) * x for x in piece.shares]
                sums = [a + b for a, b in zip(sums or [0.0] * len(rates), rates, strict=True)]
        return {index: sum(sums) / each for index, each in enumerate(sums) if each}

    def last(self) -> Span | None:
        """The most recent piece of training."""
        return self._pieces[-1].span if self._pieces else None


class Executors(Protocol):
    """The executors that train one worker's batches together, as a monitor sees them."""

    @property
    def members(self) -> Sequence[int]:
        """Indices of those that are alive."""

    @property
    def num_samples(self) -> Sequence[float]:
        """Number of samples that each has trained on so far, by index."""


class _MachineWatch(Watch):
    """Watches this machine, whose executors do unequal shares of the work."""

    __slots__ = ("_progress",)

    def __init__(
        self,
        machine: _ThisMachine,
        history: LoadHistory,
        progress: TrainingHistory,
        predictor: PerformancePredictor,
    ) -> None:
        start = history.times[0]
        super().__init__(machine, history.readings, lambda: predictor, start)
        self._progress = progress

    def _parts(self, stretch: list[Span]) -> Mapping[int, float]:
        return self._progress.parts(stretch)


class Monitor:
    """Watches this machine and forecasts its throughput.

    A separate thread reads the counters once a second: the use of cores, network and disk by
    everything except our own process tree. Each forecast also reads the counters. Once a minute
    the means go to `journal`. Reading and storing never raise.

    If the caller has a `ZenohTransport`, `counters` subtracts its traffic::

        from edgegossip.machine.counters import SystemCounters

        predictor = eg.PerformancePredictor().fit(eg.Profile.read("profile.csv"))
        counters = SystemCounters(lambda: transport.network_bytes)
        with eg.Monitor(predictor, counters=counters) as monitor:
            ...  # monitor.trained(start, end, num_samples), monitor.forecast(now)

    Args:
        predictor: Learns from observations and makes the forecasts.
        counters: Counters to read; None for this machine's.
        journal: Stores the means; with None they are not stored.
        executors: The executors that train together, as many as those of `predictor`; None for
            one.
        clock: Monotonic clock in seconds, also for the times of `trained` and `forecast`.
        wall_clock: Seconds since 1970, for telemetry.
    """

    def __init__(
        self,
        predictor: PerformancePredictor,
        *,
        counters: Counters | None = None,
        journal: Journal | None = None,
        executors: Executors | None = None,
        clock: Callable[[], Seconds] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._predictor = predictor
        self._journal = journal
        self._clock = clock
        self._wall_clock = wall_clock
        self._history = LoadHistory(counters or SystemCounters(), clock)
        self._progress = TrainingHistory()
        start = self._history.times[0]
        self._executors = executors
        self._counted = [0.0] if executors is None else [*executors.num_samples]
        machine = _ThisMachine(self._history, self._progress, len(self._counted))
        self._watch = _MachineWatch(machine, self._history, self._progress, predictor)
        self._sample_start = start
        self._cost = 0.0
        self._is_failing = False
        self._lock = threading.Lock()
        self._has_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    # Called by the code that trains.

    def trained(self, start: Seconds, end: Seconds, cost: float) -> None:
        """Record training from `start` to `end` that did work of `cost` samples.

        Call this often, because slow periods within a long stretch cannot be found. A stretch
        without duration or work is ignored.
        """
        if end > start and cost > 0:
            with self._lock:
                self._progress.add(start, end, cost, self._shares())
                self._cost += cost
                if end - self._history.times[-1] >= _OVERDUE:
                    # While this pause lasts, others may use what training leaves, and that
                    # must not count as their use during training.
                    self._read()

    def _shares(self) -> Sequence[float]:
        """Samples of each executor since the last call."""
        if self._executors is None:
            return (1,)
        before, self._counted = self._counted, [*self._executors.num_samples]
        return [after - earlier for after, earlier in zip(self._counted, before, strict=True)]

    def forecast(self, now: Seconds) -> Predicted:
        """Forecast the throughput of work that begins at `now`.

        Raises:
            ValueError: If the predictor has no data yet: neither a profile nor `seconds_alone`
                nor training.
        """
        with self._lock:
            if now - self._history.times[-1] >= SHORTEST:
                self._read()
            for span in self._progress.take(self._history, self._predictor.slow_down):
                self._watch.trained(*span)
            if self._executors is not None:
                for lost in {*range(len(self._counted))} - {*self._executors.members}:
                    self._predictor.lose(lost)
            return self._watch.forecast(now)

    def contention(self, start: Seconds, end: Seconds) -> Contention:
        """Mean use by other processes from `start` to `end`, within the last two minutes."""
        with self._lock:
            return self._history.mean_contention((start, end))

    # Reading.

    def read(self) -> None:
        """Read the counters, and store the means once a minute; called by the thread."""
        with self._lock:
            self._read()
        now = self._history.times[-1]
        if now - self._sample_start >= _SAMPLE:
            self._store(now)

    def _read(self) -> None:
        try:
            self._history.read()
            self._is_failing = False
        except (psutil.Error, OSError, LookupError, NotImplementedError) as error:
            if not self._is_failing:
                _log.warning("cannot read this machine's load: %s", error)
            self._is_failing = True

    def _store(self, now: Seconds) -> None:
        with self._lock:
            seconds = now - self._sample_start
            means = self._history.mean_contention((self._sample_start, now))
            throughput, self._cost = self._cost / seconds, 0.0
            self._sample_start = now
        if self._journal is not None:
            self._journal.append(
                Sample(
                    at=self._wall_clock(),
                    seconds=seconds,
                    cores=means.cores,
                    network=means.network,
                    disk=means.disk,
                    throughput=throughput,
                )
            )

    # The thread.

    def start(self) -> Self:
        """Start reading once a second."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop, and store the means since the last sample; no effect if repeated."""
        if self._has_closed.is_set():
            return
        self._has_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self.read()
        if (now := self._history.times[-1]) > self._sample_start:
            self._store(now)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        due = self._clock()
        while True:
            due = max(due + _INTERVAL, self._clock())
            if self._has_closed.wait(max(0.0, due - self._clock())):
                return
            self.read()


class _ThisMachine:
    """The machine with the executors of one worker."""

    def __init__(self, history: LoadHistory, progress: TrainingHistory, executors: int) -> None:
        self.executors = executors
        self._history = history
        self._progress = progress
        self.work = progress.work

    def mean_contention(self, start: Seconds, end: Seconds) -> Contention:
        """Use by other processes while training ran.

        While training pauses, for instance to wait for neighbors, other processes also use the
        capacity that training leaves. An increase is therefore ignored in the first 10 s of a
        pause.
        """
        if spans := self._progress.spans(start, end):
            return self._history.mean_contention(*spans)
        found = self._history.mean_contention((start, end))
        last = self._progress.last()
        if last is None or end - last[1] > _STALE:
            return found
        before = self._history.mean_contention((max(last[0], last[1] - _INTERVAL), last[1]))
        return min(found, before, key=lambda contention: contention.cores)
