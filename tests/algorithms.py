"""The one list of algorithms that every general property is tested on."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest

from edgegossip.algorithms.all_reduce import AllReduce
from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.algorithms.gosgd import GoSGD
from edgegossip.algorithms.gossip import Gossip
from edgegossip.algorithms.rounds import RoundBased
from edgegossip.balance.edge_gossip import EdgeGossip
from edgegossip.core.topology import complete, from_edges_by_round, ring

AnyAlgorithm: TypeAlias = RoundBased[Any] | GoSGD

NUM_WORKERS = 5
NUM_ROUNDS = 6

# Two matchings of which each leaves a worker alone; together they connect everybody.
MATCHINGS = from_edges_by_round(NUM_WORKERS, [[(0, 1), (2, 3)], [(1, 2), (3, 4)]])

ALGORITHMS: dict[str, AnyAlgorithm] = {
    "gossip": Gossip(topology=ring(NUM_WORKERS), num_rounds=NUM_ROUNDS, local_steps=2),
    "gossip-varying": Gossip(topology=MATCHINGS, num_rounds=NUM_ROUNDS),
    "epoch-gossip": EpochGossip(topology=complete(NUM_WORKERS), num_rounds=NUM_ROUNDS),
    "all-reduce": AllReduce(topology=complete(NUM_WORKERS), num_rounds=NUM_ROUNDS),
    "gosgd": GoSGD(
        topology=complete(NUM_WORKERS), num_rounds=3 * NUM_ROUNDS, exchange_probability=0.5
    ),
}
"""By name, each for `NUM_WORKERS` workers; `dataclasses.replace` varies them."""

SYNCHRONOUS: dict[str, RoundBased[Any]] = {
    name: algorithm
    for name, algorithm in ALGORITHMS.items()
    if isinstance(algorithm, RoundBased)
}

SPREADS: dict[str, dict[str, Any]] = {
    "exact": {"block_share": 0.5},
    "gossip": {"block_share": 1.0, "spread": "gossip"},
}

BALANCED: dict[str, EdgeGossip] = {
    f"{name}-balanced-{spread}": EdgeGossip(inner=algorithm, **settings)
    for name, algorithm in ALGORITHMS.items()
    for spread, settings in SPREADS.items()
}
"""Each of them with its data balanced; holds what does not depend on how much is trained."""

ALL: dict[str, AnyAlgorithm | EdgeGossip] = {**ALGORITHMS, **BALANCED}

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
each_synchronous = pytest.mark.parametrize("algorithm", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
each_of_all = pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
