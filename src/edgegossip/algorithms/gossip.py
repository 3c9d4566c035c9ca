"""Gossip (D-PSGD): train, send the model to the neighbors, average what came back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from edgegossip.algorithms.rounds import RoundBased, RoundState
from edgegossip.core.mixing import MetropolisHastings, MixingRule
from edgegossip.core.protocol import Payload, Rank, Steps, Work


@dataclass(frozen=True, kw_only=True)
class Gossip(RoundBased[RoundState]):
    r"""Train for some local steps, send the model to the neighbors, average what came back.

    With mixing matrix :math:`W`, worker :math:`i` does

    .. math:: x_i \leftarrow W_{ii} x_i + \sum_{j \in N(i)} W_{ij} x_j

    after each block of local steps. The workers' mean is unchanged by mixing as long as
    :math:`W` is doubly stochastic, which Metropolis-Hastings weights are on any undirected
    topology. The weight of a neighbor that was lost or too late goes to the worker itself.

    Args:
        topology: Undirected communication graph; may vary in time.
        num_rounds: Rounds of train-then-mix.
        local_steps: SGD steps between two mixings.
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
    mixing: MixingRule = MetropolisHastings()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_steps < 1:
            raise ValueError(f"local_steps must be at least 1, got {self.local_steps}")
        if self.topology.is_directed:
            raise ValueError(
                f"{type(self).__name__} needs an undirected topology, got a directed one; "
                "directed graphs need push-sum weights to keep the mean"
            )

    def init(self, rank: Rank, params: Tensor) -> RoundState:
        return RoundState(rank=rank, params=params)

    def work(self, state: RoundState) -> Work:
        return Steps(self.local_steps)

    def outgoing(self, state: RoundState, receiver: Rank) -> Payload:
        return {"params": state.params}

    def mix(self, state: RoundState, inbox: Mapping[Rank, Payload]) -> None:
        weights = self.mixing.weights(self.topology, state.rank, state.round)
        own_weight = 1 - sum(weights[j] for j in inbox)
        mixed = own_weight * state.params
        for j, payload in inbox.items():
            mixed.add_(payload["params"], alpha=weights[j])
        state.params = mixed
