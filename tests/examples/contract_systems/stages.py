"""Three stages of one model, in the words of the contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Message,
    Payload,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    SetTimer,
    Started,
    Steps,
    TimerFired,
    Train,
    Trained,
    WorkerState,
)
from edgegossip.contract.schema import MessageSpec, TensorSpec


@dataclass(slots=True, kw_only=True)
class StageState(WorkerState):
    """A stage of one model. A batch's number is the `round` of every message about it.

    Attributes:
        jobs: Messages still to be processed.
        job: The one in training.
        unanswered: Payloads that were passed up and have no gradient yet, by batch.
    """

    jobs: list[Message] = field(default_factory=list)
    job: Message | None = None
    unanswered: dict[int, Payload] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stages(Algorithm[StageState]):
    """Stages that train on synthetic gradients (Jaderberg et al., ICML 2017, arXiv:1608.05343).

    A stage passes its activations up and the gradient at its input down, from which the
    predicting network below learns. At most `depth` batches are unanswered, so that a fast
    stage does not flood a slow one; after `timeout` they are given up.
    """

    num_stages: int
    num_rounds: int
    depth: int
    timeout: Seconds

    def role(self, rank: Rank) -> Role:
        return Role(f"stage-{rank}", has_data=rank == 0)

    def init(self, rank: Rank, params: Tensor) -> StageState:
        return StageState(rank=rank, params=params)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        # A stage knows neither the widths of the others nor the size of a batch.
        batch = TensorSpec(torch.float32, (None, None), max_numel=2**20)
        return {
            "activations": MessageSpec({"activations": batch, "labels": batch}),
            "gradient": MessageSpec({"gradient": batch}),
        }

    def handle(self, state: StageState, event: Event, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case Started() if state.rank > 0:
                effects = [Finish()]  # no work of its own; it answers what comes from below
            case Received(_, Message("activations") as message):
                state.jobs.append(message)
            case Received(_, Message("gradient", batch, payload)) if batch in state.unanswered:
                passed_up = state.unanswered.pop(batch)
                state.jobs.append(Message("gradient", batch, {**passed_up, **payload}))
            case TimerFired("unanswered"):
                state.unanswered.clear()
            case Trained():
                state.params = event.params
                effects = self.pass_on(state, event.outputs, now)
        return [*effects, *self.next_job(state)]

    def pass_on(self, state: StageState, outputs: Payload, now: Seconds) -> list[Effect]:
        job, state.job = state.job, None
        if job is None or job.kind == "gradient":
            return []  # the guessing network has learned; nobody waits for that
        state.round += 1
        effects: list[Effect] = []
        if state.rank < self.num_stages - 1:
            up = {name: outputs[name] for name in ("activations", "labels")}
            state.unanswered[job.round] = up
            effects.append(Send(state.rank + 1, Message("activations", job.round, up)))
            effects.append(SetTimer("unanswered", now + self.timeout))
        if state.rank > 0:
            down = {"gradient": outputs["gradient"]}
            effects.append(Send(state.rank - 1, Message("gradient", job.round, down)))
        elif state.round == self.num_rounds:
            effects.append(Finish())
        return effects

    def next_job(self, state: StageState) -> list[Effect]:
        may_draw = state.rank == 0 and state.round < self.num_rounds
        if state.job is None and state.jobs:
            state.job = state.jobs.pop(0)
        elif state.job is None and may_draw and len(state.unanswered) < self.depth:
            state.job = Message("batch", state.round)
        else:
            return []
        return [Train(state.params, Steps(1), inputs=state.job.payload)]
