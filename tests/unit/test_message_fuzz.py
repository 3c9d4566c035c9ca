"""Forged messages among the honest ones: what a schema lets in ends, stops and fills nobody."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS, SEVERAL_SERVERS, STAGES
from tests.bad_frames import twist
from tests.worlds import (
    NUM_PARAMS,
    TARGETS,
    ObedientStage,
    Watched,
    loss_of,
    require_bounded,
    stages_in,
)

from edgegossip.algorithms.stages.state import StageState
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Message,
    Rank,
    Received,
    Seconds,
    WorkerState,
)
from edgegossip.contract.schema import MessageSpec
from edgegossip.contract.trainer import Trainer
from edgegossip.net.guard.admission import Admission, Admitted
from edgegossip.net.guard.envelope import Envelope, pack
from edgegossip.net.guard.plausibility import Plausibility
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator
from edgegossip.training.quadratic import QuadraticTrainer

RUN = b"fuzz run"
NUMBERS = (-1, 0, 1, 2, 0.5, 1e30, 2**53 - 1, 2**62, math.nan, math.inf)
UNTIL = 200.0
PARAMS = torch.zeros(NUM_PARAMS)
EACH: dict[str, Algorithm[Any]] = {
    **SEVERAL_SERVERS,
    **{name: replace(each, forget_after=2.0) for name, each in STAGES.items()},
    "decoupled-int8": replace(STAGES["decoupled"], forget_after=2.0, precision="int8"),
    "pipelined-bf16": replace(STAGES["pipelined"], forget_after=2.0, precision="bfloat16"),
}
"""Forged batches may take the place of honest ones, which is as if these were lost."""


def forge(message: Message, schema: Mapping[str, MessageSpec], draw: random.Random) -> Message:
    """Change the kind, the round, a tensor or a number of a message; or repeat it."""
    payload, numbers = dict(message.payload), dict(message.numbers)
    match draw.randrange(6):
        case 0:
            return replace(message, kind=draw.choice([*schema]))
        case 1:
            return replace(message, round=draw.choice((0, 1, message.round + 1, 2**40)))
        case 2 if payload:
            name = draw.choice([*payload])
            payload[name] = twist(payload[name], draw)
        case 3 if payload:
            name = draw.choice([*payload])
            payload[name] = torch.full_like(payload[name], draw.choice((0, 1, 100)))
        case 4 if numbers:
            name = draw.choice([*numbers])
            numbers[name] = draw.choice((*NUMBERS, numbers[name] + 1, numbers[name] - 1))
        case 5 if payload or numbers:
            for each in (payload, numbers):
                each.pop(draw.choice([*each, None]), None)
    return Message(message.kind, message.round, payload, numbers)


@dataclass(frozen=True)
class Forged(Watched):
    """An algorithm whose workers get forged messages besides, as far as a network lets them in.

    Attributes:
        liars: In whose names.
        draw: Says which.
        admissions: Of each worker.
        num_let_in: Forged messages that came through, and those that did not.
    """

    liars: Sequence[Rank] = range(NUM_WORKERS)
    draw: random.Random = field(default_factory=random.Random)
    admissions: dict[Rank, Admission] = field(default_factory=dict)
    num_let_in: list[bool] = field(default_factory=list)

    @property
    def traits(self) -> Any:  # noqa: ANN401
        return self.inner.traits

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        effects = super().handle(state, event, now)
        if isinstance(event, Received):
            for _ in range(2):
                effects += self._lie_to(state, event, now)
        if isinstance(state, StageState):
            stages = stages_in(self.inner)
            assert stages is not None
            require_bounded(stages, state)
        return effects

    def _lie_to(self, state: WorkerState, event: Received, now: Seconds) -> list[Effect]:
        admission = self.admissions.setdefault(state.rank, self._admission(state.rank))
        others = [rank for rank in self.liars if rank != state.rank]
        sender = self.draw.choice(([event.sender] if event.sender in others else []) + others)
        message = forge(event.message, self.inner.schema(PARAMS), self.draw)
        try:
            frame = bytearray().join(pack(Envelope(RUN, sender, 1, 1, 1), message))
        except ValueError:
            return []  # nobody can send that
        verdict = admission.admit(sender, frame, state.round)
        self.num_let_in.append(isinstance(verdict, Admitted))
        if not isinstance(verdict, Admitted):
            return []
        return super().handle(state, Received(sender, verdict.message), now)

    def _admission(self, rank: Rank) -> Admission:
        schema = self.inner.schema(PARAMS)
        others = [each for each in range(NUM_WORKERS) if each != rank]
        return Admission(
            run=RUN,
            rank=rank,
            num_workers=NUM_WORKERS,
            schema=schema,
            plausibility=Plausibility(
                schema,
                PARAMS,
                rank,
                present=lambda: others,
                senders=lambda: others,
                role=lambda each: self.inner.role(each).name,
            ),
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algorithm", EACH.values(), ids=EACH)
def test_forged_messages_end_nobody_and_fill_nobody(
    algorithm: Algorithm[Any], seed: int
) -> None:
    """Where a lying worker commits to servers, its own commits may then be too old for ever."""
    trusted = algorithm.num_servers if isinstance(algorithm, Shards) else 0
    liars = range(trusted, NUM_WORKERS)
    forged = Forged(algorithm, liars=liars, draw=random.Random(seed))
    stages = stages_in(algorithm)

    def make_trainer(rank: Rank, incarnation: int) -> Trainer:
        if stages is not None:
            return ObedientStage(stages, rank)
        return QuadraticTrainer(TARGETS[rank], 0.1)

    platforms = [Platform(throughput=1.0 + rank) for rank in range(NUM_WORKERS)]
    world = Simulator(forged, platforms, PARAMS, make_trainer, evaluate=loss_of)
    assert world.run(until=UNTIL) or trusted
    assert {*forged.num_let_in} == {True, False}
    for state in world.states:
        assert state.estimate.isfinite().all()
