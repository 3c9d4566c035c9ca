"""EpidemicLearning: train, send the model to some random workers, average what has arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.contract import (
    LocalSteps,
    Payload,
    Rank,
    RobustRounds,
    RoundState,
    TensorSpec,
)


@dataclass(frozen=True, kw_only=True)
class EpidemicLearning(LocalSteps[RoundState], RobustRounds[RoundState]):
    r"""Gossip with other random receivers in each round, which need not answer.

    In each round worker :math:`i`

    1. takes `local_steps` SGD steps on its own data,
    2. sends :math:`x_i` to its out-neighbors of the round,
    3. waits for the models of its in-neighbors :math:`S_i`, and averages:
       :math:`x_i \leftarrow \frac{1}{|S_i| + 1} \bigl(x_i + \sum_{j \in S_i} x_j\bigr)`.

    On `random_receivers`, the number of models that a worker receives varies, so a round keeps
    the workers' mean only in expectation. If all workers receive equally many models, as on
    `random_one_peer`, the mean is exact; and if neighbors answer, too, this is `Gossip` with
    uniform weights. A worker averages without a message that is late or lost.

    Args:
        topology: Graph of each round; may be directed.
        num_rounds: Number of rounds of training and averaging.
        local_steps: SGD steps in a round; 1 in the paper.
        robust: See `NeighborAveraging`.
        timeout: See `Synchronous`.

    Raises:
        ValueError: If a number is out of range.

    References:
        de Vos et al., "Epidemic Learning: Boosting Decentralized Learning with Randomized
        Communication", NeurIPS 2023, arXiv:2310.01972: EL-Local on `random_receivers`,
        EL-Oracle with one receiver on `random_one_peer`. Departure: receivers are drawn from a
        seed that all workers share and repeat after a period, so a worker knows whom to wait
        for.
    """

    def outgoing(self, state: RoundState, receiver: Rank) -> Payload:
        return {"params": state.params}

    def payload_schema(self, params: Tensor) -> Mapping[str, TensorSpec]:
        return {"params": TensorSpec.like(params)}

    def mix(self, state: RoundState, inbox: Mapping[Rank, Payload]) -> None:
        if not inbox:
            return
        if self.robust is not None:
            others = {j: each["params"] for j, each in inbox.items()}
            weights = dict.fromkeys(others, 1 / (1 + len(others)))
            state.params = self.combine(state, state.params, others, weights)
            return
        models = {state.rank: state.params, **{j: each["params"] for j, each in inbox.items()}}
        # Rank order: float sums come out bit-identical everywhere.
        state.params = torch.stack([models[rank] for rank in sorted(models)]).mean(0)
