"""How long a cell would take on this machine, from a few real steps of its own experiment."""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from benchmarks.full_size.cells import Cell, Machine, Rows

from edgegossip.contract.observer import Observer
from edgegossip.contract.protocol import Rank, Seconds, Steps, Train, Trained
from edgegossip.contract.snapshot import dismantle
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.machine.quota import num_cores
from edgegossip.runs.batching import batched
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.process import one_intra_op_thread
from edgegossip.runs.runner import check_interval
from edgegossip.sim.machines import profiled
from edgegossip.sim.pool import ComputePool, Pending
from edgegossip.sim.simulator import Simulator
from edgegossip.training.stacked.learner import StackedLearner
from edgegossip.training.task import Workload

FEW_PICTURES = 200
"""Test samples of a measured evaluation."""
NUM_ROUNDS = 4
"""Fewest rounds in a trial; the first half is not timed."""
TIMED_SECONDS = 3.0
"""Shortest time of the timed rounds."""
TRIAL_SECONDS = 30.0
"""A trial whose rounds would take longer than this, on a slow machine, takes steps instead."""
LARGE = 100_000_000
"""Parameters above which a trial trains one model alone."""
BYTES_PER_SECOND = 20e6
"""Speed at which a state is packed and written, on a slow machine."""
PACKED_SHARE = 0.87
"""Size of a packed state, as a share of the bytes of its different tensors: 0.83 to 0.86 for
ResNet-20."""


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
    """Times rounds of training, and stops the simulator after some.

    The first rounds, in which PyTorch loads kernels and captures graphs, do not count.
    """

    def __init__(self, num_workers: int, num_rounds: int) -> None:
        self.simulator: Simulator[Any] | None = None
        self._num_workers = num_workers
        self._num_rounds = num_rounds
        self._num_trained = self._num_samples = 0
        self._rounds: list[tuple[float, int]] = []  # clock and samples so far

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        if not event.num_samples:  # a stage other than the first
            return
        self._num_trained += 1
        self._num_samples += event.num_samples
        # Workers with a barrier end at the same virtual time, so only whole rounds are timed.
        if self._num_trained % self._num_workers:
            return
        self._rounds.append((time.monotonic(), self._num_samples))
        timed = self._timed()[0] if len(self._rounds) > 1 else 0.0
        if len(self._rounds) >= self._num_rounds and timed >= TIMED_SECONDS:
            assert self.simulator is not None
            self.simulator.should_stop = True

    def _timed(self) -> tuple[float, int]:
        """Seconds and samples of the second half of the rounds."""
        (began, before), (ended, after) = (
            self._rounds[len(self._rounds) // 2 - 1],
            self._rounds[-1],
        )
        return ended - began, after - before

    @property
    def seconds_per_sample(self) -> float:
        seconds, samples = self._timed()
        return seconds / max(1, samples)


class _TooSlow(Exception):  # noqa: N818 - nothing went wrong
    """A round takes longer than a trial may."""


class _Pool(ComputePool):
    """Refuses rounds that take longer than a trial may."""

    def __init__(self, num_workers: int, seconds_per_sample: float) -> None:
        super().__init__()
        self._seconds = seconds_per_sample * num_workers * NUM_ROUNDS

    def train(
        self, trainer: Trainer, request: Train, progress: float
    ) -> Pending[TrainingResult]:
        if self._seconds * trainer.cost(request) > TRIAL_SECONDS:
            raise _TooSlow
        return super().train(trainer, request, progress)


def forecast(cell: Cell, machine: Machine, rows: Rows) -> Forecast:
    """Take a few real steps of a cell, and extrapolate."""
    if cell.measuring_seconds is not None:
        seconds = cell.measuring_seconds(machine)
        return Forecast(training=seconds, device=device_name(machine.torch_device))
    assert cell.experiment is not None
    experiment = batched(cell.experiment(machine, rows), "auto")
    found = of_experiment(experiment, cell.num_epochs, device_name(machine.torch_device))
    gc.collect()  # the trial's simulator and its observer, with gigabytes of states
    return found


def of_experiment(experiment: Experiment, num_epochs: float, device: str) -> Forecast:
    """Forecast of a run of `num_epochs`, or of its `max_seconds`."""
    test = experiment.task.dataset.test
    experiment = _briefly_tested(experiment)
    workload = experiment.workload()
    with one_intra_op_thread():
        # Stages cannot train alone; they train one batch at a time, which is fast enough.
        is_whole = not isinstance(experiment.task.model, Mapping)
        speed, num_bytes = _steps(experiment, workload) if is_whole else (0.0, 0)
        with suppress(_TooSlow):
            speed, num_bytes = _rounds(experiment, workload, speed)
        mean, _ = workload.average(
            {rank: workload.initial_params(rank) for rank in range(experiment.num_workers)}
        )
        began = time.monotonic()
        workload.evaluate(mean)
    evaluation = time.monotonic() - began
    evaluation *= len(test) / len(experiment.task.dataset.test)
    # The end, and each stop, measure the workers' own models, at most 64 of them.
    at_the_end = min(64, experiment.num_workers) * evaluation
    looks = _num_evaluations(experiment, workload, num_epochs)
    return Forecast(
        training=speed * _num_samples(experiment, workload, num_epochs),
        evaluations=looks * evaluation + at_the_end,
        stopping=num_bytes / BYTES_PER_SECOND + at_the_end,
        state_bytes=round(num_bytes * PACKED_SHARE),
        device=device,
    )


def _steps(experiment: Experiment, workload: Workload) -> tuple[float, int]:
    """Seconds per sample of learners alone, and bytes of the state of all workers."""
    with ComputePool() as pool:
        is_stacked = experiment.task.trainer is StackedLearner
        at_once = min(experiment.num_workers, 64 if is_stacked else pool.num_threads)
        # A language model's activations have gigabytes.
        number = 1 if workload.num_params(0) > LARGE else at_once
        trainers = [workload.make_trainer(rank) for rank in range(number)]
        for attempt, num_steps in enumerate((1, 1, 3, 10, 30)):
            began = time.monotonic()
            request = Train(workload.initial_params(), Steps(num_steps))
            results = [pool.train(each, request, 0.0) for each in trainers]
            num_samples = sum(each.result().num_samples for each in results)
            seconds = time.monotonic() - began
            # The first step also aggregates points and loads kernels.
            if seconds > (TIMED_SECONDS if attempt else TRIAL_SECONDS):
                break
    # With the parameters before and after the training under way.
    state = _num_bytes(trainers[0].state_dict()) + 2 * workload.initial_params().nbytes
    is_parallel = torch.device(experiment.task.torch_device).type == "cpu"
    speed = seconds / num_samples * (number / at_once if is_parallel else 1.0)
    return speed, state * experiment.num_workers


def _rounds(experiment: Experiment, workload: Workload, speed: float) -> tuple[float, int]:
    """Seconds per sample of whole rounds, with exchanges, and bytes of the state."""
    num_workers = experiment.num_workers
    # Batches of a model in stages count at the first stage, and fill the others at first.
    is_staged = isinstance(experiment.task.model, Mapping)
    trial = _Trial(*((1, 12) if is_staged else (num_workers, NUM_ROUNDS)))
    with _Pool(num_workers, speed) as pool:
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
        return trial.seconds_per_sample, _num_bytes(simulator.state_dict())


def _num_bytes(tree: object) -> int:
    """Bytes of the different tensors of a state."""
    _, tensors = dismantle(tree)
    different = {
        (each.shape, each.dtype, _digest(each)): each.nbytes for each in tensors.values()
    }
    return sum(different.values())


def _digest(tensor: torch.Tensor) -> bytes:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(content.tobytes(), digest_size=16).digest()


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
