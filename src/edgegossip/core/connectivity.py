"""Connectivity: whether all workers reach each other, and in how many rounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol


class Graph(Protocol):
    """Part of `Topology` needed here; `core.topology` imports this module, not vice versa."""

    def __hash__(self) -> int: ...

    @property
    def num_workers(self) -> int: ...

    @property
    def period(self) -> int: ...

    @property
    def is_directed(self) -> bool: ...

    def out_neighbors(self, rank: int, round: int) -> tuple[int, ...]: ...

    def in_neighbors(self, rank: int, round: int) -> tuple[int, ...]: ...


def require_connected(topology: Graph) -> None:
    """Raise ValueError unless all workers can reach each other; separate parts never agree.

    >>> from edgegossip.core.topology import ring
    >>> require_connected(ring(4))
    """
    for neighbors, cannot in (
        (topology.out_neighbors, "cannot reach"),
        (topology.in_neighbors, "cannot be reached by"),
    ):
        if missing := set(range(topology.num_workers)) - reached(topology, neighbors):
            raise ValueError(
                f"worker 0 {cannot} worker {min(missing)} in any number of rounds; "
                "add edges until every worker can reach every other one"
            )


def reached(topology: Graph, neighbors: Callable[[int, int], tuple[int, ...]]) -> set[int]:
    """Worker 0 and all workers that it reaches through `neighbors`, directly or indirectly."""
    reached, frontier = {0}, [0]
    while frontier and len(reached) < topology.num_workers:
        rank = frontier.pop()
        for round in range(topology.period):
            fresh = set(neighbors(rank, round)) - reached
            reached |= fresh
            frontier += fresh
    return reached


@lru_cache(maxsize=64)
def longest_lead(topology: Graph) -> int:
    """Maximum number of rounds that a worker can be ahead of a present neighbor.

    All workers wait for the messages of their in-neighbors in each round. `flooding_time`
    rounds after a worker has sent, every worker has waited for its message, directly or
    indirectly.

    >>> from edgegossip.core.topology import directed_ring, ring
    >>> longest_lead(ring(8)), longest_lead(directed_ring(8))
    (1, 7)
    """
    if not topology.is_directed and topology.period == 1:
        return 1
    if len(reached(topology, topology.out_neighbors)) < topology.num_workers:
        return (topology.num_workers - 1) * topology.period
    return flooding_time(topology)


@lru_cache(maxsize=64)
def flooding_time(topology: Graph) -> int:
    """Rounds until all workers know everything, from any initial round; at least 1.

    In each round every worker sends everything that it knows to its out-neighbors. The graph
    must be connected (see `require_connected`); otherwise this would never end.

    >>> from edgegossip.core.topology import complete, directed_ring, one_peer_exponential
    >>> [flooding_time(make(8)) for make in (complete, directed_ring, one_peer_exponential)]
    [1, 7, 3]
    """
    return max(_flooding_time(topology, first) for first in range(topology.period))


def _flooding_time(topology: Graph, first: int) -> int:
    ranks = range(topology.num_workers)
    known, everything = [1 << rank for rank in ranks], (1 << len(ranks)) - 1  # sets, as bits
    num_rounds = 0
    while num_rounds == 0 or any(each != everything for each in known):
        told = known.copy()
        for rank in ranks:
            for receiver in topology.out_neighbors(rank, first + num_rounds):
                told[receiver] |= known[rank]
        known, num_rounds = told, num_rounds + 1
    return num_rounds
