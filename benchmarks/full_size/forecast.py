"""How long a cell would take on this machine, from a few real steps of its own experiment."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from benchmarks.full_size.cells import Cell, Machine, Rows
from benchmarks.full_size.state import packed

from edgegossip.contract.observer import Observer
from edgegossip.contract.protocol import Rank, Seconds, Trained
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.machine.quota import num_cores
from edgegossip.runs.experiment import Experiment, batched
from edgegossip.runs.process import one_intra_op_thread
from edgegossip.runs.runner import check_interval
from edgegossip.sim.machines import profiled
from edgegossip.sim.pool import ComputePool
from edgegossip.sim.simulator import Simulator
from edgegossip.training.task import Workload

FEW_PICTURES = 200
"""Test samples of a measured evaluation."""
NUM_ROUNDS = 3
"""Fewest blocks of training of each worker in a trial; the first one is not timed."""
TIMED_SECONDS = 3.0
"""Shortest time of the timed blocks."""
TRIAL_SECONDS = 30.0
"""A trial that has taken longer than this stops after its first timed block."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of a whole cell on one machine.

    Attributes:
        training: Wall seconds of training and exchanges.
        evaluations: Wall seconds of all evaluations.
        stopping: Wall seconds to stop the run in the middle.
        state_bytes: Size of the packed state in the middle of the run; None if the cell cannot
            be stopped.
        device: The machine's processor or GPU.
    """

    training: float
    evaluations: float = 0.0
    stopping: float = 0.0
    state_bytes: int | None = None
    device: str

    @property
    def seconds(self) -> float:
        """Wall seconds of the cell."""
        return self.training + self.evaluations

    def described(self) -> str:
        """The forecast in words."""
        words = f"about {in_words(self.seconds)} on {self.device}"
        if self.state_bytes is None:
            return words
        return f"{words}, state {self.state_bytes / 2**20:.1f} MiB"

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class _Trial(Observer):
    """Counts training, and stops the simulator after some."""

    def __init__(self, num_workers: int, num_rounds: int) -> None:
        self.simulator: Simulator[Any] | None = None
        self.timed_samples = 0
        self.timed_seconds = 0.0
        self._num_first = num_workers
        self._num_last = num_workers * num_rounds
        self._num_trained = 0
        self._began = time.monotonic()
        self._timed_from: float | None = None

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self._num_trained += 1
        clock = time.monotonic()
        if self._timed_from is not None:
            self.timed_samples += event.num_samples
            self.timed_seconds = clock - self._timed_from
        elif self._num_trained >= self._num_first:
            self._timed_from = clock
        is_enough = self._num_trained >= self._num_last and self.timed_seconds >= TIMED_SECONDS
        is_long = clock - self._began > TRIAL_SECONDS and self.timed_samples > 0
        if is_enough or is_long:
            assert self.simulator is not None
            self.simulator.should_stop = True


def forecast(cell: Cell, machine: Machine, rows: Rows) -> Forecast:
    """Take a few real steps of a cell, and extrapolate."""
    if cell.measuring_seconds is not None:
        seconds = cell.measuring_seconds(machine)
        return Forecast(training=seconds, device=device_name(machine.torch_device))
    assert cell.experiment is not None
    experiment = batched(cell.experiment(machine, rows), "auto")
    return of_experiment(experiment, cell.num_epochs, device_name(machine.torch_device))


def of_experiment(experiment: Experiment, num_epochs: float, device: str) -> Forecast:
    """Forecast of a run of `num_epochs`, or of its `max_seconds`."""
    test = experiment.task.dataset.test
    experiment = _briefly_tested(experiment)
    workload = experiment.workload()
    trial = _Trial(experiment.num_workers, NUM_ROUNDS)
    with one_intra_op_thread(), ComputePool() as pool:
        simulator = trial.simulator = Simulator(
            experiment.algorithm,
            experiment.platforms,
            workload.initial_params,
            workload.make_trainer,
            links=experiment.links,
            faults=experiment.faults,
            pool=pool,
            observer=trial,
            evaluators=workload.validator,
            make_predictor=profiled(experiment.platforms, experiment.profiles),
            max_seconds=experiment.max_seconds or math.inf,
        )
        simulator.run()
        began = time.monotonic()
        state_bytes = len(packed(simulator.state_dict()))
        stopping = time.monotonic() - began
        estimates = simulator.estimates()
        mean, _ = workload.average(estimates)
        began = time.monotonic()
        workload.evaluate(mean)
        evaluation = time.monotonic() - began
        evaluation *= len(test) / len(experiment.task.dataset.test)
    total = _num_samples(experiment, workload, num_epochs)
    # The end, and each stop, measure the workers' own models, at most 64 of them.
    at_the_end = min(64, len(estimates)) * evaluation
    looks = _num_evaluations(experiment, workload, num_epochs)
    speed = trial.timed_seconds / max(1, trial.timed_samples)
    return Forecast(
        training=speed * total,
        evaluations=looks * evaluation + at_the_end,
        stopping=stopping + at_the_end,
        state_bytes=state_bytes,
        device=device,
    )


def _briefly_tested(experiment: Experiment) -> Experiment:
    dataset: Dataset = experiment.task.dataset
    number = min(FEW_PICTURES, len(dataset.test))
    few = ArraySplit(*_tuple(dataset.test.batch(torch.arange(number))))
    task = replace(experiment.task, dataset=replace(dataset, test=few))
    return replace(experiment, task=task)


def _tuple(batch: Any) -> tuple[Any, ...]:  # noqa: ANN401
    return batch if isinstance(batch, tuple) else (batch,)


def _num_samples(experiment: Experiment, workload: Workload, num_epochs: float) -> float:
    by_epochs = num_epochs * workload.num_train
    if experiment.max_seconds is None:
        return by_epochs
    speed = sum(platform.total_throughput for platform in experiment.platforms)
    return min(by_epochs, speed * experiment.max_seconds)


def _num_evaluations(experiment: Experiment, workload: Workload, num_epochs: float) -> float:
    if experiment.evaluation_epochs is not None:
        share = _num_samples(experiment, workload, num_epochs) / workload.num_train
        return 2 + share / experiment.evaluation_epochs
    if experiment.max_seconds is None:
        return 2 + 4 * num_epochs
    return 2 + experiment.max_seconds / check_interval(experiment, workload)


def device_name(torch_device: str) -> str:
    """The GPU's name, or the number of cores."""
    if torch.device(torch_device).type == "cuda":
        return torch.cuda.get_device_name(torch_device)
    return f"{torch_device}, {num_cores()} cores"


def best_device() -> str:
    """`cuda` if there is such a device, and `cpu` otherwise."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def in_words(seconds: float) -> str:
    """Seconds in words.

    >>> in_words(90), in_words(3), in_words(8000)
    ('1.5 min', '3 s', '2.2 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
