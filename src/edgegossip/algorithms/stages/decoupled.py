"""Decoupled training in stages: each stage updates at once, without waiting for a gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edgegossip.algorithms.stages.stages import Stages
from edgegossip.algorithms.stages.state import StageState
from edgegossip.contract import Effect, Payload, Seconds, Train, Trained, check_ranges


@dataclass(frozen=True, kw_only=True)
class Decoupled(Stages):
    r"""Update each stage at once, from a local gradient or loss.

    Stage :math:`k` takes a batch of activations :math:`h_{k-1}` with labels :math:`y`, and

    .. code-block:: text

        h_k = f_k(h_{k-1});  send (h_k, y) to stage k + 1
        g_k = M_k(h_k, y)                      # predicted, or from a loss of its own
        update f_k by g_k;  this gives g_{k-1} at its inputs
        send g_{k-1} to stage k - 1            # which fits M_{k-1} to it when it comes

    The last stage has the true loss. The trainer of a stage chooses the gradient to train with:
    see `training.stages`. A stage waits only if too many of its batches are unanswered
    (`max_waiting`). While the stage above it is lost, a stage continues alone and sends
    nothing.

    Args:
        inner: See `Stages`.
        boundaries: See `Stages`.
        num_classes: See `Stages`.
        num_first: See `Stages`.
        max_batch: See `Stages`.
        precision: See `Stages`.
        forget_after: See `Stages`.
        max_waiting: Maximum number of a worker's batches without an answer from the stage
            above.
        gradient_every: Number of batches per returned gradient, at least 1; None returns no
            gradients, as for local losses.

    Raises:
        ValueError: If a number is out of range, or in the other cases of `Stages`.

    References:
        Jaderberg et al., "Decoupled neural interfaces using synthetic gradients", ICML 2017,
        arXiv:1608.05343, section 2: backward unlocking; forward passes are not unlocked.
    """

    max_waiting: int = 4
    gradient_every: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, max_waiting="at least 1", gradient_every="at least 1 or None")

    def max_passed(self, stage: int) -> int:
        return self.max_waiting

    def next_work(self, state: StageState) -> Train | None:
        receiver = self.above(state.rank)
        # A lost stage above answers nothing; this one goes on with its own gradient.
        is_full = len(state.pending) >= self.max_waiting and receiver not in state.lost
        if is_full or (state.piece is None and not state.waiting):
            return None
        state.present = state.next_batch
        batch = self.next_waiting(state) if state.piece is None else {}
        # A returned gradient improves the prediction of later ones, in the same step.
        lesson = state.answers.pop(0) if state.answers else {}
        return state.one_batch({**batch, **lesson})

    def learn(self, state: StageState, event: Trained, now: Seconds) -> list[Effect]:
        if state.piece is not None:
            state.piece.account(event, now)
        number, outputs = state.next_batch, event.outputs
        # The number itself begins at random on a network.
        every, place = self.gradient_every, state.num_batches
        is_due = every is not None and place % every == 0
        state.next_batch += 1
        state.num_batches += 1
        up = self.send_up(state, number, outputs, wants_gradient=is_due)
        if up:
            # The gradient that comes back fits these activations only.
            names = ("activations", "labels") if is_due else ()
            state.pending[number] = {f"fit_{name}": outputs[name] for name in names}
        return [*up, *self.answer(state, number, outputs.get("gradient"))]

    def take_answer(
        self, state: StageState, number: int, gradient: Tensor | None
    ) -> list[Effect]:
        kept = state.pending.pop(number)
        state.was_answered()
        lesson: Payload = {**kept, "fit_gradient": gradient} if gradient is not None else {}
        if gradient is None or not kept or gradient.shape != kept["fit_activations"].shape:
            return []
        # Newest lessons count: old ones belong to weights of long ago.
        state.answers = [*state.answers, lesson][-self.max_waiting :]
        return []

    def give_up(self, state: StageState) -> list[Effect]:
        state.pending.clear()
        return []
