"""EdgeSqueeze: local steps by forecast, compressed progress, exchanges beside training."""

from __future__ import annotations

from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.compression.compressor import Compressor
from edgegossip.contract.algorithm import UNTIL_CUT_OFF
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.topology import complete
from edgegossip.recipes.push_sum_comparison import compressor as largest

LARGEST = largest(0.1, 4)
"""A tenth of the entries, the largest ones, with four bits each."""


def edge_squeeze(
    num_workers: int,
    num_rounds: int = UNTIL_CUT_OFF,
    *,
    local_steps: int = 16,
    compressor: Compressor = LARGEST,
    outer_momentum: float = 0.7,
    outer_lr: float = 1.0,
    timeout: Seconds | None = None,
    seed: int = 0,
) -> EdgeGossip:
    """EdgeSqueeze, our algorithm for uneven machines and slow links, without a server.

    It is `EdgeGossip` around a `DoubleSqueeze` that overlaps. In a round, each worker takes
    local steps in proportion to its forecast speed, the fastest one `local_steps`, so all
    rounds take equally long. What the workers have learned is compressed, combined by the
    owners of its chunks with Nesterov's momentum, and compressed again. Meanwhile they take the
    last of the round's steps, as many as that takes. :doc:`EdgeSqueeze </docs/edge-squeeze>`
    derives it and has the ablations.

    Args:
        num_workers: Number of workers, at least 1; all exchange with all.
        num_rounds: Number of rounds of training.
        local_steps: SGD steps of the fastest worker in a round, at least 1. A round should take
            at least as long as its messages.
        compressor: See `DoubleSqueeze`.
        outer_momentum: See `DoubleSqueeze`.
        outer_lr: See `DoubleSqueeze`.
        timeout: See `Synchronous`; None is safe only on links that lose no messages.
        seed: See `DoubleSqueeze`.

    Raises:
        ValueError: If a number is out of range.

    >>> edge_squeeze(4).inner.overlap
    True
    """
    return EdgeGossip(
        inner=DoubleSqueeze(
            topology=complete(num_workers),
            num_rounds=num_rounds,
            local_steps=local_steps,
            compressor=compressor,
            outer_momentum=outer_momentum,
            outer_lr=outer_lr,
            overlap=True,
            timeout=timeout,
            seed=seed,
        )
    )
