"""Parts of an epoch of EdgeGossip, measured on this machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.wrappers.edge_gossip.balancer import Balancer
from edgegossip.contract.protocol import Epochs, Seconds, Train
from edgegossip.contract.topology import complete
from edgegossip.machine.contention import Contention
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.recipes.studies.timing import processor_seconds
from edgegossip.sim.machines import profile
from edgegossip.sim.platform import Platform
from edgegossip.training.learner import Learner
from edgegossip.training.sampling.accuracy_aware import PointLosses
from edgegossip.training.sampling.aggregation import Aggregator
from edgegossip.training.sampling.sampler import AccuracyAwareSampler
from edgegossip.training.sampling.selection import Selection
from edgegossip.training.task import Task, Workload

NUM_WORKERS = 4
MEASURED_PARTS = ("forecast", "balancing", "look", "choice", "training", "averaging")
_MANY = 100
"""Repetitions of work that takes less than a millisecond."""


def measured_parts(
    task: Task, aggregator: Aggregator, selection: Selection, seed: int
) -> tuple[dict[str, int], dict[str, Seconds]]:
    """Measure an epoch in which one of four workers looks at all points and keeps all samples.

    Args:
        task: Data and model.
        aggregator: Makes the aggregated points.
        selection: Orders the samples.
        seed: Seeds the shards and the training.

    Returns:
        `num_points` and `num_samples`, and the processor time of each of `MEASURED_PARTS`.
    """
    workload = Workload(task, range(NUM_WORKERS), seed)
    learner = workload.make_trainer(0)
    assert isinstance(learner, Learner)
    shard, params = workload.shards[0], workload.initial_params()
    aggregated = aggregator.fit(*task.dataset.train.batch(shard))
    look = PointLosses(
        task.dataset.training,
        aggregated.x,
        aggregated.y,
        loss=task.loss,
        torch_device=torch.device("cpu"),
    )
    points = torch.arange(len(aggregated.y))
    sampler = AccuracyAwareSampler(
        aggregated, batch_size=task.batch_size, selection=selection, key=seed
    )
    sampler.set_losses(look(learner.model.module, points))
    gossip = EpochGossip(topology=complete(NUM_WORKERS), num_rounds=1)
    others = {rank: {"params": params} for rank in range(1, NUM_WORKERS)}
    state = gossip.init(0, params)
    parts = {
        "forecast": processor_seconds(_forecasts()) / _MANY,
        "balancing": processor_seconds(_shares) / _MANY,
        "look": processor_seconds(lambda: look(learner.model.module, points)),
        "choice": processor_seconds(lambda: sampler.begin_epoch(len(shard))),
        "averaging": processor_seconds(lambda: gossip.mix(state, others)),
        "training": processor_seconds(
            lambda: learner.train(Train(params, Epochs())), num_repeats=1
        ),
    }
    return {"num_points": len(points), "num_samples": len(shard)}, parts


def _forecasts() -> Callable[[], None]:
    """Return a function that forecasts many times, each time under a new load."""
    predictor = PerformancePredictor().fit(profile(Platform(throughput=1.0)))
    random = np.random.default_rng(0)

    def forecast() -> None:
        for present, usual in random.random((_MANY, 2)):
            predictor.forecast([Contention(cores=present)], [Contention(cores=usual)])

    return forecast


def _shares() -> None:
    """Compute all workers' shares many times."""
    for _ in range(_MANY):
        Balancer().balance([3.0, 3.0, 1.0, 1.0], [100.0] * NUM_WORKERS)
