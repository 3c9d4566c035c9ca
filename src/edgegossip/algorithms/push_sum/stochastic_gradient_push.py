"""StochasticGradientPush (SGP): push-sum of whole vectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.algorithms.push_sum.push_sum import Offer, PushSum, PushSumState
from edgegossip.contract import Message, Rank, TensorSpec


@dataclass(frozen=True, kw_only=True)
class StochasticGradientPush(PushSum[PushSumState]):
    r"""Train at numerator / weight, and push shares of both along the links.

    In each round worker :math:`i` takes `local_steps` SGD steps from :math:`z_i = x_i / w_i` to
    :math:`z_i'` and sets :math:`x_i = w_i z_i'`. Then, with :math:`p_j = 1 / (1 + d_j)` for a
    sender :math:`j` that has :math:`d_j` out-neighbors in this round,

    .. math::
        x_i \leftarrow p_i x_i + \sum_{j \to i} p_j x_j, \quad
        w_i \leftarrow p_i w_i + \sum_{j \to i} p_j w_j

    If all workers have :math:`d` out-neighbors and :math:`d` in-neighbors, all weights stay 1.

    Args:
        topology: See `PushSum`.
        num_rounds: Number of rounds of training and pushing.
        local_steps: See `PushSum`.
        resend_after: See `PushSum`.
        timeout: See `PushSum`.

    Raises:
        ValueError: If some worker cannot reach all others, or a number is out of range.

    References:
        Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
        arXiv:1811.10792, Algorithm 1. Departures: the gradient step is multiplied by the weight
        before it changes the numerator, so that the estimate moves by the whole step (as in the
        code of Sparse-Push); several local steps are allowed.
    """

    def init(self, rank: Rank, params: Tensor) -> PushSumState:
        return PushSumState(rank=rank, params=params)

    def payload_schema(self, kind: str, numel: int) -> Mapping[str, TensorSpec]:
        return {"params": TensorSpec(torch.float32, (numel,))}

    def offers(self, state: PushSumState, receivers: Sequence[Rank]) -> Iterable[Offer]:
        return [Offer(receivers, {"params": state.params}, state.params)]

    def read(self, state: PushSumState, sender: Rank, message: Message) -> Tensor:
        return message.payload["params"]
