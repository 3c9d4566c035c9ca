"""DifferencePush: push-sum that sends compressed changes of the estimates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from edgegossip.algorithms.push_sum.push_sum import Offer, PushSum, PushSumState
from edgegossip.algorithms.push_sum.replicas import Replicas
from edgegossip.compression.compressor import (
    Compressor,
)
from edgegossip.contract import Message, Rank, TensorSpec, check_ranges


@dataclass(slots=True, kw_only=True)
class DifferencePushState(PushSumState):
    """State of one worker; `replicas` are the copies shared with its neighbors."""

    replicas: Replicas


@dataclass(frozen=True, kw_only=True)
class DifferencePush(PushSum[DifferencePushState]):
    r"""Push-sum along links whose two ends both follow the sender's estimate.

    In each round worker :math:`i` takes `local_steps` SGD steps from :math:`z_i = x_i / w_i` to
    :math:`z_i'` and sets :math:`x_i = w_i z_i'`. For every link :math:`i \to j` of the round
    both ends have the same replica :math:`r_{ij}` of the sender's estimate. The sender sends a
    compressed difference, both ends correct their replicas, and mass flows according to them:

    .. math::
        r_{ij} &\leftarrow r_{ij} + C(z_i - r_{ij}) \\
        x_i &\leftarrow x_i + \gamma
            \Bigl(\sum_{j \to i} p_j w_j r_{ji} - \sum_{i \to j} p_i w_i r_{ij}\Bigr) \\
        w_i &\leftarrow w_i + \gamma \Bigl(\sum_{j \to i} p_j w_j - d_i p_i w_i\Bigr)

    where :math:`p_j = 1 / (1 + d_j)` for a sender that has :math:`d_j` out-neighbors in this
    round. Weights travel uncompressed. Receivers get exactly the mass that a sender gives away,
    so exchanges never change the sums of all :math:`x_i` and of all :math:`w_i`; no error
    memory is needed. As the workers approach each other, differences and compression errors
    shrink. The estimates therefore reach the mean, unlike those of `SparsePush`.

    `DifferencePush` needs more memory than `SparsePush`: a worker keeps one vector for each
    worker that it sends to, and one for each that it receives from. Receivers of exactly the
    same messages share one vector.

    Without compression and with step 1 this is `StochasticGradientPush` up to rounding.

    Args:
        topology: See `PushSum`.
        num_rounds: Number of rounds of training and pushing.
        compressor: :math:`C`.
        consensus_step: :math:`\gamma`, in (0, 1]; None for the compressor's own, :math:`\sigma`
            (`Compressor.consensus_step`). Under the conditions given for `SparsePush`, the best
            step with top-k is :math:`2 \sigma`, and training diverges at 4 to 32
            :math:`\sigma`. With random-k, half of :math:`\sigma` is best, and :math:`2 \sigma`
            diverges.
        final_rounds: Number of rounds without training after the last training round, at least
            0.
        final_compressor: :math:`C` in the final rounds, with its own step; None for
            `compressor` and its step.
        local_steps: See `PushSum`.
        resend_after: See `PushSum`.
        timeout: See `PushSum`.
        seed: Seeds compressors that draw at random.

    Raises:
        ValueError: If some worker cannot reach all others, or a number is out of range.

    References:
        Our own, based on the replicas of Choco-Gossip (Koloskova, Stich & Jaggi, ICML 2019,
        arXiv:1902.00340). Departures: a replica belongs to a link instead of a worker, and
        follows the estimate instead of the numerator, which never settles on varying graphs.
        For fixed graphs, compare Taheri et al., "Quantized Decentralized Stochastic Learning
        over Directed Graphs", ICML 2020, arXiv:2002.09964.
    """

    kinds: ClassVar[tuple[str, ...]] = ("push", "final")
    estimate_kinds: ClassVar[tuple[str, ...]] = ("push", "final")

    compressor: Compressor
    consensus_step: float | None = None
    final_rounds: int = 0
    final_compressor: Compressor | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, consensus_step="in (0, 1] or None")
        check_ranges(self, final_rounds="at least 0")

    @property
    def total_rounds(self) -> int:
        return self.num_rounds + self.final_rounds

    def init(self, rank: Rank, params: Tensor) -> DifferencePushState:
        self.compressor.warn_of_step(self.consensus_step, rank, params.numel())
        if self.final_compressor is not None:
            self.final_compressor.warn_of_step(None, rank, params.numel())
        return DifferencePushState(rank=rank, params=params, replicas=Replicas(params))

    def step(self, kind: str, numel: int) -> float:
        if kind == "final" and self.final_compressor is not None:
            return self.final_compressor.consensus_step(numel)
        return self.compressor.step_or_default(self.consensus_step, numel)

    def payload_schema(self, kind: str, numel: int) -> Mapping[str, TensorSpec]:
        return self._compressor(kind).schema(numel)

    def offers(self, state: DifferencePushState, receivers: Sequence[Rank]) -> Iterable[Offer]:
        kind = "push" if state.round < self.num_rounds else "final"
        key = (self.seed, state.rank, kind, state.round)
        compressor = self._compressor(kind)
        return state.replicas.offers(state.estimate, receivers, compressor, *key, kind=kind)

    def read(self, state: DifferencePushState, sender: Rank, message: Message) -> Tensor:
        compressor = self._compressor(message.kind)
        return state.replicas.hear(sender, message.payload, compressor)

    def meet(
        self, state: DifferencePushState, neighbor: Rank, estimate: Tensor, *, is_sender: bool
    ) -> None:
        state.replicas.meet(neighbor, estimate, is_sender=is_sender)

    def _compressor(self, kind: str) -> Compressor:
        return self.final_compressor or self.compressor if kind == "final" else self.compressor
