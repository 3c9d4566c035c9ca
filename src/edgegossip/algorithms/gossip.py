"""Gossip (D-PSGD): train, send the model to the neighbors, average what came back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edgegossip.algorithms.averaging import NeighborAveraging
from edgegossip.algorithms.rounds import RoundState
from edgegossip.core.protocol import Rank, Steps, Work


@dataclass(frozen=True, kw_only=True)
class Gossip(NeighborAveraging[RoundState]):
    r"""Train for some local steps, send the model to the neighbors, average what came back.

    In each round worker :math:`i`

    1. takes `local_steps` SGD steps on its own data,
    2. sends :math:`x_i` to its neighbors :math:`N(i)`,
    3. waits for theirs and averages:
       :math:`x_i \leftarrow W_{ii} x_i + \sum_{j \in N(i)} W_{ij} x_j`.

    Args:
        topology: Undirected communication graph; may vary in time.
        num_rounds: Rounds of train-then-mix.
        local_steps: SGD steps between two mixings, at least 1.
        mixing: Rule that makes the rows of :math:`W`.
        timeout: See `RoundBased`.

    Raises:
        ValueError: If the topology is directed, or a number is out of range.

    References:
        Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?",
        NeurIPS 2017, arXiv:1705.09056, Algorithm 1. Departures: mixing follows the gradient
        step instead of running beside it; several local steps are allowed.
    """

    local_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_steps < 1:
            raise ValueError(f"local_steps must be at least 1, got {self.local_steps}")

    def init(self, rank: Rank, params: Tensor) -> RoundState:
        return RoundState(rank=rank, params=params)

    def work(self, state: RoundState) -> Work:
        return Steps(self.local_steps)
