"""The state of a worker that holds one stage of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from edgegossip.contract import (
    Effect,
    Epochs,
    Message,
    Note,
    Payload,
    Rank,
    Steps,
    Train,
    Trained,
    WorkerState,
)

_NOTED_EVERY = 10
_SMALLEST = 1e-12
"""Share of a pass that is rounded up to one batch."""


@dataclass(slots=True, kw_only=True)
class Piece:
    """Work requested by the first stage's own algorithm, done batch by batch.

    Attributes:
        request: The request for this work.
        num_due: Number of samples until the work is done; infinite if the work is a number of
            steps.
        num_begun: Number of batches begun.
        num_steps: Number of batches done.
        num_samples: Number of samples in the batches so far.
        seconds: Duration so far, including waits.
        began: Start time.
        loss: Sum of the losses over the batches.
        cost: As in `Trained`.
    """

    request: Train
    num_due: float
    began: float
    num_begun: int = 0
    num_steps: int = 0
    num_samples: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    cost: float = 0.0

    @classmethod
    def of(cls, request: Train, num_samples: int, now: float) -> Piece:
        """Build the piece for `request`, on a worker with this many samples."""
        num_due = float("inf")
        if isinstance(request.work, Epochs):
            # A pass has whole samples, at least two.
            whole = max(min(2, num_samples), round(request.keep_ratio * num_samples))
            num_due = request.work.share * whole - 1e-9  # shares of a pass add up inexactly
        return cls(request=request, num_due=num_due, began=now)

    @property
    def wants_more(self) -> bool:
        """Whether another batch must begin."""
        work = self.request.work
        if isinstance(work, Steps):
            return self.num_begun < work.num_steps
        return self.num_samples < self.num_due

    def one_batch(self, params: Tensor, inputs: Payload) -> Train:
        """Ask for a step on the next batch, from `params`."""
        is_first = self.num_begun == 0 and self.num_samples == 0
        self.num_begun += 1
        # A pass visits all samples once, so its batches are shares of it and not free steps.
        is_pass = isinstance(self.request.work, Epochs)
        return replace(
            self.request,
            params=params,
            work=Epochs(_SMALLEST) if is_pass else Steps(1),
            begins_pass=self.request.begins_pass and is_first,
            inputs=inputs,
        )

    def drop(self, num_samples: int) -> None:
        """Uncount a batch of `num_samples` that got no gradient; another batch replaces it."""
        self.num_begun -= 1
        self.num_samples -= num_samples

    @property
    def is_done(self) -> bool:
        """Whether all requested work is done."""
        work = self.request.work
        if isinstance(work, Steps):
            return self.num_steps >= work.num_steps
        # Begun batches count at once, so a pass is not done before they have come back.
        return self.num_samples >= self.num_due and self.num_steps >= self.num_begun

    def account(self, event: Trained, now: float) -> None:
        """Count a batch that is done."""
        self.num_steps += 1
        self.num_samples += event.num_samples
        self.loss += event.loss
        self.cost += event.cost
        self.seconds = now - self.began

    def trained(self, params: Tensor) -> Trained:
        """Build the answer to the request."""
        return Trained(
            params=params,
            before=self.request.params,
            num_samples=self.num_samples,
            num_steps=self.num_steps,
            seconds=self.seconds,
            loss=self.loss / self.num_steps,
            cost=self.cost,
        )


@dataclass(slots=True, kw_only=True)
class StageState(WorkerState):
    """State of a worker: its stage's `params`, and the first stage's last known `round`.

    Attributes:
        inner: State of the first stage's own algorithm; None in other stages.
        num_samples: Training samples of this worker.
        piece: Current work for that algorithm; None without any.
        next_batch: Local number of the next batch.
        pending: Unanswered batches sent up, by number, oldest first, with the data that their
            answers need.
        answers: Answers that have not been used yet.
        waiting: Batches from below that have not been used for training yet.
        origins: Sender and message numbers of each unanswered batch, by its local number.
        present: Number of the current batch.
        is_training: Whether a `Train` is running.
        num_trained: Number of finished `Train` requests.
        num_batches: Number of batches that have updated the parameters.
        most_waiting: Maximum length of `waiting` since the last note.
        most_pending: Maximum length of `pending` since the last note.
        lost: Workers that cannot be reached, as keys.
        num_given_up: Number of batches whose answer did not arrive in time.
        num_in_vain: Number of timeouts, minus one for each later answer; at least 0.
        ended: Workers below that will send nothing more, as keys.
        has_ended: Whether this worker will send nothing more.
        left_alone_since: Time since which all workers below have been lost; None while any is
            reachable.
        num_told: Number of times that the worker has announced its end.
        asks_round: Whether the worker has come back and will continue in the round of the next
            answer.
    """

    inner: Any = None
    num_samples: int = 0
    piece: Piece | None = None
    next_batch: int = 0
    pending: dict[int, Payload] = field(default_factory=dict)
    answers: list[Payload] = field(default_factory=list)
    waiting: list[tuple[Rank, Message]] = field(default_factory=list)
    origins: dict[int, tuple[Rank, Mapping[str, float]]] = field(default_factory=dict)
    present: int = 0
    is_training: bool = False
    num_trained: int = 0
    num_batches: int = 0
    most_waiting: int = 0
    most_pending: int = 0
    lost: dict[Rank, None] = field(default_factory=dict)
    num_given_up: int = 0
    num_in_vain: int = 0
    ended: dict[Rank, None] = field(default_factory=dict)
    has_ended: bool = False
    left_alone_since: float | None = None
    num_told: int = 0
    asks_round: bool = False

    def forget(self, liar: Rank) -> None:
        """Drop the batches of `liar` and their answers."""
        self.waiting = [each for each in self.waiting if each[0] != liar]
        # What has gone up already must not train this stage when its answer comes.
        numbers = {number for number, (sender, _) in self.origins.items() if sender == liar}
        for number in numbers:
            del self.origins[number]
            self.pending.pop(number, None)
        self.answers = [
            each for each in self.answers if int(each.get("batch", -1)) not in numbers
        ]

    def measure_queues(self) -> None:
        """Update the maximum lengths of the queues."""
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        self.most_pending = max(self.most_pending, len(self.pending))

    def note_training(self, stage: int, event: Trained) -> list[Effect]:
        """At intervals, note queues together with the trainer's measurements."""
        if self.num_trained % _NOTED_EVERY != 1:
            return []  # a network keeps about ten notes per second
        measured = {n: v for n, v in event.metrics.items() if n == "gradient_cosine"}
        return [self.note(stage, {"loss": event.loss, **measured})]

    def note(self, stage: int, measured: Mapping[str, float]) -> Note:
        """Note queues and counts together with the measurements.

        A stage makes a note at its first training and every tenth after that, when it gives up
        batches, and when it stops sending.

        Fields:
            stage: Number of the stage, from 0.
            num_trained: Finished `Train` requests since the worker started; for `Pipelined`,
                forward and backward passes.
            batches: Batches that have updated its parameters since the worker started.
            waiting, pending: Batches from below that wait, and unanswered batches sent up.
            most_waiting, most_pending: Maxima of these since the previous note.
            given_up: Batches whose answer did not arrive in time, since the worker started.
            loss: Loss of the training just done; 0 for a stage without its own loss.
            gradient_cosine: Cosine between the synthetic and the returned gradient, if they
                were compared.
        """
        self.measure_queues()
        numbers = {
            "stage": stage,
            "num_trained": self.num_trained,
            "batches": self.num_batches,
            "waiting": len(self.waiting),
            "most_waiting": self.most_waiting,
            "pending": len(self.pending),
            "most_pending": self.most_pending,
            "given_up": self.num_given_up,
        }
        self.most_waiting, self.most_pending = len(self.waiting), len(self.pending)
        return Note("stage", {**numbers, **measured})

    def was_answered(self) -> None:
        """Let an answer offset one timeout."""
        self.num_in_vain = max(0, self.num_in_vain - 1)

    def one_batch(self, inputs: Payload) -> Train:
        """Request a step on one batch, for the current piece if there is one."""
        if self.piece is None:
            return Train(self.params, Steps(1), inputs=inputs)
        return self.piece.one_batch(self.params, inputs)

    @property
    def estimate(self) -> Tensor:
        """The current parameters of this worker's stage, [num_params]."""
        # Between two pieces, the inner algorithm may mix, and its estimate counts.
        if self.inner is None or self.piece is not None:
            return self.params
        estimate: Tensor = self.inner.estimate
        return estimate
