"""(a): steps per second of a model alone, of many learners together, and of one large batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.full_size.cells import Cell, Machine, Row
from benchmarks.gpu import NUM_SAMPLES, NUM_UNTIMED, Loop, by_hand, graph, learner
from benchmarks.simulator import pictures
from torch import nn

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.protocol import Steps, Train
from edgegossip.contract.topology import complete
from edgegossip.models import (
    alexnet,
    lenet5,
    mobilenet_v2,
    resnet20,
    squeezenet,
    vgg11,
    vgg16,
)
from edgegossip.runs.batching import batched
from edgegossip.runs.describe import describe
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.process import one_intra_op_thread
from edgegossip.sim.platform import Platform
from edgegossip.sim.pool import ComputePool
from edgegossip.training.optimizer import SGD
from edgegossip.training.step import TrainingStep
from edgegossip.training.task import Task

CIFAR10 = (3, 32, 32)
NUM_REPEATS = 3
FEW_STEPS = 5
"""Untimed steps of learners together."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A model, and how many learners of it train together.

    Args:
        name: Name of the model.
        make: Makes the model from the shape of a sample and the number of classes.
        shape: Shape of a sample.
        num_workers: Number of learners together.
        batch_size: Samples in a batch of each.
        num_steps: Steps of each measurement.
    """

    name: str
    make: Callable[[tuple[int, ...], int], nn.Module]
    shape: tuple[int, ...] = CIFAR10
    num_workers: int
    batch_size: int
    num_steps: int = 100

    def cell(self) -> Cell:
        return Cell(
            name=f"a-{self.name}-{self.num_workers}-workers",
            settings={**describe(self), "repeats": NUM_REPEATS},
            measure=self.measure,
            measuring_seconds=self.measuring_seconds,
        )

    def measuring_seconds(self, machine: Machine) -> float:
        """Forecast of `measure`, from a few steps of learners together."""
        num_workers = min(self.num_workers, 4)
        few = self._experiment(machine, num_workers)
        seconds_per_sample = 1 / (_together(few, 2, untimed=1) * self.batch_size)
        batches = 2 * (self.num_steps + NUM_UNTIMED)  # the plain loop and the learner
        batches += self.num_workers * (2 * self.num_steps + NUM_UNTIMED + FEW_STEPS)
        return NUM_REPEATS * batches * self.batch_size * seconds_per_sample

    def measure(self, machine: Machine) -> Row:
        """Steps per second: medians of alternating measurements, and their ratios.

        On a GPU, the loops by hand and the learners repeat each step as a CUDA graph.
        """
        model, dataset = self.make(self.shape, 10), pictures(NUM_SAMPLES, self.shape)
        total = self.batch_size * self.num_workers
        device = torch.device(machine.torch_device)
        write_loop = graph if device.type == "cuda" else by_hand
        experiment = self._experiment(machine, self.num_workers)
        loops: dict[str, Loop] = {
            "plain_loop": write_loop(model, dataset, device, batch_size=self.batch_size),
            "learner": learner(
                model, dataset, device, step=_step(device), batch_size=self.batch_size
            ),
            "one_model_of_total_batch": write_loop(model, dataset, device, batch_size=total),
        }
        kinds: dict[str, Callable[[], float]] = {
            **{name: partial(self._speed, loop) for name, loop in loops.items()},
            "together": partial(_together, experiment, self.num_steps),
        }
        rows = [{name: kind() for name, kind in kinds.items()} for _ in range(NUM_REPEATS)]
        return {
            "trainer": describe(experiment.task.trainer),
            "wall_steps_per_second": {
                name: statistics.median(row[name] for row in rows) for name in kinds
            },
            "wall_learner_over_plain_loop": _ratio(rows, "learner", "plain_loop"),
            # Of all workers together, over one learner's.
            "wall_together_over_learner": _ratio(rows, "together", "learner"),
            # In samples.
            "wall_together_over_one_model": _ratio(
                rows, "together", "one_model_of_total_batch", 1 / self.num_workers
            ),
        }

    def _speed(self, loop: Loop) -> float:
        """Steps per second of one model."""
        loop(NUM_UNTIMED)
        start = time.perf_counter()
        loop(self.num_steps)
        return self.num_steps / (time.perf_counter() - start)

    def _experiment(self, machine: Machine, num_workers: int) -> Experiment:
        task = Task(
            dataset=pictures(NUM_SAMPLES, self.shape),
            model=partial(self.make, self.shape, 10),
            optimizer=SGD(lr=0.01, momentum=0.9),
            batch_size=self.batch_size,
            torch_device=machine.torch_device,
            step=_step(torch.device(machine.torch_device)),
        )
        experiment = Experiment(
            task=task,
            algorithm=EpochGossip(topology=complete(num_workers), num_rounds=1),
            platforms=(Platform(throughput=1.0),) * num_workers,
        )
        return batched(experiment, "auto")


def _step(torch_device: torch.device) -> TrainingStep:
    return TrainingStep(cuda_graph=torch_device.type == "cuda")


def _together(experiment: Experiment, num_steps: int, untimed: int = FEW_STEPS) -> float:
    """Steps per second of all workers, without exchanges."""
    workload = experiment.workload()
    trainers = [workload.make_trainer(rank) for rank in range(experiment.num_workers)]
    with one_intra_op_thread(), ComputePool() as pool:

        def train(number: int) -> None:
            request = Train(workload.initial_params(), Steps(number))
            for pending in [pool.train(each, request, 0.0) for each in trainers]:
                pending.result()

        train(untimed)
        start = time.perf_counter()
        train(num_steps)
        return experiment.num_workers * num_steps / (time.perf_counter() - start)


def _ratio(rows: list[dict[str, float]], above: str, below: str, factor: float = 1.0) -> Any:  # noqa: ANN401
    ratios = sorted(factor * row[above] / row[below] for row in rows)
    return {"median": statistics.median(ratios), "all": ratios}


SPEEDS = (
    Speed(name="lenet5", make=lenet5, shape=(1, 28, 28), num_workers=64, batch_size=64),
    Speed(name="resnet20", make=resnet20, num_workers=8, batch_size=32),
    Speed(name="vgg11", make=vgg11, num_workers=8, batch_size=16),
    Speed(name="vgg16", make=vgg16, num_workers=4, batch_size=64),
    Speed(name="alexnet", make=alexnet, num_workers=4, batch_size=64),
    Speed(name="mobilenet-v2", make=mobilenet_v2, num_workers=4, batch_size=64),
    Speed(name="squeezenet", make=squeezenet, num_workers=4, batch_size=64),
)


def cells() -> Iterator[Cell]:
    """One cell for each model."""
    for each in SPEEDS:
        yield each.cell()
