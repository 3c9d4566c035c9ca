"""Can every worker reach every other one, in however many rounds?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which itself asks here
    from edgegossip.core.topology import Topology


def require_connected(topology: Topology) -> None:
    """Raise ValueError unless every worker can reach every other one: parts never agree.

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


def reached(topology: Topology, neighbors: Callable[[int, int], tuple[int, ...]]) -> set[int]:
    """Worker 0 and all to which `neighbors` lead from it, directly or not, in some rounds."""
    reached, frontier = {0}, [0]
    while frontier and len(reached) < topology.num_workers:
        rank = frontier.pop()
        for round in range(topology.period):
            fresh = set(neighbors(rank, round)) - reached
            reached |= fresh
            frontier += fresh
    return reached
