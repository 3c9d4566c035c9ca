"""The baselines and EdgeGossip on the same machines for the same virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.wrappers.control_variates import ControlVariates
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.trailing_average import TrailingAverage
from edgegossip.contract.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.contract.ranges import check_range, check_ranges
from edgegossip.contract.topology import Topology, complete, ring
from edgegossip.data.dataset import Dataset
from edgegossip.data.partition import IID, Partition
from edgegossip.recipes.rehearsal import epoch_gossip_seconds
from edgegossip.recipes.tasks import ACCURACY_AWARE, Settings, make_task
from edgegossip.runs.experiment import Comparison, Experiment, algorithm_name
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.training.learner import Augmentation
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.task import Workload

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
    check_ranges(settings, control="in [0, 1]", window="above 0 or None")
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
    timed = partial(run, max_seconds=max_seconds)
    served = partial(averaged, window=settings.window)
    everyone = complete(len(platforms))
    epochs = partial(EpochGossip, topology=everyone)
    edge_gossip = balanced(epochs(num_rounds=UNTIL_CUT_OFF), settings.control)
    aware = replace(task, accuracy_aware=accuracy_aware)
    shares = rounds_per_epoch(platforms)
    steps = len(task.dataset.train) / len(platforms) / task.batch_size
    experiments = {  # names without wrappers, so that a sweep may change these
        "epoch-gossip": run(
            task=task, algorithm=served(epochs(num_rounds=settings.num_epochs), rounds=1.0)
        ),
        "edge-gossip": timed(task=aware, algorithm=served(edge_gossip, rounds=shares)),
        **{
            algorithm_name(each): timed(task=task, algorithm=served(each, rounds=steps))
            for each in _rivals(everyone, settings)
        },
    }
    return Comparison(
        experiments={name: replace(each, name=name) for name, each in experiments.items()},
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


def averaged(algorithm: Algorithm[Any], window: float | None, rounds: float) -> Algorithm[Any]:
    """Put `TrailingAverage` around `algorithm`, so that all runs average as many samples.

    Args:
        algorithm: Any algorithm that counts rounds.
        window: In epochs' worth of samples, at least a round; None for no average.
        rounds: Number of the algorithm's rounds per epoch's worth of samples.
    """
    if window is None:
        return algorithm
    return TrailingAverage(inner=algorithm, window=max(1.0, window * rounds))


def rounds_per_epoch(platforms: tuple[Platform, ...]) -> float:
    """EdgeGossip's rounds per epoch's worth of samples on idle platforms with equal shards.

    >>> from edgegossip.sim.platform import uneven
    >>> round(rounds_per_epoch(uneven(4)), 2)  # the fastest visits all data, the mean 60 %
    1.68
    """
    speeds = [platform.total_throughput for platform in platforms]
    return max(speeds) * len(speeds) / sum(speeds)


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
