"""An algorithm of `tests.algorithms` for other numbers of workers and rounds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from tests.algorithms import (
    NUM_WORKERS,
)
from tests.worlds import NUM_PARAMS

from edgegossip.algorithms.gossip.streaming_diloco import StreamingDiLoCo
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.algorithms.wrappers.averaged_moments import AveragedMoments
from edgegossip.algorithms.wrappers.control_variates import ControlVariates
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.algorithms.wrappers.trailing_average import TrailingAverage
from edgegossip.contract import topology as topologies
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.topology import Topology, from_edges_by_round

_WRAPPERS = AveragedMoments | ControlVariates | EdgeGossip | TrailingAverage


def longer(algorithm: Algorithm[Any], factor: float) -> Algorithm[Any]:
    varied: Any = algorithm
    if isinstance(varied, _WRAPPERS | Standby | Shards | Stages):
        inner: Any = longer(varied.inner, factor)
        wrapped: Algorithm[Any] = replace(varied, inner=inner)
        return wrapped
    found: Algorithm[Any] = replace(varied, num_rounds=int(factor * varied.num_rounds))
    return found


def smaller(algorithm: Algorithm[Any], num_workers: int) -> Algorithm[Any]:
    """The same for fewer workers, of which one or more are servers where it has such."""
    if isinstance(algorithm, _WRAPPERS | Standby):
        inner: Any = smaller(algorithm.inner, num_workers)
        return replace(algorithm, inner=inner)
    varied: Any = algorithm
    if isinstance(algorithm, ParameterServer):
        return replace(algorithm, num_workers=max(3, num_workers - 1))
    if isinstance(algorithm, Shards):
        num_left = max(2, num_workers - algorithm.num_servers)
        return replace(algorithm, inner=replace(algorithm.inner, num_workers=num_left))
    if not isinstance(getattr(varied, "topology", None), Topology):
        return algorithm
    found: Algorithm[Any] = replace(varied, topology=_cut_down(varied.topology, num_workers))
    return found


def resized(algorithm: Algorithm[Any], num_workers: int) -> Algorithm[Any]:
    """The same for another number of workers, on a ring if its edges are given one by one."""
    varied: Any = algorithm
    if isinstance(varied, EdgeGossip | TrailingAverage | ControlVariates):
        wrapped: Algorithm[Any] = replace(varied, inner=resized(varied.inner, num_workers))
        return wrapped
    if not isinstance(varied.topology, topologies.CompleteTopology):
        make = varied.topology.remake or topologies.ring
    else:
        make = topologies.complete
    changes: dict[str, Any] = {"topology": make(num_workers)}
    if isinstance(varied, StreamingDiLoCo):  # each worker owns an entry of each fragment
        changes["num_fragments"] = min(varied.num_fragments, -(-NUM_PARAMS // num_workers))
    found: Algorithm[Any] = replace(varied, **changes)
    return found


@cache
def _cut_down(topology: Topology, num_workers: int) -> Topology:
    if isinstance(topology, topologies.OpenTopology):
        return _cut_down(topology.whole, num_workers).open()
    factory = getattr(topologies, topology.name.removesuffix(f"({topology.num_workers})"), None)
    if factory is not None:
        made: Topology = factory(num_workers)
        return made
    ranks = range(num_workers)
    edges = [
        [
            (i, j)
            for i in ranks
            for j in topology.out_neighbors(i, round)
            if j in ranks and (topology.is_directed or i < j)
        ]
        for round in range(topology.period)
    ]
    return from_edges_by_round(num_workers, edges, topology.is_directed)


def num_workers_of(algorithm: Algorithm[Any]) -> int:
    topology = algorithm.traits.topology
    return NUM_WORKERS if topology is None else topology.num_workers
