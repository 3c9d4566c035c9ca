"""The usual algorithm for training scripts: average with neighbors every few steps."""

from __future__ import annotations

from collections.abc import Callable

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.ranges import check_range
from edgegossip.contract.robust import RobustRule
from edgegossip.contract.topology import Topology, complete


def averaging(
    every: int = 1,
    topology: Callable[[int], Topology] = complete,
    robust: RobustRule | None = None,
) -> Callable[[int, int], Gossip]:
    """Make a function that makes a `Gossip` for the workers and steps of a script.

    Args:
        every: Optimizer steps between two exchanges, at least 1.
        topology: Makes the graph for a number of workers.
        robust: Rule that limits what false models do; None averages all.

    Raises:
        ValueError: If `every` is below 1; in a later call, if a script has fewer steps than
            `every`.

    >>> averaging(every=8)(4, 100).num_rounds
    12
    """
    check_range("every", every, "at least 1")

    def make(num_workers: int, num_steps: int) -> Gossip:
        if num_steps < every:
            raise ValueError(
                f"every must be at most the script's number of steps, {num_steps}, got {every}"
            )
        rounds = num_steps // every
        return Gossip(
            topology=topology(num_workers),
            num_rounds=rounds,
            local_steps=every,
            robust=robust,
        )

    return make
