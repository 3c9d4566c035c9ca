"""Pipelined back-propagation: the true gradient comes back through all stages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.algorithms.stages.stages import Stages
from edgegossip.algorithms.stages.state import StageState
from edgegossip.contract import (
    Effect,
    Event,
    Payload,
    Seconds,
    ServerLostError,
    SetTimer,
    Setting,
    Steps,
    TimerFired,
    Train,
    Trained,
    check_ranges,
)

_PATIENCE = "patience"


@dataclass(frozen=True, kw_only=True)
class Pipelined(Stages):
    r"""Send batches up one after another; each stage updates when a gradient comes back.

    A stage runs backward passes before forward passes (one forward, one backward, "1F1B"). It
    begins a forward pass while, per first-stage worker, fewer than max(1, `in_flight` - stage
    number) batches are above it. A backward pass uses the weights of its forward pass (weight
    stashing). Each gradient is therefore exact for those weights, and stale for the weights it
    is applied to.

    - ``in_flight=1`` is naive model parallelism: one machine works at a time, and the result
      equals training of the whole model, bit for bit, except for dropout above the first stage,
      which is drawn by rank.
    - ``in_flight=num_stages``, the default, keeps every stage busy if all are equally fast and
      links take no time; slower links need a higher number.
    - One batch in flight with several first-stage workers is split learning; if `inner`
      averages these workers' models, it is SplitFed.

    A lost stage stops all stages below it; the stage directly below raises `ServerLostError`
    after `patience`. If the lost stage comes back earlier, batches that were in flight start
    again.

    Args:
        inner: See `Stages`.
        boundaries: See `Stages`.
        num_classes: See `Stages`.
        num_first: See `Stages`.
        max_batch: See `Stages`.
        precision: See `Stages`.
        forget_after: See `Stages`.
        in_flight: Maximum number of a first-stage worker's batches in flight, at least 1; None
            for the number of stages.
        patience: Seconds for which a stage waits for a lost stage above.

    Raises:
        ValueError: If a number is out of range, or in the other cases of `Stages`.

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
        in_flight = self.num_stages if self.in_flight is None else self.in_flight
        # Each stage further up holds one batch less, so that all are busy with as few stale
        # gradients as possible. All first workers' batches meet in the second stage.
        num_below = self.num_first if stage else 1
        return num_below * max(1, in_flight - stage)

    def warnings(self, setting: Setting) -> list[str]:
        """List the warnings of `Stages`, and one about an inner algorithm that waits for
        batches in flight.
        """
        found, local_steps = super().warnings(setting), self.inner.traits.local_steps
        if local_steps is not None and local_steps < self.max_passed(0):
            found.append(
                f"the first stage finishes its {local_steps} local steps before it begins "
                f"more, so no more batches are in flight, although {self.max_passed(0)} are "
                "allowed; raise the inner algorithm's local_steps, or lower in_flight"
            )
        return found

    def handle(self, state: StageState, event: Event, now: Seconds) -> list[Effect]:
        if isinstance(event, TimerFired) and event.name == _PATIENCE:
            if self._is_stuck(state):
                raise ServerLostError(
                    f"worker {state.rank} has waited {self.patience:g} s for worker "
                    f"{self.above(state.rank)}, which holds the next stage and is lost; start "
                    "it again, and continue with --resume"
                )
            return []
        # The clock runs only while the stage has work that it cannot do: one that waits for
        # batches from below is not stuck.
        was_stuck = self._is_stuck(state)
        effects = super().handle(state, event, now)
        is_stuck = self._is_stuck(state)
        if is_stuck != was_stuck:
            at = now + self.patience if is_stuck else math.inf
            effects.append(SetTimer(_PATIENCE, at))
        return effects

    def _is_stuck(self, state: StageState) -> bool:
        """Whether pending work must wait for the lost stage above."""
        is_lost = self.above(state.rank) in state.lost
        return is_lost and (state.piece is not None or bool(state.waiting))

    def next_work(self, state: StageState) -> Train | None:
        # Backward before forward ("1F1B"): it frees memory, and the stage below waits for it.
        if state.answers:
            answer = state.answers.pop(0)
            state.present = int(answer["batch"])
            return self._work(state, answer)
        above, piece = self.above(state.rank), state.piece
        if above in state.lost or len(state.pending) >= self.max_passed(self.stage(state.rank)):
            return None
        if not state.waiting if piece is None else not piece.wants_more:
            return None
        state.present = state.next_batch
        # The trainer keeps the weights of each forward pass until its answer is used. The list
        # of those in flight tells it which it may forget.
        numbers = {
            "batch": torch.tensor(state.present),
            "passed": torch.tensor([*state.pending], dtype=torch.int64),
        }
        batch = self.next_waiting(state) if piece is None else {}
        return state.one_batch({**batch, **numbers})

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
        outputs, piece, number = event.outputs, state.piece, state.present
        # The last stage does both passes at once; the others tell them apart by the number.
        is_new = number == state.next_batch
        if is_new:
            state.next_batch += 1
        if is_new and self.above(state.rank) is not None:  # a forward pass
            up = self.send_up(state, number, outputs, wants_gradient=True)
            num_samples = len(outputs["labels"])
            if piece is not None:
                # Counted now, so that no more batches begin than the piece has.
                piece.num_samples += num_samples
                piece.cost += event.cost
            if up:
                state.pending[number] = {"labels": outputs["labels"]}
                return up
            return self._drop(state, number, num_samples)
        state.num_batches += 1
        if piece is not None:
            piece.account(event, now)
        return self.answer(state, number, outputs.get("gradient"))

    def take_answer(
        self, state: StageState, number: int, gradient: Tensor | None
    ) -> list[Effect]:
        # A stage above that gave the batch up answers without a gradient.
        num_samples = len(state.pending.pop(number)["labels"])
        if gradient is None or len(gradient) != num_samples:
            return self._drop(state, number, num_samples)
        state.was_answered()
        state.answers.append({"batch": torch.tensor(number), "gradient": gradient})
        return []

    def give_up(self, state: StageState) -> list[Effect]:
        # Their senders below wait for an answer, too.
        pending, state.pending = state.pending, {}
        return [
            effect
            for number, kept in pending.items()
            for effect in self._drop(state, number, len(kept["labels"]))
        ]

    def _drop(self, state: StageState, number: int, num_samples: int) -> list[Effect]:
        """Uncount a batch that has no gradient, and answer its sender without one."""
        if state.piece is not None:
            state.piece.drop(num_samples)
        return self.answer(state, number)
