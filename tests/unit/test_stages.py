"""Training in stages, one worker at a time: who is who, and what the first stage does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.stage_workers import (
    FIRST,
    PARAMS,
    Worker,
    batch,
    decoupled,
    down,
    each_algorithm,
    pipelined,
    up,
)
from tests.trained import trained_event
from torch import Tensor

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.server.methods import ASP
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.contract.algorithm import Setting
from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Message,
    Payload,
    Seconds,
    Steps,
    Trained,
)
from edgegossip.contract.topology import complete

# Who is who.


def test_ranks_hold_stages_in_order() -> None:
    algorithm = decoupled(inner=Gossip(topology=complete(3), num_rounds=2), num_first=3)
    assert algorithm.num_workers == 5
    assert [algorithm.stage(rank) for rank in range(5)] == [0, 0, 0, 1, 2]
    assert [algorithm.above(rank) for rank in range(5)] == [3, 3, 3, 4, None]
    roles = [algorithm.role(rank) for rank in range(5)]
    assert [role.name for role in roles] == ["stage-0"] * 3 + ["stage-1", "stage-2"]
    assert [role.has_data for role in roles] == [True] * 3 + [False] * 2


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no boundary": ({"boundaries": ()}, "boundaries must name at least one shape"),
    "no shape": ({"boundaries": ((),)}, r"boundaries must be shapes .* got \(\)"),
    "an empty shape": ({"boundaries": ((0, 2),)}, r"at least 1, got \(0, 2\)"),
    "precision": ({"precision": "int4"}, "precision must be one of"),
    "forget_after": ({"forget_after": 0.0}, "forget_after must be above 0 or None"),
    "num_classes": ({"num_classes": 0}, "num_classes must be at least 1"),
    "other workers": (
        {"inner": Gossip(topology=complete(3), num_rounds=2)},
        "inner is for 3 workers, but num_first is 1",
    ),
    "a server": (
        {"inner": ASP(num_workers=2, num_rounds=2), "num_first": 3},
        "inner has workers that are 'server'",
    ),
    "stages in stages": ({"inner": decoupled()}, "inner has workers that are 'stage-0'"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    for make in (decoupled, pipelined):
        with pytest.raises(ValueError, match=message):
            make(**changes)


def test_numbers_of_their_own_have_ranges_too() -> None:
    with pytest.raises(ValueError, match="max_waiting must be at least 1"):
        decoupled(max_waiting=0)
    with pytest.raises(ValueError, match="gradient_every must be at least 1 or None"):
        decoupled(gradient_every=0)
    with pytest.raises(ValueError, match="in_flight must be at least 1 or None"):
        pipelined(in_flight=0)
    with pytest.raises(ValueError, match="patience must be above 0"):
        pipelined(patience=0.0)


def test_settings_that_do_not_go_together_are_warned_of() -> None:
    assert not decoupled().warnings(Setting())
    (lossy,) = decoupled().warnings(Setting(drops_messages=True))
    assert "set forget_after" in lossy
    assert not decoupled(forget_after=1.0).warnings(Setting(drops_messages=True))
    (short,) = pipelined(inner=Alone(num_rounds=9)).warnings(Setting())
    assert "finishes its 1 local steps" in short


# What a trainer gives.

WRONG: dict[str, tuple[Payload, str]] = {
    "nothing": ({}, r"gives \[\], not activations and labels"),
    "another shape": (
        {**batch(), "activations": torch.zeros(2, 7)},
        r"of shape \(7,\), but boundaries say \(3,\)",
    ),
    "too many": (batch(num_samples=5), "a batch of 5 samples, but max_batch is 4"),
    "none": (batch(num_samples=0), "a batch of 0 samples"),
    "a label too large": (
        {**batch(), "labels": torch.tensor([0, 5])},
        "labels from 0 to 5, but num_classes is 5",
    ),
    "a label below 0": ({**batch(), "labels": torch.tensor([-1, 2])}, "labels from -1 to 2"),
}


@each_algorithm
@pytest.mark.parametrize(("outputs", "message"), WRONG.values(), ids=WRONG)
def test_what_nobody_would_take_is_an_error_where_it_is_made(
    algorithm: Stages, outputs: dict[str, Tensor], message: str
) -> None:
    worker = Worker(algorithm, FIRST)
    worker.start()
    with pytest.raises(LocalProtocolError, match=message):
        worker.train(outputs)


# The first stage's own algorithm.


def test_messages_of_others_do_not_undo_what_was_trained_meanwhile() -> None:
    gossip = Gossip(topology=complete(2), num_rounds=3, local_steps=3)
    worker = Worker(decoupled(inner=gossip, num_first=2), FIRST)
    worker.start()
    worker.tell(trained_event(PARAMS + 1, PARAMS, outputs=batch()), 1.0)
    worker.hear(1, Message("params", 0, {"params": PARAMS - 9}))
    assert torch.equal(worker.state.params, PARAMS + 1)
    worker.tell(trained_event(PARAMS + 2, PARAMS, outputs=batch()), 2.0)
    assert torch.equal(worker.request.params, PARAMS + 2)


@each_algorithm
def test_a_first_stage_trains_on_one_batch_at_a_time(algorithm: Stages) -> None:
    worker = Worker(algorithm, FIRST)
    worker.start()
    for _ in range(2):
        assert worker.request.work == Steps(1)
        worker.train(batch())


def test_what_was_asked_for_is_answered_as_one_piece() -> None:
    told: list[Event] = []

    class Curious(Alone):
        def handle(self, state: Any, event: Event, now: Seconds) -> list[Effect]:  # noqa: ANN401
            told.append(event)
            return super().handle(state, event, now)

    worker = Worker(decoupled(inner=Curious(num_rounds=2, local_steps=2)), FIRST)
    worker.start()
    for loss, now in ((1.0, 1.0), (3.0, 2.5)):
        event = trained_event(
            PARAMS + now, PARAMS, outputs=batch(), num_samples=2, loss=loss, cost=1.5
        )
        worker.tell(event, now)
    _, piece = told
    assert isinstance(piece, Trained)
    assert (piece.num_samples, piece.num_steps, piece.loss, piece.cost) == (4, 2, 2.0, 3.0)
    assert piece.seconds == 2.5
    assert torch.equal(piece.before, PARAMS)


@each_algorithm
def test_stages_say_nothing_to_an_inner_algorithm_that_is_not_meant(algorithm: Stages) -> None:
    inner = Gossip(topology=complete(2), num_rounds=3)
    worker = Worker(replace(algorithm, inner=inner, num_first=2), FIRST)
    worker.start()
    assert worker.hear(2, up(0)) == []
    assert worker.hear(3, down(0, boundary=1)) == []
    assert worker.hear(2, Message("params", 0, {"params": PARAMS})) == []
