"""Pipelined back-propagation: the true gradient comes back through all stages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.algorithms.stages.stage_state import StageState
from edgegossip.algorithms.stages.stages import Stages, one_batch
from edgegossip.core.errors import ServerLostError
from edgegossip.core.protocol import (
    Effect,
    Event,
    Payload,
    Rank,
    Seconds,
    SetTimer,
    Steps,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.core.ranges import check_ranges

_PATIENCE = "patience"


@dataclass(frozen=True, kw_only=True)
class Pipelined(Stages):
    r"""Send batches up one after the other; each stage updates when a gradient comes back.

    A stage prefers backward to forward passes (one forward, one backward, "1F1B") and begins a
    forward pass while fewer than `in_flight` less its number of batches are above it. A
    backward pass goes by the weights of its forward pass (weight stashing), so each gradient is
    exact for the weights it was taken at, and late for those it is applied to.

    - ``in_flight=1`` is naive model parallelism: one machine works at a time, and training is
      that of the whole model, bit for bit.
    - ``in_flight=num_stages``, the default, keeps every stage busy where all are equally fast
      and links take no time; slower links want more.
    - One batch in flight and several workers in the first stage is split learning; where
      `inner` averages these workers, SplitFed.

    A stage above that is lost stops those below; they give up after `patience`.

    Args:
        inner: See `Stages`.
        boundaries: See `Stages`.
        num_classes: See `Stages`.
        num_first: See `Stages`.
        max_batch: See `Stages`.
        max_waiting: See `Stages`.
        precision: See `Stages`.
        forget_after: See `Stages`.
        in_flight: Batches of a first-stage worker that are under way, at least 1; None for as
            many as there are stages.
        patience: Seconds for which a stage waits for the one above when it is lost.

    References:
        Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP
        2019, arXiv:1806.03377, section 3. Split learning: Gupta & Raskar, 2018,
        arXiv:1810.06060; SplitFed: Thapa et al., AAAI 2022, arXiv:2004.12088.
    """

    in_flight: int | None = None
    patience: Seconds = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, in_flight="at least 1 or None", patience="above 0")

    def max_passed(self, stage: int) -> int:
        """Say how many batches of a worker in this stage may be above it at a time."""
        in_flight = self.num_stages if self.in_flight is None else self.in_flight
        num_below = self.num_first if stage else 1
        return num_below * max(1, in_flight - stage)

    def handle(self, state: StageState, event: Event, now: Seconds) -> list[Effect]:
        above = self.above(state.rank)
        patience: list[Effect] = []
        match event:
            case WorkerLost(rank) if rank == above:
                patience = [SetTimer(_PATIENCE, now + self.patience)]
            case WorkerJoined(rank) if rank == above:
                patience = [SetTimer(_PATIENCE, math.inf)]
            case TimerFired(name) if name == _PATIENCE:
                self._despair(state, above)
        return [*patience, *super().handle(state, event, now)]

    def _despair(self, state: StageState, above: Rank | None) -> None:
        if above in state.lost and (state.piece is not None or state.waiting):
            raise ServerLostError(
                f"worker {state.rank} has waited {self.patience:g} s for worker {above}, which "
                "holds the next stage and is lost; start it again, and go on with --resume"
            )

    def next_work(self, state: StageState) -> Train | None:
        if state.answers:
            answer = state.answers.pop(0)
            state.present = int(answer["batch"])
            return self._work(state, answer)
        above = self.above(state.rank)
        limit = self.max_passed(self.stage(state.rank))
        if above in state.lost or len(state.pending) + len(state.answers) >= limit:
            return None
        state.present = state.next_batch
        number = {"batch": torch.tensor(state.present)}
        if state.piece is not None:
            if not state.piece.wants_more(state.piece.num_samples):
                return None
            return one_batch(state, number)
        if not state.waiting:
            return None
        return one_batch(state, {**self.next_waiting(state), **number})

    def _work(self, state: StageState, answer: Payload) -> Train:
        if state.piece is None:
            return Train(state.params, Steps(1), inputs=answer)
        request = state.piece.request
        return Train(
            state.params,
            Steps(1),
            inputs=answer,
            rate_ratio=request.rate_ratio,
            momentum=request.momentum,
        )

    def learn(self, state: StageState, event: Trained, now: Seconds) -> list[Effect]:
        outputs, piece = event.outputs, state.piece
        if "activations" in outputs:  # a forward pass
            number = state.next_batch
            state.next_batch += 1
            if piece is not None:
                piece.num_samples += event.num_samples
                piece.cost += event.cost
            up = self.send_up(state, number, outputs, wants_gradient=True)
            if up:
                state.pending[number] = {}
                return up
            return [*self._drop(state), *self.answer(state, number)]
        if piece is not None:
            piece.account(event, now)
        if self.above(state.rank) is None:
            state.next_batch += 1
        return self.answer(state, state.present, outputs.get("gradient"))

    def take_answer(
        self, state: StageState, number: int, gradient: Tensor | None
    ) -> list[Effect]:
        state.pending.pop(number)
        if gradient is None:
            return [*self._drop(state), *self.answer(state, number)]
        state.answers.append({"batch": torch.tensor(number), "gradient": gradient})
        return []

    def give_up(self, state: StageState) -> list[Effect]:
        numbers = [*state.pending]
        state.pending.clear()
        return [e for n in numbers for e in (*self._drop(state), *self.answer(state, n))]

    def _drop(self, state: StageState) -> list[Effect]:
        """Begin another batch in place of one that has no gradient."""
        if state.piece is not None:
            state.piece.num_begun -= 1
        return []
