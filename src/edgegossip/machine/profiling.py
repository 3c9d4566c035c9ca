"""Profiling: training on this machine, alone and under loads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice

from torch import Tensor

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.trainer import Trainer
from edgegossip.machine.contention import Contention
from edgegossip.machine.loads import KINDS, SIZES, Load
from edgegossip.machine.monitor import Monitor
from edgegossip.machine.profile import Profile

_TURN: Seconds = 0.1
"""Approximate length of training between two readings of the clock."""
_ROW: Seconds = 1.0
"""Seconds over which a row is averaged: the interval between two readings of a monitor."""
_SETTLING: Seconds = 1.0
"""Seconds after the start or end of a load during which nothing is measured."""
ROWS_PER_LOAD = 8
"""Default number of rows per load."""
_LOAD: Seconds = _SETTLING + ROWS_PER_LOAD * _ROW + 0.5
"""Total seconds per load; the half second is for starting its processes."""
_MAX_SIZE = 100_000_000
"""Largest file of a load, in bytes; larger files only take longer to write."""
_MOST = 1.25
"""Maximum processor time that loads request, relative to the cores."""
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements from one second of training.

    Attributes:
        load: Load during the second; None without a load.
        contention: Contention measured by the monitor.
        seconds: Seconds per training sample.
    """

    load: Load | None
    contention: Contention
    seconds: Seconds


class TimedTraining:
    """Trains for a given time.

    Args:
        trainer: Trainer of a worker with data.
        params: Initial parameters, [num_params].
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        trainer: Trainer,
        params: Tensor,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._params = params
        self._clock = clock
        self._num_steps = 1

    def run(self, seconds: Seconds) -> tuple[Seconds, Seconds, float]:
        """Train for `seconds` or a little longer; return the start, the end and the cost."""
        start = now = self._clock()
        cost = 0.0
        while now < start + seconds:
            request, began = self._trainer.trial(self._params, self._num_steps), now
            if request is None:
                raise TrainingError(
                    "this worker trains on what others send, so it cannot be timed by itself; "
                    "profile one that has data"
                )
            cost += self._trainer.cost(request)
            self._params = self._trainer.train(request).params
            now = self._clock()
            if now - began < _TURN / 2:
                self._num_steps *= 2
        return start, now, cost


def measure(
    training: TimedTraining,
    monitor: Monitor,
    loads: Sequence[Load | None],
    rows_per_load: int = ROWS_PER_LOAD,
    run: Callable[[Load], AbstractContextManager[None]] = Load.running,
) -> Iterator[Row]:
    """Train under one load after another, and measure each second.

    Args:
        training: Training to measure.
        monitor: Measures how much the loads use.
        loads: Loads; None stands for training alone.
        rows_per_load: Measured seconds per load.
        run: Runs a load during a context.
    """
    training.run(_SETTLING)  # the first steps of a process are slow
    for load in loads:
        with nullcontext() if load is None else run(load):
            training.run(_SETTLING)
            for _ in range(rows_per_load):
                monitor.read()
                start, end, cost = training.run(_ROW)
                monitor.read()
                yield Row(load, monitor.contention(start, end), (end - start) / cost)


def choose_loads(seconds: Seconds, num_cores: int) -> list[Load | None]:
    """The loads of a profile of `seconds`; every fourth, including the first, is empty.

    They cover the range from no load to a quarter more than the number of cores.

    >>> [load and load.num_processes for load in choose_loads(60, num_cores=2)]
    [None, 2, 1, 3, None, 1]
    """
    num_loads = max(2, int(seconds / _LOAD))
    sizes = cycle(size for size in SIZES if size <= _MAX_SIZE)
    loads: list[Load | None] = []
    for number, size in enumerate(islice(sizes, num_loads)):
        # Multiples of the golden ratio cover an interval evenly, however many they are.
        demand = number * _GOLDEN % 1 * _MOST * num_cores
        num_processes = max(1, math.ceil(demand))
        load = Load(
            kind=KINDS[number % len(KINDS)],
            num_bytes=size,
            num_processes=num_processes,
            share=max(0.05, demand / num_processes),
        )
        loads.append(load if number % 4 else None)
    return loads


def profile_of(rows: Sequence[Row]) -> Profile:
    """Make a predictor's profile from these rows.

    Raises:
        ValueError: If there are fewer than 10 rows.
    """
    return Profile(tuple(row.contention for row in rows), tuple(row.seconds for row in rows))
