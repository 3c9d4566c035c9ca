"""One model in stages on several machines: the base of decoupled and pipelined training.

Ranks 0 to `num_first - 1` hold the first stage and have the data; each further rank holds one
stage. Batches go up as activations with labels. Answers come down, with or without a gradient.
A worker has at most `max_passed` unanswered batches above it, so a slow stage slows down the
stages below it, and memory stays bounded.

Another algorithm, `inner`, keeps the models of the first stage's workers together. The inner
algorithm requests training and exchanges the first stage's parameters as if they were a whole
model. Its requests are carried out batch by batch, and each batch goes up.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from edgegossip.algorithms.stages.state import Piece, StageState
from edgegossip.algorithms.stages.wire import (
    Precision,
    Shape,
    check_batch,
    is_of_stages,
    kind_down,
    kind_end,
    kind_up,
)
from edgegossip.contract import (
    WORKER,
    Algorithm,
    Assigned,
    Effect,
    Event,
    Finish,
    Message,
    MessageSpec,
    Payload,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    SetTimer,
    Setting,
    Started,
    TimerFired,
    Train,
    Trained,
    Traits,
    WorkerJoined,
    WorkerLost,
    check_ranges,
)

_NO_ANSWER, _END, _LEFT_ALONE = "no answer", "end", "left alone"
_PATIENCE: Seconds = 600.0
"""Time in which a lost stage, or all lost workers below, may be restarted."""
_MOST_TOLD = 20
"""Announcements of an end; by then, the stage above has heard of it or is lost."""
_MOST_DOUBLINGS = 16
_NUMBERS_A_SECOND = 1e6
"""Batch numbers begin at the start time times this rate, which no stage reaches."""
_SPREAD = 2**52
"""Range of random numbers added to this on a network, so that no two lives share a number."""
_MOST_A_LIFE = 2**32
"""Number of batches that no life reaches; numbers further apart belong to two lives."""


@dataclass(frozen=True, kw_only=True)
class Stages(Algorithm[StageState]):
    """Base of algorithms that train one model in stages.

    The workers of the first stage count samples and rounds. The other workers adopt the latest
    round that they have heard of, and its learning rate. A stage without its own loss reports a
    loss of 0. A batch costs its stage's share of the whole model's work: a third for the
    forward pass and two thirds for the backward pass.

    An answer counts only for a batch that waits for it, so no worker trains on the gradient of
    another batch. :doc:`Stages </docs/stages>` describes what happens when a stage or a message
    is lost.

    Args:
        inner: Algorithm that trains the `num_first` workers of the first stage and keeps their
            models together; `Alone` for one worker.
        boundaries: Shapes of a sample's activations between each stage and the next, as
            `edgegossip.boundaries` returns them; one fewer than stages.
        num_classes: Number of classes; labels must be below it.
        num_first: Number of workers that hold the first stage, at least 1.
        max_batch: Maximum number of samples in a batch; the last batch of a pass may have one
            sample more than the batch size.
        precision: Precision of activations and gradients in transit: "float32"; "bfloat16",
            with an error of at most 1/256 of each value; or "int8", with an error of at most
            half of 1/127 of the largest value.
        forget_after: Seconds without any answer after which unanswered batches are given up;
            doubled after each failure, halved after each answer. None never gives up; safe only
            on lossless links.

    Raises:
        ValueError: If a number is out of range, there is no boundary, or `inner` has a server
            or a different number of workers.
    """

    inner: Algorithm[Any]
    boundaries: tuple[Shape, ...]
    num_classes: int
    num_first: int = 1
    max_batch: int = 64
    precision: str = "float32"
    forget_after: Seconds | None = None

    def __post_init__(self) -> None:
        if not self.boundaries:
            raise ValueError("boundaries must name at least one shape; cut the model first")
        check_ranges(self, num_classes="at least 1", num_first="at least 1")
        check_ranges(self, max_batch="at least 1", forget_after="above 0 or None")
        Precision(self.precision)
        if flat := [shape for shape in self.boundaries if not shape or min(shape) < 1]:
            raise ValueError(
                f"boundaries must be shapes of lengths of at least 1, got {flat[0]}"
            )
        others = {self.inner.role(rank) for rank in range(self.num_first)} - {WORKER}
        if others:
            raise ValueError(
                f"inner has workers that are {min(each.name for each in others)!r}; it must be "
                "an algorithm whose workers all train, such as Alone or Gossip"
            )
        topology = self.inner.traits.topology
        if topology is not None and topology.num_workers != self.num_first:
            raise ValueError(
                f"inner is for {topology.num_workers} workers, but num_first is "
                f"{self.num_first}; it runs only the workers of the first stage"
            )

    # For algorithms to define.

    @abstractmethod
    def max_passed(self, stage: int) -> int:
        """Return the maximum number of batches that a worker of this stage may have above
        it.
        """

    @abstractmethod
    def next_work(self, state: StageState) -> Train | None:
        """Return the next training request; None to wait."""

    @abstractmethod
    def learn(self, state: StageState, event: Trained, now: Seconds) -> list[Effect]:
        """Handle finished training, and send its results."""

    @abstractmethod
    def take_answer(
        self, state: StageState, number: int, gradient: Tensor | None
    ) -> list[Effect]:
        """Handle an answer to batch `number`, which was pending."""

    @abstractmethod
    def give_up(self, state: StageState) -> list[Effect]:
        """Forget all batches sent up; they will not be answered."""

    # Ranks and stages.

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return len(self.boundaries) + 1

    @property
    def num_workers(self) -> int:
        """Number of ranks in a run."""
        return self.num_first + self.num_stages - 1

    def stage(self, rank: Rank) -> int:
        """Return the stage of `rank`, from 0."""
        return max(0, rank - self.num_first + 1)

    def above(self, rank: Rank) -> Rank | None:
        """Return the rank of the next stage; None for the last."""
        rank = self.num_first + self.stage(rank)
        return rank if rank < self.num_workers else None

    @property
    def traits(self) -> Traits:
        """Traits of the inner algorithm without its graph, which covers only the first
        stage.
        """
        return replace(self.inner.traits, topology=None)

    def role(self, rank: Rank) -> Role:
        stage = self.stage(rank)
        return Role(f"stage-{stage}", has_data=stage == 0)

    def warnings(self, setting: Setting) -> list[str]:
        """List the inner algorithm's warnings, and one about lost messages."""
        found = self.inner.warnings(setting)
        if setting.drops_messages and self.forget_after is None:
            found.append(
                "the network loses messages, and a stage waits forever for a lost "
                "answer; set forget_after"
            )
        return found

    # Messages.

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """Activations up and answers down at each boundary; the inner algorithm's messages."""
        precision, ahead = Precision(self.precision), self.inner.traits.num_rounds
        specs = dict(self.inner.schema(params))
        for number, shape in enumerate(self.boundaries):
            up, down = precision.messages(shape, self.max_batch, self.num_classes, ahead)
            specs |= {kind_up(number): up, kind_down(number): down}
            specs[kind_end(number)] = MessageSpec(max_round=ahead)
        return specs

    def send_up(
        self, state: StageState, number: int, outputs: Payload, *, wants_gradient: bool
    ) -> list[Effect]:
        """Send batch `number` to the next stage, if it is reachable.

        Raises:
            LocalProtocolError: If no receiver would accept the trainer's outputs.
        """
        receiver = self.above(state.rank)
        if receiver is None:
            return []
        stage = self.stage(state.rank)
        check_batch(stage, outputs, self.boundaries[stage], self.max_batch, self.num_classes)
        if receiver in state.lost:
            return []  # the caller decides whether it can go on without an answer
        values = Precision(self.precision).encode("activations", outputs["activations"])
        payload = {**values, "labels": outputs["labels"]}
        numbers = {"batch": number, "wants_gradient": int(wants_gradient)}
        kind = kind_up(self.stage(state.rank))
        return [Send(receiver, Message(kind, state.round, payload, numbers))]

    def answer(
        self, state: StageState, number: int, gradient: Tensor | None = None
    ) -> list[Effect]:
        """Answer the sender of batch `number`, with the gradient if the sender wants it."""
        if number not in state.origins:
            return []  # own data, or the batch of a liar
        sender, asked = state.origins.pop(number)
        payload: Payload = {}
        if gradient is not None and asked["wants_gradient"]:
            payload = Precision(self.precision).encode("gradient", gradient)
        kind = kind_down(self.stage(state.rank) - 1)
        return [Send(sender, Message(kind, state.round, payload, {"batch": asked["batch"]}))]

    # Events.

    def init(self, rank: Rank, params: Tensor) -> StageState:
        inner = self.inner.init(rank, params) if self.stage(rank) == 0 else None
        return StageState(rank=rank, params=params, inner=inner)

    def handle(self, state: StageState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Trained():
                effects = self._account(state, event, now)
            case Received(sender, message):
                effects = self._receive(state, sender, message, now)
            case TimerFired(name) if name == _NO_ANSWER:
                state.num_in_vain += 1
                effects = self._give_up(state)
            case TimerFired(name) if name == _END:
                effects = self._end(state, now)
            # The wait of a worker that has ended; `_end_if_done` looks after the others.
            case TimerFired(name) if name == _LEFT_ALONE and state.has_ended:
                effects = [Finish()]
            case WorkerLost(rank) | WorkerJoined(rank):
                effects = self._notice(state, event, rank, now)
            case _:
                if isinstance(event, Started):
                    # An answer to a batch of an earlier life must not count for a batch of this
                    # life, even if the clock has restarted.
                    state.next_batch = int(now * _NUMBERS_A_SECOND) + event.life % _SPREAD
                    state.left_alone_since = None
                    # Workers of the first stage that exchange messages tell a returned one
                    # their round. Otherwise the stages above know the round that it had
                    # reached.
                    is_known = self.inner.traits.topology is not None
                    state.asks_round = event.has_rejoined and not is_known
                effects = self._drive(state, event, now)
        # Any event may have brought a batch or an answer, or ended the training in progress.
        if not state.is_training and (request := self.next_work(state)) is not None:
            state.is_training = True
            effects.append(request)
        state.measure_queues()
        # Any event may have been the last that this stage waited for.
        return [*effects, *self._end_if_done(state, now)]

    def _account(self, state: StageState, event: Trained, now: Seconds) -> list[Effect]:
        state.is_training = False
        state.params = event.params
        if event.has_gone_back:
            return self._go_back(state, event, now)
        state.num_trained += 1
        effects = self.learn(state, event, now)
        effects += state.note_training(self.stage(state.rank), event)
        if state.pending:
            effects += self._watch(state, now)
        # Last, because the inner algorithm may ask for the next piece, or end the run.
        if state.piece is not None and state.piece.is_done:
            piece, state.piece = state.piece, None
            effects += self._drive(state, piece.trained(state.params), now)
        return effects

    def _go_back(self, state: StageState, event: Trained, now: Seconds) -> list[Effect]:
        """Drop progress made from unsound parameters."""
        effects = [*self._give_up(state), *self.answer(state, state.present)]
        # These answers belong to the same batches, or to later ones.
        state.answers.clear()
        for number in [*state.origins]:
            effects += self.answer(state, number)
        if state.piece is None:
            return effects
        state.piece = None
        return [*effects, *self._drive(state, event, now)]

    def _drive(self, state: StageState, event: Event, now: Seconds) -> list[Effect]:
        """Hand `event` to the first stage's own algorithm; its training request becomes a
        piece.
        """
        if state.inner is None:
            return []
        if isinstance(event, Started | Assigned):
            state.num_samples = event.num_samples
        effects: list[Effect] = []
        for effect in self.inner.handle(state.inner, event, now):
            if isinstance(effect, Train):
                # Not carried out as it is: the work goes up batch by batch.
                state.piece = Piece.of(effect, state.num_samples, now)
                state.params = effect.params
            elif isinstance(effect, Finish):
                effects += self._finish(state, now)
            else:
                effects.append(effect)
        state.round = state.inner.round
        if state.piece is None:
            # During a piece, this stage's own parameters are ahead of the inner algorithm's.
            state.params = state.inner.params
        return effects

    def _end_if_done(self, state: StageState, now: Seconds) -> list[Effect]:
        """Finish once all workers below have finished or are lost; until then they might need
        this stage.
        """
        if state.has_ended or self.stage(state.rank) == 0:
            return []
        below = [r for r in range(self.num_workers) if self.above(r) == state.rank]
        if not all(r in state.ended or r in state.lost for r in below):
            if state.left_alone_since is None:
                return []
            # A host takes a stage with a timer for one that goes on by itself, so it would not
            # announce a stage that waits for batches.
            state.left_alone_since = None
            return [SetTimer(_LEFT_ALONE, math.inf)]
        if state.waiting or state.is_training or state.origins:
            return []  # their batches have priority
        if state.ended:
            return self._finish(state, now)
        # All are lost, but may be restarting.
        if state.left_alone_since is None:
            state.left_alone_since = now
            return [SetTimer(_LEFT_ALONE, now + _PATIENCE)]
        has_waited = now >= state.left_alone_since + _PATIENCE
        return self._finish(state, now) if has_waited else []

    def _finish(self, state: StageState, now: Seconds) -> list[Effect]:
        """Stop sending and finish, but wait for a lost stage above.

        No other worker has that stage's part of the model, and when the stage returns, it needs
        a partner to continue from its checkpoint.
        """
        is_missed = self.above(state.rank) in state.lost
        wait = SetTimer(_LEFT_ALONE, now + _PATIENCE)
        return [wait if is_missed else Finish(), *self._end(state, now)]

    def _end(self, state: StageState, now: Seconds) -> list[Effect]:
        """Announce the end to the stage above, repeatedly on lossy links."""
        stage, above = self.stage(state.rank), self.above(state.rank)
        end: list[Effect] = []
        if state.num_trained and not state.has_ended:
            end.append(state.note(stage, {}))
        state.has_ended = True
        if above is None:
            return end
        state.num_told += 1
        end.append(Send(above, Message(kind_end(stage), state.round)))
        if self.forget_after is not None and state.num_told < _MOST_TOLD:
            end.append(SetTimer(_END, now + self.forget_after))
        return end

    def _receive(
        self, state: StageState, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        stage, kind = self.stage(state.rank), message.kind
        if kind == kind_up(stage - 1) and self.above(sender) == state.rank:
            return self._take_batch(state, sender, message)
        if kind == kind_down(stage) and sender == self.above(state.rank):
            return self._take_answer(state, sender, message, now)
        if kind == kind_end(stage - 1) and self.above(sender) == state.rank:
            state.ended[sender] = None
            return []
        if is_of_stages(kind) or sender >= self.num_first:
            return []  # no worker may send this
        return self._drive(state, Received(sender, message), now)

    def _take_batch(self, state: StageState, sender: Rank, message: Message) -> list[Effect]:
        labels, activations = (message.payload[name] for name in ("labels", "activations"))
        if not len(labels) or len(labels) != len(activations):
            return []  # the schema cannot compare the lengths of two tensors
        state.waiting.append((sender, message))
        own = [each for each in state.waiting if each[0] == sender]
        if len(own) > self.max_passed(self.stage(sender)):
            # The sender has given the oldest one up, or it would not have sent another.
            newest = message.numbers["batch"]

            def age(waiting: tuple[Rank, Message]) -> tuple[bool, float]:
                number = waiting[1].numbers["batch"]
                return abs(number - newest) < _MOST_A_LIFE, number  # earlier lives come first

            oldest = min(own, key=age)
            state.waiting = [each for each in state.waiting if each is not oldest]
        # Stages above the first have no rounds of their own.
        state.round = max(state.round, message.round)
        return []

    def next_waiting(self, state: StageState) -> Payload:
        """Take the oldest waiting batch for training."""
        sender, message = state.waiting.pop(0)
        state.origins[state.next_batch] = (sender, message.numbers)
        values = Precision(self.precision).decode("activations", message.payload)
        return {"activations": values, "labels": message.payload["labels"]}

    def _take_answer(
        self, state: StageState, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        number = int(message.numbers["batch"])
        if number not in state.pending:
            return []  # it was given up
        gradient = None
        if "gradient" in message.payload:
            gradient = Precision(self.precision).decode("gradient", message.payload)
        effects = self.take_answer(state, number, gradient)
        if state.asks_round:
            # The stages above kept the round that this worker had reached before its restart.
            state.asks_round = False
            round = Message("round", message.round)
            effects += self._drive(state, Received(sender, round), now)
        return [*effects, *self._watch(state, now)]

    def _watch(self, state: StageState, now: Seconds) -> list[Effect]:
        """Restart the wait for the next answer, if an answer is due."""
        if self.forget_after is None:
            return []
        if not state.pending:
            return [SetTimer(_NO_ANSWER, math.inf)]  # cancels it
        # If answers take longer than `forget_after`, every batch would be given up forever.
        wait = self.forget_after * 2.0 ** min(state.num_in_vain, _MOST_DOUBLINGS)
        return [SetTimer(_NO_ANSWER, now + wait)]

    def _give_up(self, state: StageState) -> list[Effect]:
        num_given_up = len(state.pending)
        state.num_given_up += num_given_up
        effects = self.give_up(state)
        if num_given_up:
            effects.append(state.note(self.stage(state.rank), {}))
        return [*effects, *self._watch(state, 0.0)]

    def _notice(
        self, state: StageState, event: WorkerLost | WorkerJoined, rank: Rank, now: Seconds
    ) -> list[Effect]:
        if isinstance(event, WorkerLost):
            state.lost[rank] = None
            if event.has_lied:
                state.forget(rank)
        else:
            state.lost.pop(rank, None)
        effects: list[Effect] = []
        if rank == self.above(state.rank):
            effects = self._give_up(state)  # batches and answers in flight are lost
            if state.has_ended and isinstance(event, WorkerJoined):
                effects += self._finish(state, now)
        if rank < self.num_first and state.inner is not None:
            effects += self._drive(state, event, now)
        return effects
