"""The ranks that hold the stages of a model, and the messages between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from edgegossip.algorithms.stages.stage_state import StageState
from edgegossip.algorithms.stages.wire import (
    Precision,
    Shape,
    check_batch,
    kind_down,
    kind_end,
    kind_up,
)
from edgegossip.core.algorithm import Algorithm, Setting, Traits
from edgegossip.core.protocol import (
    WORKER,
    Effect,
    Message,
    Payload,
    Rank,
    Role,
    Seconds,
    Send,
)
from edgegossip.core.ranges import check_ranges
from edgegossip.core.schema import MessageSpec


@dataclass(frozen=True, kw_only=True)
class StageLinks(Algorithm[StageState]):
    """The ranks that hold the stages of a model, and the messages between them.

    A worker of the first stage that comes back continues with the others, as `inner` decides;
    answers to its batches from before the restart are ignored. No two lives of a worker use the
    same batch numbers, and an answer counts only for a batch that waits for it, so no worker
    trains on the gradient of another batch. A stage keeps a bounded number of batches from each
    sender, and drops the oldest if more arrive.

    A stage finishes when all workers below it have finished or are lost. If all of them are
    lost, or the next stage above is lost, the stage finishes after ten minutes. A batch whose
    message is lost is given up after `forget_after` (with `Pipelined`, at every stage below),
    and another batch starts.

    Activations and gradients far beyond the usual range are rejected. A batch that a stage
    cannot use counts as a training failure, after which the host goes back to sound parameters.

    The workers of the first stage count samples and rounds. The other workers adopt the latest
    round that they have heard of, and its learning rate. A stage without its own loss reports a
    loss of 0. A batch costs its stage's share of the whole model's work: a third for the
    forward pass and two thirds for the backward pass.

    Args:
        inner: Algorithm that trains the `num_first` workers of the first stage and keeps their
            models together; `Alone` for one worker.
        boundaries: Shapes of a sample's activations between each stage and the next, as
            `learning.stages.cutting.boundaries` returns them; one fewer than stages.
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
            return []
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
            return []
        sender, asked = state.origins.pop(number)
        payload: Payload = {}
        if gradient is not None and asked["wants_gradient"]:
            payload = Precision(self.precision).encode("gradient", gradient)
        kind = kind_down(self.stage(state.rank) - 1)
        return [Send(sender, Message(kind, state.round, payload, {"batch": asked["batch"]}))]
