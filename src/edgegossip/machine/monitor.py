"""A monitor of this machine, which forecasts its training speed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import psutil

from edgegossip.contract.protocol import Predicted, Seconds
from edgegossip.machine.contention import Contention
from edgegossip.machine.counters import Counters, SystemCounters
from edgegossip.machine.history import History
from edgegossip.machine.pace import WorkHistory
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.machine.telemetry import Journal, Sample
from edgegossip.machine.watch import SHORTEST, Watch

_INTERVAL: Seconds = 1.0
"""Seconds between two readings of the counters."""
_PIECE: Seconds = 0.25
"""Training that ends this many seconds after the last reading causes another reading."""
_PAUSE: Seconds = 10.0
"""Length of a pause after which the load of the last training is stale."""
_SAMPLE: Seconds = 60.0
"""Time over which a telemetry sample is averaged."""

_log = logging.getLogger("edgegossip.machine")


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
        clock: Monotonic clock in seconds, also for the times of `trained` and `forecast`.
        wall_clock: Seconds since 1970, for telemetry.
    """

    def __init__(
        self,
        predictor: PerformancePredictor,
        *,
        counters: Counters | None = None,
        journal: Journal | None = None,
        clock: Callable[[], Seconds] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._predictor = predictor
        self._journal = journal
        self._clock = clock
        self._wall_clock = wall_clock
        self._history = History(counters or SystemCounters(), clock)
        self._progress = WorkHistory()
        start = self._history.times[0]
        machine = _ThisMachine(self._history, self._progress)
        self._watch = Watch(machine, self._history.readings, lambda: predictor, start)
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
                self._progress.add(start, end, cost)
                self._cost += cost
                if end - self._history.times[-1] >= _PIECE:
                    self._read()  # what others use next is not what they used meanwhile

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        due = self._clock()
        while True:
            due = max(due + _INTERVAL, self._clock())
            if self._has_closed.wait(max(0.0, due - self._clock())):
                return
            self.read()


class _ThisMachine:
    """The machine as a single executor, because a process trains one model."""

    executors = 1

    def __init__(self, history: History, progress: WorkHistory) -> None:
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
        if last is None or end - last[1] > _PAUSE:
            return found
        before = self._history.mean_contention((max(last[0], last[1] - _INTERVAL), last[1]))
        return min(found, before, key=lambda contention: contention.cores)
