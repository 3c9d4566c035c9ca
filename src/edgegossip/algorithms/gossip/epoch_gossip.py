"""EpochGossip: the EdgeGossip paper's base algorithm and baseline, a synchronous GoSGD."""

from __future__ import annotations

from dataclasses import dataclass

from edgegossip.contract import Epochs, NeighborAveraging, RoundState


@dataclass(frozen=True, kw_only=True)
class EpochGossip(NeighborAveraging[RoundState]):
    r"""Train on all local data each epoch, then mix with the neighbors behind a barrier.

    This is the base algorithm of the EdgeGossip paper. In each epoch worker :math:`i`

    1. runs mini-batch SGD over its local data,
    2. sends its parameters to its neighbors according to the mixing matrix,
    3. receives their parameters and merges:
       :math:`x_i \leftarrow W_{ii} x_i + \sum_{j \in N(i)} W_{ij} x_j`.

    On the complete graph all workers end an epoch with the same parameters, up to rounding. So
    do the survivors of a loss, from the first epoch on in which all of them mix without the
    lost worker. The complete graph is also a barrier for all workers: all wait for the slowest.
    With equal shards, a worker twice as fast as the slowest is idle half of the time.
    `Proportional` shards avoid this if speeds are known and constant.

    Args:
        topology: Undirected communication graph; the complete one averages exactly.
        num_rounds: Number of epochs.
        mixing: Rule that gives the rows of :math:`W`.
        timeout: See `Synchronous`.

    Raises:
        ValueError: If the topology is directed, the rule does not average, or a number is out
            of range.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 32(7), 2021, doi:10.1109/TPDS.2020.3046440. The
        paper calls it GoSGD, but the original algorithm of that name, `GoSGD`, has no barrier.
    """

    def work(self, state: RoundState) -> Epochs:
        return Epochs()
