"""The baselines and EdgeGossip on the same machines for the same virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from edgegossip.algorithms.all_reduce import AllReduce
from edgegossip.algorithms.control_variates import ControlVariates
from edgegossip.algorithms.edge_gossip.wrapper import EdgeGossip
from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.algorithms.gosgd import GoSGD
from edgegossip.algorithms.gossip import Gossip
from edgegossip.core.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.core.ranges import check_range
from edgegossip.core.topology import Topology, complete, ring
from edgegossip.experiments.experiment import Comparison, Experiment
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
"""A link of 100 Mbit/s and 5 ms, as in a good home or campus network."""


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
    target: float | None = None,
) -> Comparison:
    """Run EpochGossip for ``settings.num_epochs``, and its rivals for the same virtual time.

    Args:
        dataset: Training and test samples.
        model: Called with `input_shape` and `num_classes`.
        platforms: The hardware of each worker.
        settings: Settings of the recipe.
        partition: Partition of the samples among the workers.
        augmentation: Augmentation of the training batches.
        link: Link between any two workers.
        accuracy_aware: EdgeGossip's choice of samples.
        target: See `Comparison`.

    Raises:
        ValueError: If a setting is out of range.
    """
    check_range("num_epochs", settings.num_epochs, "at least 1")
    check_range("control", settings.control, "in [0, 1]")
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

    run = partial(
        Experiment, platforms=platforms, links=Links(default=link), seed=settings.seed
    )
    aware = replace(task, accuracy_aware=accuracy_aware)
    everyone = complete(len(platforms))
    epochs = partial(EpochGossip, topology=everyone)
    experiments = [
        run(task=task, algorithm=epochs(num_rounds=settings.num_epochs)),
        run(
            task=aware,
            algorithm=balanced(epochs(num_rounds=UNTIL_CUT_OFF), settings.control),
            max_seconds=max_seconds,
            name="edge-gossip",  # with control variates, too, so that a sweep may change them
        ),
        *(
            run(task=task, algorithm=each, max_seconds=max_seconds)
            for each in _rivals(everyone, settings)
        ),
    ]
    return Comparison(
        experiments={each.run_name: each for each in experiments},
        baseline="epoch-gossip",
        target=target,
        tunable={"gosgd": {"exchange_probability": _around(settings.exchange_probability)}},
    )


def balanced(
    inner: Algorithm[Any],
    control: float = 0.0,
    **balancing: Any,  # noqa: ANN401 - of `EdgeGossip`
) -> Algorithm[Any]:
    """Put `EdgeGossip` around `inner`, and around that `ControlVariates` of weight `control`.

    Args:
        inner: See `EdgeGossip`.
        control: 0 for no control variates. Both these and EdgeGossip's correction mend the
            drift to fast workers' data, so with them there is no correction by default.
        balancing: Other arguments of `EdgeGossip`.
    """
    if not control:
        return EdgeGossip(inner=inner, **balancing)
    balancing.setdefault("correction", 0.0)
    return ControlVariates(inner=EdgeGossip(inner=inner, **balancing), weight=control)


def _around(probability: float) -> tuple[float, ...]:
    """Values to try for a probability, which may be 0."""
    return tuple(dict.fromkeys((probability, probability / 4, min(1.0, 4 * probability))))


def _rivals(everyone: Topology, settings: Settings) -> list[Algorithm[Any]]:
    return [
        GoSGD(
            topology=everyone,
            num_rounds=UNTIL_CUT_OFF,
            exchange_probability=settings.exchange_probability,
            seed=settings.seed,
        ),
        AllReduce(topology=everyone, num_rounds=UNTIL_CUT_OFF),
        Gossip(topology=ring(everyone.num_workers), num_rounds=UNTIL_CUT_OFF),
    ]
