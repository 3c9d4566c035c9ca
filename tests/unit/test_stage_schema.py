"""Whatever fits the schema of stages, in any order, harms none of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tests.effects import of_type
from tests.stage_workers import Worker, batch, each_algorithm, gradient
from tests.trained import trained_event
from tests.worlds import require_bounded

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.contract.protocol import (
    Event,
    Message,
    Payload,
    Rank,
    Received,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)

KINDS = st.sampled_from(["activations-0", "activations-1", "done-0", "done-1"])
WHAT = st.one_of(
    st.tuples(st.just("hear"), st.integers(0, 3), KINDS, st.integers(0, 6), st.integers(1, 3)),
    st.tuples(st.just("train"), st.booleans()),
    st.tuples(st.sampled_from(["lost", "lied", "joined"]), st.integers(0, 3)),
    st.tuples(st.just("fire")),
)


class Storm:
    """Any messages that fit the schema, from anybody, in any order."""

    def __init__(self, algorithm: Stages, rank: Rank) -> None:
        self.worker = Worker(algorithm, rank)
        self.algorithm = algorithm
        self.worker.start()
        self.requests = [each for each in self.worker.effects if isinstance(each, Train)]

    def do(self, what: tuple[Any, ...]) -> None:
        state = self.worker.state
        match what:
            case ("hear", sender, kind, number, length):
                numbers = [*state.pending]
                number = numbers[number % len(numbers)] if numbers and number > 1 else number
                if kind.startswith("done"):
                    message = Message(
                        kind, 0, {"gradient": gradient(num_samples=length)}, {"batch": number}
                    )
                else:
                    numbers_ = {"batch": number, "wants_gradient": number % 2}
                    message = Message(kind, 0, batch(num_samples=length), numbers_)
                event: Event = Received(sender, message)
            case ("train", goes_back):
                if not self.requests:
                    return
                event = self.trained(self.requests.pop(), goes_back)
            case ("lost", rank):
                event = WorkerLost(rank)
            case ("lied", rank):
                event = WorkerLost(rank, has_lied=True)
            case ("joined", rank):
                event = WorkerJoined(rank)
            case _:
                event = TimerFired("no answer")
        self.requests += of_type(self.worker.tell(event), Train)
        assert len(self.requests) <= 1
        require_bounded(self.algorithm, state)

    def trained(self, request: Train, goes_back: bool) -> Trained:
        inputs = request.inputs
        if "gradient" in inputs:
            outputs: Payload = {"gradient": inputs["gradient"]}
        else:
            outputs = {**batch(), **{n: inputs[n] for n in inputs if n in batch()}}
            outputs = {**outputs, "gradient": outputs["activations"]}
        return trained_event(
            request.params + 1, request.params, outputs=outputs, has_gone_back=goes_back
        )


@each_algorithm
@pytest.mark.parametrize("rank", range(4))
@given(events=st.lists(WHAT, max_size=30))
@settings(max_examples=15)
def test_nothing_that_fits_the_schema_harms_a_stage(
    algorithm: Stages, rank: Rank, events: list[tuple[Any, ...]]
) -> None:
    inner = Alone(num_rounds=3, local_steps=4)
    storm = Storm(replace(algorithm, inner=inner, num_first=2, forget_after=1.0), rank)
    for what in events:
        storm.do(what)
