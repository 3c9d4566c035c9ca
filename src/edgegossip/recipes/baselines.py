"""The baselines and EdgeGossip on the same machines, for the same virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from edgegossip.algorithms.all_reduce import AllReduce
from edgegossip.algorithms.edge_gossip.wrapper import EdgeGossip
from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.algorithms.gosgd import GoSGD
from edgegossip.algorithms.gossip import Gossip
from edgegossip.core.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.core.ranges import check_range
from edgegossip.core.topology import complete, ring
from edgegossip.experiments.experiment import Comparison, Experiment, algorithm_name
from edgegossip.learning.dataset import Dataset
from edgegossip.learning.learner import Augmentation
from edgegossip.learning.partition import IID, Partition
from edgegossip.learning.sampling.accuracy_aware import AccuracyAware
from edgegossip.learning.task import Workload
from edgegossip.recipes.recipe_settings import ACCURACY_AWARE, Settings
from edgegossip.recipes.rehearsal import epoch_gossip_seconds
from edgegossip.recipes.tasks import make_task
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform

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
    accuracy_aware: AccuracyAware = ACCURACY_AWARE,
    target_accuracy: float | None = None,
) -> Comparison:
    """Compare EpochGossip for ``settings.num_epochs`` with the others in the same time.

    Args:
        dataset: Training and test samples.
        model: Called with `input_shape` and `num_classes`.
        platforms: The hardware of each worker.
        settings: Settings of the recipe.
        partition: Partition of the samples among the workers.
        augmentation: Augmentation of the training batches.
        link: Link between any two workers.
        accuracy_aware: Choice of samples by EdgeGossip.
        target_accuracy: See `Comparison`.

    Raises:
        ValueError: If a setting is out of range.
    """
    check_range("num_epochs", settings.num_epochs, "at least 1")
    task = make_task(
        dataset,
        model,
        settings,
        batch_size=settings.batch_size,
        partition=partition,
        augmentation=augmentation,
    )
    workload = Workload(task, range(len(platforms)), settings.seed)
    max_seconds = epoch_gossip_seconds(workload, platforms, link, settings.num_epochs)

    def experiment(algorithm: Algorithm[Any]) -> Experiment:
        is_edge_gossip = isinstance(algorithm, EdgeGossip)
        return Experiment(
            task=replace(task, accuracy_aware=accuracy_aware) if is_edge_gossip else task,
            algorithm=algorithm,
            platforms=platforms,
            links=Links(default=link),
            seed=settings.seed,
            max_seconds=None if isinstance(algorithm, EpochGossip) else max_seconds,
        )

    algorithms = _algorithms(len(platforms), settings)
    return Comparison(
        experiments={algorithm_name(each): experiment(each) for each in algorithms},
        baseline="epoch-gossip",
        target_accuracy=target_accuracy,
        tunable={"gosgd": {"exchange_probability": _around(settings.exchange_probability)}},
    )


def _around(probability: float) -> tuple[float, ...]:
    """Values to try for a probability; it may be 0."""
    return tuple(dict.fromkeys((probability, probability / 4, min(1.0, 4 * probability))))


def _algorithms(num_workers: int, settings: Settings) -> list[Algorithm[Any]]:
    everyone = complete(num_workers)
    return [
        EpochGossip(topology=everyone, num_rounds=settings.num_epochs),
        EdgeGossip(inner=EpochGossip(topology=everyone, num_rounds=UNTIL_CUT_OFF)),
        GoSGD(
            topology=everyone,
            num_rounds=UNTIL_CUT_OFF,
            exchange_probability=settings.exchange_probability,
            seed=settings.seed,
        ),
        AllReduce(topology=everyone, num_rounds=UNTIL_CUT_OFF),
        Gossip(topology=ring(num_workers), num_rounds=UNTIL_CUT_OFF),
    ]
