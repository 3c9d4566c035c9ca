"""Streaming DiLoCo: fragments of the model take turns, and travel while training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from edgegossip.algorithms.fragments import fragment
from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze, DoubleSqueezeState
from edgegossip.contract import (
    Effect,
    Payload,
    Rank,
    Seconds,
    Trained,
    check_counts,
    check_ranges,
)


@dataclass(slots=True, kw_only=True)
class StreamingDiLoCoState(DoubleSqueezeState):
    """State of one worker; `params` is the shared model, :math:`x`.

    Attributes:
        start: First entry of the fragment that `sent_from` is about.
        sent_from: :math:`x` before the exchange, plus what this worker has sent in it, [entries
            of the fragment]; None unless the worker still has to mix in its own entries.
    """

    start: int = 0
    sent_from: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(DoubleSqueeze):
    r"""Exchange one fragment of the model in each round, and train on while it travels.

    The model is cut into :math:`P` fragments, which take turns: a round exchanges one, so each
    is exchanged every :math:`P` rounds, and messages have a :math:`P`-th of the model. Worker
    :math:`i` has :math:`y_i` in the fragment when it sends its progress since the last turn,
    and :math:`z_i` a round of training later, at the latest, when the others' has arrived.
    With outer momentum :math:`\beta` and outer learning rate :math:`\alpha`, for the entries of
    the fragment

    .. math::
        g = \tfrac{1}{n} \sum_i (y_i - x), \quad u \leftarrow \beta u + g, \quad
        x \leftarrow x + \alpha (g + \beta u), \quad \theta_i \leftarrow x + (z_i - y_i)

    The worker keeps what it learned in between: it counts in the fragment's next turn. With
    `local_share` :math:`a`, the worker mixes as in the paper: :math:`\theta_i \leftarrow a z_i
    + (1 - a) x`. The exchange, compression and faults are those of `DoubleSqueeze`, which
    describes how owners combine progress; after the last round of training, rounds without
    training exchange the fragments that are left.

    Without overlap and compression, and with one fragment, this is `DiLoCo` up to rounding.

    Args:
        topology: The complete graph.
        num_rounds: Number of rounds of training.
        local_steps: SGD steps in a round, at least 1: those between two turns of a fragment,
            divided by `num_fragments`.
        compressor: See `DoubleSqueeze`.
        outer_momentum: :math:`\beta`, in [0, 1); acts on each fragment in its own turns.
        outer_lr: :math:`\alpha`, above 0.
        overlap: Whether workers train on during an exchange; False waits after each round.
        timeout: See `Synchronous`.
        seed: Seeds compressors that draw at random.
        num_fragments: :math:`P`, at least 1, and at most a worker's share of the entries.
        local_share: :math:`a`, in [0, 1]; None keeps all of :math:`z_i - y_i`.

    Raises:
        ValueError: If the topology is not complete, a number is out of range, or the model has
            fewer entries than all fragments need.

    References:
        Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a
        Distributed Free Lunch", 2025, arXiv:2501.18512, with the order of steps in the code of
        torchft. Departures: fragments are equal ranges of the flat model, not groups of layers;
        the delay is one round, or more where an exchange takes longer, and not a fixed number
        of steps; by default no step in between is lost (as in "LOSCAR", 2026,
        arXiv:2605.20866), where the paper mixes with a = 0.5; owners combine; compression has
        error feedback and applies both ways; statistics have no momentum.
    """

    overlap: bool = True
    num_fragments: int = 4
    local_share: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "num_fragments")
        check_ranges(self, num_fragments="at least 1", local_share="in [0, 1] or None")

    @property
    def total_rounds(self) -> int:
        return super().total_rounds + self.num_fragments - 1

    def init(self, rank: Rank, params: Tensor) -> StreamingDiLoCoState:
        most = self.chunk_size(params.numel())
        if self.num_fragments > most:
            raise ValueError(
                f"num_fragments must be in [1, {most}] for a model of {params.numel()} entries "
                f"and {self.num_workers} workers, got {self.num_fragments}; each of them owns "
                "an entry of each fragment"
            )
        state = super().init(rank, params)
        return StreamingDiLoCoState(
            rank=rank,
            params=params,
            error=state.error,
            held=state.held,
            holders=state.holders,
        )

    def turn_size(self, numel: int) -> int:
        return -(-self.chunk_size(numel) // self.num_fragments)

    def turn(self, state: DoubleSqueezeState) -> slice:
        size, place = self.chunk_size(state.params.numel()), state.round % self.num_fragments
        return fragment(place, self.num_fragments, size)

    def steps_beside(self, state: DoubleSqueezeState) -> int:
        return self.local_steps  # a round is short, and each fragment's delay counts

    # The paper's mixing.

    def send(
        self, state: DoubleSqueezeState, receivers: Sequence[Rank], now: Seconds
    ) -> list[Effect]:
        if self.local_share is None or not self.is_first(state):
            return super().send(state, receivers, now)
        assert isinstance(state, StreamingDiLoCoState)
        before = state.params + state.error
        effects = super().send(state, receivers, now)
        # A range of every chunk is a range of the model: chunks take its entries in turn.
        turn, n = self.turn(state), self.num_workers
        state.start = turn.start * n
        # What compression has held back is still in `error`, to which training adds.
        state.sent_from = (before - state.error)[state.start : turn.stop * n]
        return effects

    def mix(self, state: DoubleSqueezeState, inbox: Mapping[Rank, Payload]) -> None:
        super().mix(state, inbox)
        # A worker that still trains mixes afterwards: z has all that it learns meanwhile.
        if not self.is_first(state) and not state.is_training:
            self._mix_own(state)

    def learn(self, state: DoubleSqueezeState, trained: Trained) -> None:
        super().learn(state, trained)
        if not state.is_exchanging:
            self._mix_own(state)

    def _mix_own(self, state: DoubleSqueezeState) -> None:
        """Keep a share of the way from the new model to the worker's own, in one fragment."""
        assert isinstance(state, StreamingDiLoCoState)
        if state.sent_from is None:
            return
        assert self.local_share is not None
        here = slice(state.start, state.start + len(state.sent_from))
        state.error = state.error.clone()
        own = state.sent_from + state.error[here]
        state.error[here] = self.local_share * (own - state.params[here])
        state.sent_from = None

    def _start_anew(self, state: DoubleSqueezeState) -> None:
        assert isinstance(state, StreamingDiLoCoState)
        super()._start_anew(state)
        state.sent_from = None
