"""Stages where workers restart, are lost or lie: what they keep, and what they drop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.effects import of_type
from tests.stage_workers import (
    FIRST,
    LAST,
    MIDDLE,
    PARAMS,
    Worker,
    batch,
    decoupled,
    down,
    each_algorithm,
    gradient,
    pipelined,
    up,
)
from tests.trained import trained_event

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.contract.protocol import Send, SetTimer, Started, TimerFired, WorkerLost
from edgegossip.contract.topology import complete

# Earlier lives.


@each_algorithm
def test_an_answer_to_an_earlier_life_is_none_to_this_one(algorithm: Stages) -> None:
    first, second = Worker(algorithm, FIRST), Worker(algorithm, FIRST)
    first.start(0.0)
    first.train(batch())
    old = int(first.sent.numbers["batch"])
    second.tell(Started(has_rejoined=True, num_samples=40, epoch_cost=40.0), 3.0)
    second.train(batch(9.0), 4.0)
    before = dict(second.state.pending)
    second.hear(MIDDLE, down(old, gradient()))
    assert second.state.pending.keys() == before.keys()
    assert second.state.answers == []


@each_algorithm
def test_an_answer_to_an_earlier_life_is_none_where_the_clock_has_restarted(
    algorithm: Stages,
) -> None:
    lives = [Worker(algorithm, FIRST), Worker(algorithm, FIRST)]
    sent = []
    for life, worker in enumerate(lives):
        worker.tell(
            Started(life > 0, num_samples=40, epoch_cost=40.0, life=2**40 + 10**6 * life)
        )
        worker.train(batch())
        sent.append(int(worker.sent.numbers["batch"]))
    lives[1].hear(MIDDLE, down(sent[0], gradient()))
    assert lives[1].state.answers == []
    assert [*lives[1].state.pending] == [sent[1]]


def test_of_too_many_batches_those_of_an_earlier_life_are_dropped_first() -> None:
    worker = Worker(pipelined(in_flight=2), MIDDLE)
    worker.start()
    worker.hear(FIRST, up(2**40))
    for number in (2**41, 5, 6):
        worker.hear(FIRST, up(number))
    kept = [message.numbers["batch"] for _, message in worker.state.waiting]
    assert kept == [5, 6]


@pytest.mark.parametrize("life", [0, 2**62 + 1])
def test_every_other_batch_asks_for_a_gradient_in_any_life(life: int) -> None:
    worker = Worker(decoupled(gradient_every=2), FIRST)
    worker.tell(Started(num_samples=40, epoch_cost=40.0, life=life))
    wants = []
    for _ in range(3):
        worker.train(batch())
        (send,) = of_type(worker.effects, Send)
        wants.append(send.message.numbers["wants_gradient"])
    assert wants == [1, 0, 1]


@each_algorithm
@pytest.mark.parametrize("has_rejoined", [True, False])
def test_a_first_stage_that_comes_back_goes_on_in_the_round_it_had_come_to(
    algorithm: Stages, has_rejoined: bool
) -> None:
    worker = Worker(replace(algorithm, inner=Alone(num_rounds=9, local_steps=4)), FIRST)
    worker.tell(Started(num_samples=40, epoch_cost=40.0, has_rejoined=has_rejoined))
    for round in (7, 8):
        worker.train(batch())
        worker.hear(MIDDLE, down(int(worker.sent.numbers["batch"]), gradient(), round=round))
        assert worker.state.inner.round == (7 if has_rejoined else 0)


def test_a_first_stage_whose_workers_exchange_hears_from_them_where_they_are() -> None:
    inner = Gossip(topology=complete(2), num_rounds=9)
    worker = Worker(decoupled(inner=inner, num_first=2), FIRST)
    worker.tell(Started(num_samples=40, epoch_cost=40.0, has_rejoined=True))
    assert not worker.state.asks_round


@each_algorithm
def test_a_sender_that_begins_anew_has_its_newest_batches_taken(algorithm: Stages) -> None:
    worker = Worker(algorithm, MIDDLE)
    worker.start()
    most = algorithm.max_passed(0)
    for number in range(most + 3):
        worker.hear(FIRST, up(number))
    waiting = [int(message.numbers["batch"]) for _, message in worker.state.waiting]
    assert waiting == [*range(3, most + 3)]  # the very first is trained on


def test_one_sender_takes_no_room_of_another() -> None:
    inner = Gossip(topology=complete(2), num_rounds=3)
    worker = Worker(decoupled(inner=inner, num_first=2, max_waiting=2), 2)
    worker.start()
    worker.hear(1, up(0))
    for number in range(9):
        worker.hear(0, up(number))
    worker.hear(1, up(1))
    assert [sender for sender, _ in worker.state.waiting] == [0, 0, 1]


# Loss.


@each_algorithm
def test_batches_without_an_answer_are_given_up_later_each_time(algorithm: Stages) -> None:
    worker = Worker(replace(algorithm, forget_after=2.0), FIRST)
    worker.start()
    worker.train(batch(), 1.0)
    assert SetTimer("no answer", 3.0) in worker.effects
    worker.tell(TimerFired("no answer"), 3.0)
    assert not worker.state.pending
    worker.train(batch(), 4.0)
    assert SetTimer("no answer", 8.0) in worker.effects
    number = int(worker.sent.numbers["batch"])
    worker.hear(MIDDLE, down(number, gradient()), 5.0)
    assert SetTimer("no answer", float("inf")) in worker.effects
    assert worker.state.num_in_vain == 0


@each_algorithm
def test_training_that_goes_back_drops_what_was_made_of_it(algorithm: Stages) -> None:
    worker = Worker(algorithm, MIDDLE)
    worker.start()
    worker.hear(FIRST, up(0))
    worker.hear(FIRST, up(1))
    worker.train(batch())
    number = next(iter(worker.state.pending))
    worker.hear(LAST, down(number, gradient(), boundary=1))
    effects = worker.tell(trained_event(PARAMS, PARAMS, has_gone_back=True, num_steps=0), 2.0)
    assert not worker.state.pending
    assert not worker.state.answers
    assert not worker.state.origins
    assert {int(s.message.numbers["batch"]) for s in of_type(effects, Send)} <= {0, 1}


@each_algorithm
def test_a_first_stage_that_goes_back_begins_its_work_anew_from_sound_parameters(
    algorithm: Stages,
) -> None:
    worker, sound = Worker(algorithm, FIRST), PARAMS + 7
    worker.start()
    worker.train(batch())
    went_back = trained_event(sound, PARAMS, has_gone_back=True, num_steps=0)
    worker.tell(went_back, 2.0)
    assert torch.equal(worker.request.params, sound)
    assert worker.state.inner is not None
    assert worker.state.inner.round == 1  # the broken work counts as a round without training
    assert worker.state.piece is not None
    assert worker.state.piece.wants_more
    assert worker.state.piece.num_samples == 0


def test_what_a_liar_has_sent_is_forgotten_at_every_point() -> None:
    inner = Gossip(topology=complete(2), num_rounds=3)
    worker = Worker(pipelined(inner=inner, num_first=2, in_flight=4), 2)
    worker.start()
    for number in range(3):
        worker.hear(1, up(number))
        worker.hear(0, up(number))
    for _ in range(3):
        worker.train(batch())
    first, second, _ = worker.state.pending
    worker.hear(3, down(first, gradient(), boundary=1))
    worker.tell(WorkerLost(1, has_lied=True))
    assert all(sender == 0 for sender, _ in worker.state.waiting)
    assert all(sender == 0 for sender, _ in worker.state.origins.values())
    assert [*worker.state.pending] == [second]
    assert worker.state.answers == []


def test_empty_batches_and_those_without_all_labels_are_not_taken() -> None:
    worker = Worker(decoupled(), LAST)
    worker.start()
    for payload in (
        batch(num_samples=0),
        {**batch(), "labels": batch(num_samples=1)["labels"]},
    ):
        message = replace(up(0, boundary=1), payload=payload)
        assert worker.hear(MIDDLE, message) == []


def test_what_was_given_up_and_comes_late_takes_no_place_of_what_waits() -> None:
    worker = Worker(decoupled(max_waiting=2), MIDDLE)
    worker.start()
    for number in (1, 8, 9, 2):
        worker.hear(FIRST, up(number))
    assert [int(message.numbers["batch"]) for _, message in worker.state.waiting] == [8, 9]
