"""Stages record their queues."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.effects import of_type
from tests.stage_workers import (
    FIRST,
    LAST,
    MIDDLE,
    Worker,
    batch,
    decoupled,
    down,
    each_algorithm,
    gradient,
    pipelined,
    up,
)

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.contract.protocol import Finish, Message, Note, TimerFired, WorkerLost


def numbers(worker: Worker) -> Mapping[str, float]:
    """The newest record."""
    (note,) = of_type(worker.effects, Note)
    assert note.kind == "stage"
    return note.numbers


@each_algorithm
def test_every_tenth_training_is_noted_with_the_longest_queue_since(algorithm: Stages) -> None:
    worker = Worker(algorithm, LAST)
    worker.start()
    noted = []
    for number in range(3):
        worker.hear(MIDDLE, up(number, boundary=1))
    for number in range(3, 16):
        worker.train(gradient=gradient())
        noted += [note.numbers for note in of_type(worker.effects, Note)]
        # Afterwards at most one waits, while one is trained on.
        if number > 5:
            worker.hear(MIDDLE, up(number, boundary=1))
    assert [each["num_trained"] for each in noted] == [1, 11]
    assert [each["batches"] for each in noted] == [1, 11]
    assert [each["most_waiting"] for each in noted] == [2, 2]
    assert [each["pending"] for each in noted] == [0, 0]


def test_a_queue_that_was_longer_before_the_last_note_is_forgotten() -> None:
    worker = Worker(decoupled(), LAST)
    worker.start()
    for number in range(3):
        worker.hear(MIDDLE, up(number, boundary=1))
    for _ in range(3):
        worker.train(gradient=gradient())
    for number in range(3, 22):
        worker.hear(MIDDLE, up(number, boundary=1))
        worker.train(gradient=gradient())
        if noted := of_type(worker.effects, Note):
            last = noted[0].numbers
    assert (last["num_trained"], last["most_waiting"]) == (21, 0)


def test_batches_without_an_answer_are_counted_when_they_are_most() -> None:
    worker = Worker(decoupled(max_waiting=3), FIRST)
    worker.start()
    for _ in range(3):
        worker.train(batch())
    sent = int(worker.sent.numbers["batch"])
    for number in range(sent - 2, sent + 1):
        worker.hear(MIDDLE, down(number))
    while worker.state.num_trained < 11:
        worker.train(batch())
        worker.hear(MIDDLE, down(worker.state.next_batch - 1))
        if worker.state.num_trained == 10:
            worker.train(batch())
    assert (numbers(worker)["pending"], numbers(worker)["most_pending"]) == (1, 3)


def test_a_pipelined_batch_counts_when_its_gradient_was_used() -> None:
    worker = Worker(pipelined(), FIRST)
    worker.start()
    worker.train(batch())
    assert (numbers(worker)["num_trained"], numbers(worker)["batches"]) == (1, 0)
    worker.hear(MIDDLE, down(int(worker.sent.numbers["batch"]), gradient()))
    assert worker.state.num_batches == 0
    worker.train(batch())
    worker.train(gradient=gradient())
    assert worker.state.num_batches == 1


@pytest.mark.parametrize("is_lost", [False, True], ids=["late", "lost"])
@each_algorithm
def test_what_is_given_up_is_noted_at_once(algorithm: Stages, is_lost: bool) -> None:
    worker = Worker(algorithm, FIRST)
    worker.start()
    for _ in range(2):
        worker.train(batch())
    worker.tell(WorkerLost(MIDDLE) if is_lost else TimerFired("no answer"), 9.0)
    assert (numbers(worker)["given_up"], numbers(worker)["pending"]) == (2, 0)
    assert numbers(worker)["most_pending"] == 2
    worker.tell(WorkerLost(MIDDLE), 10.0)
    assert not of_type(worker.effects, Note)  # nothing was given up


def test_the_end_is_noted_once_by_those_who_trained() -> None:
    worker = Worker(decoupled(inner=Alone(num_rounds=2), forget_after=2.0), FIRST)
    worker.start()
    worker.train(batch())
    worker.train(batch())
    assert Finish() in worker.effects
    assert (numbers(worker)["num_trained"], numbers(worker)["batches"]) == (2, 2)
    worker.tell(TimerFired("end"), 4.0)
    assert not of_type(worker.effects, Note)
    idle = Worker(decoupled(), LAST)
    idle.start()
    idle.hear(MIDDLE, Message("end-1", 0))
    assert Finish() in idle.effects
    assert not of_type(idle.effects, Note)
