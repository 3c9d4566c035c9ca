"""The four baselines on the same machines, for the same virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from edgegossip.algorithms.all_reduce import AllReduce
from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.algorithms.gosgd import GoSGD
from edgegossip.algorithms.gossip import Gossip
from edgegossip.core.protocol import Algorithm, Payload, Seconds, TrainingResult, Work
from edgegossip.core.topology import complete, ring
from edgegossip.experiments.experiment import Comparison, Experiment, algorithm_name
from edgegossip.experiments.recipes.settings import Settings
from edgegossip.learning.dataset import Dataset
from edgegossip.learning.learner import Augmentation
from edgegossip.learning.optimizer import SGD
from edgegossip.learning.partition import IID, Partition
from edgegossip.learning.task import Task, Workload
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator

UNTIL_CUT_OFF = 10**9
"""Rounds of an algorithm that goes on until the time limit."""

HOME_LINK = Link(latency=0.005, bandwidth=12.5e6)
"""100 Mbit/s and 5 ms, as on a good home or campus network."""


def compare_baselines(
    dataset: Dataset,
    model: Callable[..., nn.Module],
    platforms: tuple[Platform, ...],
    settings: Settings,
    *,
    partition: Partition = IID(),
    augmentation: Augmentation | None = None,
    link: Link = HOME_LINK,
    target_accuracy: float | None = None,
) -> Comparison:
    """EpochGossip for ``settings.num_epochs``, and the other three for as long as that takes.

    Args:
        dataset: Training and test samples.
        model: Called with `input_shape` and `num_classes`.
        platforms: The hardware of each worker.
        settings: Of the recipe.
        partition: Deals the samples to the workers.
        augmentation: Of the training batches.
        link: Every link.
        target_accuracy: See `Comparison`.

    Raises:
        ValueError: If a setting is out of range.
    """
    if settings.num_epochs < 1:
        raise ValueError(f"num_epochs must be at least 1, got {settings.num_epochs}")
    shape = {"input_shape": dataset.input_shape, "num_classes": dataset.num_classes}
    task = Task(
        dataset=dataset,
        model=partial(model, **shape),
        optimizer=SGD(
            lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        ),
        batch_size=settings.batch_size,
        partition=partition,
        augmentation=augmentation,
        torch_device=settings.torch_device,
    )
    max_seconds = epoch_gossip_seconds(task, platforms, link, settings)
    experiments = {
        algorithm_name(algorithm): Experiment(
            task=task,
            algorithm=algorithm,
            platforms=platforms,
            links=Links(default=link),
            seed=settings.seed,
            max_seconds=None if isinstance(algorithm, EpochGossip) else max_seconds,
        )
        for algorithm in _baselines(len(platforms), settings)
    }
    return Comparison(
        experiments=experiments, baseline="epoch-gossip", target_accuracy=target_accuracy
    )


def _baselines(num_workers: int, settings: Settings) -> list[Algorithm[Any]]:
    everyone = complete(num_workers)
    return [
        AllReduce(topology=everyone, num_rounds=UNTIL_CUT_OFF),
        EpochGossip(topology=everyone, num_rounds=settings.num_epochs),
        GoSGD(
            topology=everyone,
            num_rounds=UNTIL_CUT_OFF,
            exchange_probability=settings.exchange_probability,
            seed=settings.seed,
        ),
        Gossip(topology=ring(num_workers), num_rounds=UNTIL_CUT_OFF),
    ]


def epoch_gossip_seconds(
    task: Task, platforms: tuple[Platform, ...], link: Link, settings: Settings
) -> Seconds:
    """Virtual seconds that EpochGossip takes: simulated, with nothing really trained."""
    num_workers = len(platforms)
    workload = Workload(task, range(num_workers), settings.seed)
    simulator = Simulator(
        EpochGossip(topology=complete(num_workers), num_rounds=settings.num_epochs),
        platforms,
        workload.initial_params,
        lambda rank, incarnation: Rehearsal(len(workload.shards[rank])),
        links=Links(default=link),
    )
    simulator.run()
    return simulator.now


@dataclass(frozen=True)
class Rehearsal:
    """A trainer that only says what an epoch of `num_samples` would cost."""

    num_samples: int

    def cost(self, work: Work, inputs: Payload) -> float:
        return self.num_samples

    def train(self, params: Tensor, work: Work, inputs: Payload) -> TrainingResult:
        return TrainingResult(params, self.num_samples, 1, 0.0)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
