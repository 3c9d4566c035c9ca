"""The algorithms that are worth a first comparison on any task."""

from __future__ import annotations

from typing import Any

from edgegossip.algorithms.gossip.adpsgd import ADPSGD
from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.contract.ranges import check_range
from edgegossip.contract.topology import complete, ring
from edgegossip.recipes.baselines import balanced
from edgegossip.runs.experiment import algorithm_name


def usual_algorithms(num_workers: int, *, seed: int = 0) -> dict[str, Algorithm[Any]]:
    """Make one algorithm of each usual kind, by name, with default settings and no server.

    They run until a time limit, so give each experiment `max_seconds`. Learning rates that suit
    one may not suit another: compare each at its best.

    - ``all-reduce``: all workers wait for each other after each step;
    - ``gossip``: each waits for its neighbors on a ring after each step;
    - ``epoch-gossip``: all average their models after each epoch;
    - ``edge-gossip``: the same, on shares of the data that fit the workers' speeds;
    - ``gosgd``: nobody waits, and each sends to a random worker now and then;
    - ``adpsgd``: nobody waits for long, and random pairs average their models;
    - ``diloco``: many local steps, and then outer momentum on the progress of all.

    Args:
        num_workers: Number of workers, at least 2.
        seed: Seeds the random choices of receivers.

    Raises:
        ValueError: If there are fewer than two workers.

    >>> [*usual_algorithms(4)]
    ['all-reduce', 'gossip', 'epoch-gossip', 'edge-gossip', 'gosgd', 'adpsgd', 'diloco']
    """
    check_range("num_workers", num_workers, "at least 2")
    everyone, rounds = complete(num_workers), UNTIL_CUT_OFF
    epochs = EpochGossip(topology=everyone, num_rounds=rounds)
    plain: list[Algorithm[Any]] = [
        AllReduce(topology=everyone, num_rounds=rounds),
        Gossip(topology=ring(num_workers), num_rounds=rounds),
        epochs,
        GoSGD(topology=everyone, num_rounds=rounds, exchange_probability=0.1, seed=seed),
        ADPSGD(topology=everyone, num_rounds=rounds, seed=seed),
        DiLoCo(topology=everyone, num_rounds=rounds, local_steps=20),
    ]
    found = {algorithm_name(each): each for each in plain}
    names = ("all-reduce", "gossip", "epoch-gossip", "edge-gossip", "gosgd", "adpsgd", "diloco")
    found["edge-gossip"] = balanced(epochs)
    return {name: found[name] for name in names}
