"""SparsePush: push-sum with compressed numerators and an error memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from edgegossip.algorithms.push_sum.push_sum import Offer, PushSum, PushSumState
from edgegossip.compression.compressor import (
    Compressor,
)
from edgegossip.contract import Message, Rank, TensorSpec, check_ranges


@dataclass(slots=True, kw_only=True)
class SparsePushState(PushSumState):
    """State of one worker.

    Attributes:
        error: Part that the compressor has held back so far, [num_params].
    """

    error: Tensor


E = TypeVar("E", bound=SparsePushState)


@dataclass(frozen=True, kw_only=True)
class ErrorFeedbackPush(PushSum[E], Generic[E]):
    """Base of `SparsePush` and its variants; see `SparsePush`."""

    compressor: Compressor
    consensus_step: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, consensus_step="in (0, 1] or None")

    def step(self, kind: str, numel: int) -> float:
        return self.compressor.step_or_default(self.consensus_step, numel)

    def payload_schema(self, kind: str, numel: int) -> Mapping[str, TensorSpec]:
        return self.compressor.schema(numel)

    def offers(self, state: E, receivers: Sequence[Rank]) -> Iterable[Offer]:
        key = (self.seed, state.rank, "push", state.round)
        turn = self.compressor.feed_back(state.params, state.error, *key)
        state.error = turn.error
        # Receivers get exactly what the sender gives away, so the sums stay. The error is not
        # mass: it only notes what of the numerator has not been offered yet.
        return [Offer(receivers, turn.payload, turn.sent)]

    def read(self, state: E, sender: Rank, message: Message) -> Tensor:
        return self.compressor.decompress(message.payload, state.params.numel())


@dataclass(frozen=True, kw_only=True)
class SparsePush(ErrorFeedbackPush[SparsePushState]):
    r"""Push-sum with compressed numerators; only the sender remembers the error.

    In each round worker :math:`i` takes `local_steps` SGD steps from :math:`z_i = x_i / w_i` to
    :math:`z_i'` and sets :math:`x_i = w_i z_i'`. Then, with compressor :math:`C`, error memory
    :math:`e_i`, consensus step :math:`\gamma` and :math:`p_j = 1 / (1 + d_j)` for a sender
    :math:`j` that has :math:`d_j` out-neighbors in this round,

    .. math::
        v_i &= x_i + e_i, \quad q_i = C(v_i), \quad e_i = v_i - q_i \\
        x_i &\leftarrow x_i + \gamma \Bigl(\sum_{j \to i} p_j q_j - d_i p_i q_i\Bigr) \\
        w_i &\leftarrow w_i + \gamma \Bigl(\sum_{j \to i} p_j w_j - d_i p_i w_i\Bigr)

    Weights travel uncompressed. Workers keep no copies of each other's numerators, so links may
    change in each round. Exchanges never change the sums of all :math:`x_i` and of all
    :math:`w_i`. The error memory is not part of these sums: it only records the part of
    :math:`x_i` that has not been offered yet. The estimates do not converge to each other:
    without training, 7 to 14 % of their distance remains with top-k, and most of it with
    random-k. `DifferencePush` has no such floor.

    Without compression and with step 1 this is `StochasticGradientPush`, bit for bit.

    Args:
        topology: See `PushSum`.
        num_rounds: Number of rounds of training and pushing.
        compressor: :math:`C`.
        consensus_step: :math:`\gamma`, in (0, 1]; None for the compressor's own,
            :math:`\sigma` (`Compressor.consensus_step`): 1 without compression, 0.01 for the
            largest 1 % of the entries. Without training, on rings, exponential and complete
            graphs with 1 and 10 % kept, steps of 0.5 to 1 :math:`\sigma` bring workers closest
            together. Random-k diverges at :math:`2 \sigma`, and top-k at 5 to 8 :math:`\sigma`.
        local_steps: See `PushSum`.
        resend_after: See `PushSum`.
        timeout: See `PushSum`.
        seed: Seeds compressors that draw at random.

    Raises:
        ValueError: If some worker cannot reach all others, or a number is out of range.

    References:
        Aketi, Singh & Rabaey, "Sparse-Push: Communication- & Energy-Efficient Decentralized
        Distributed Learning over Directed & Time-Varying Graphs with non-IID Datasets", 2021,
        arXiv:2102.05715. The update rule is reconstructed from the first author's later code;
        there, too, the local optimizer works on :math:`z` and the result is multiplied by
        :math:`w`. Departures: any compressor, applied to the whole vector unless it is a
        `PerLayer`; several local steps; lost messages and workers.
    """

    def init(self, rank: Rank, params: Tensor) -> SparsePushState:
        self.compressor.warn_of_step(self.consensus_step, rank, params.numel())
        return SparsePushState(rank=rank, params=params, error=torch.zeros_like(params))
