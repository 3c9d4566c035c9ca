"""Averaging with the neighbors: rounds in which all send their parameters and mix them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from edgegossip.contract.mixing import MetropolisHastings, MixingRule
from edgegossip.contract.protocol import Message, Payload, Rank
from edgegossip.contract.robust import RobustRule, robust_field
from edgegossip.contract.rounds import RoundBased, S
from edgegossip.contract.schema import TensorSpec


@dataclass(frozen=True, kw_only=True)
class RobustRounds(RoundBased[S], Generic[S]):
    """`RoundBased` for algorithms in which a robust rule may take the place of a mean.

    Args:
        robust: Rule that limits what false vectors do; None averages all.
    """

    robust: RobustRule | None = robust_field()

    def replaces(self, newer: Message, older: Message) -> bool:
        """Whether `newer` announces where this worker continues, far ahead of `older`.

        A receiver in the exchange of `older` is then so far behind that it skips rounds and
        adopts a model. A nearer one may still be in an exchange in which this worker has mixed
        its message. If it could not mix `older` in return, the mean would move, and the models
        would differ after the last exchange. An earlier announcement is outdated in any case.
        """
        if newer.kind != "catch-up" or older.kind not in ("params", "catch-up"):
            return False
        # A wrapper may have added a number to the older one only.
        if not older.numbers.keys() - {"exchange", "seen"} <= newer.numbers.keys():
            return False
        behind, ahead = self.exchange_of(older), self.exchange_of(newer)
        return behind <= ahead if older.kind == "catch-up" else self._is_far(behind, ahead)

    def combine(
        self,
        state: S,
        own: Tensor,
        others: Mapping[Rank, Tensor],
        weights: Mapping[Rank, float],
    ) -> Tensor:
        """Apply `robust`, which must not be None, as `RobustRule.combine`; note its shares."""
        assert self.robust is not None
        mix = self.robust.combine(own, others, weights)
        state.trust = mix.shares
        return mix.params


@dataclass(frozen=True, kw_only=True)
class NeighborAveraging(RobustRounds[S], Generic[S]):
    r"""Base of algorithms that send parameters to neighbors and average the received ones.

    .. math:: x_i \leftarrow W_{ii} x_i + \sum_{j \in N(i)} W_{ij} x_j

    Averaging keeps the workers' mean if :math:`W` is doubly stochastic, as Metropolis-Hastings
    weights are on any undirected topology. A worker adds the weight of a lost or late neighbor
    to its own.

    Args:
        topology: Undirected communication graph; may vary in time.
        num_rounds: See `Synchronous`.
        mixing: Rule that gives the rows of :math:`W`.
        robust: Rule that limits what false models do; None averages all. It takes the rows of
            :math:`W`, and may not keep the mean.
        timeout: See `Synchronous`.

    Raises:
        ValueError: If the topology is directed, the rule does not average, or a number is out
            of range.
    """

    mixing: MixingRule = MetropolisHastings()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topology.is_directed:
            raise ValueError(
                f"{type(self).__name__} needs an undirected topology, got a directed one; "
                "directed graphs need push-sum weights to keep the mean"
            )
        if not self.mixing.has_averaging_rows:
            raise ValueError(
                f"{type(self).__name__} averages: rows of its mixing matrix must add up to 1; "
                f"{self.mixing} is for push-sum, choose MetropolisHastings() or Uniform()"
            )

    def outgoing(self, state: S, receiver: Rank) -> Payload:
        return {"params": state.params}

    def payload_schema(self, params: Tensor) -> Mapping[str, TensorSpec]:
        return {"params": TensorSpec.like(params)}

    def mix(self, state: S, inbox: Mapping[Rank, Payload]) -> None:
        if state.views is not None:
            self._mix_under_views(state, inbox)
            return
        # The weights are those of the graph without the workers that take no part. Neighbors
        # agree on the exchange from which on they wait for a worker that is back, but each
        # learns at a different time that it is back.
        neighbors = self.topology.in_neighbors(state.rank, state.exchange)
        first = state.first_exchange
        absent = {*state.lost, *(j for j in neighbors if first.get(j, 0) > state.exchange)}
        # A message that has arrived counts, even if its sender is lost by now.
        absent.difference_update(inbox)
        row = self.mixing.weights(self.topology, state.rank, state.round, absent)
        self._average(state, inbox, {j: row[j] for j in inbox})

    @property
    def mixes_symmetrically(self) -> bool:
        return True

    def _mix_under_views(self, state: S, inbox: Mapping[Rank, Payload]) -> None:
        """Mix as the other end of each edge does: with the smaller of the two weights."""
        own = self.mixing.weights(self._graph(state), state.rank, state.round)
        weights = {}
        for j in inbox:
            theirs = self.view_of(state, j)
            row = own if theirs is None else self.mixing.weights(theirs, j, state.round)
            weights[j] = min(own[j], row[j if theirs is None else state.rank])
        self._average(state, inbox, weights)

    def _average(
        self, state: S, inbox: Mapping[Rank, Payload], weights: Mapping[Rank, float]
    ) -> None:
        """Mix the received parameters with these weights, and the own ones with the rest."""
        if self.robust is not None:
            models = {j: payload["params"] for j, payload in inbox.items()}
            state.params = self.combine(state, state.params, models, weights)
            return
        mixed = (1 - sum(weights.values())) * state.params
        for j, payload in inbox.items():
            mixed.add_(payload["params"], alpha=weights[j])
        state.params = mixed
