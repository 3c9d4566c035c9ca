"""Decoupled stages, one worker at a time: nobody waits but for room above."""

from __future__ import annotations

import torch
from tests.effects import of_type
from tests.stage_workers import FIRST, MIDDLE, Worker, batch, decoupled, down, gradient

from edgegossip.contract.protocol import Send, Train, WorkerJoined, WorkerLost


def test_a_decoupled_stage_goes_on_at_once_and_learns_from_what_comes_back() -> None:
    worker = Worker(decoupled(), FIRST)
    worker.start()
    worker.train(batch())
    assert worker.sent.kind == "activations-0"
    number = int(worker.sent.numbers["batch"])
    assert worker.request.inputs == {}  # it does not wait
    worker.hear(MIDDLE, down(number, gradient()))
    worker.train(batch(2.0))
    lesson = worker.request.inputs
    assert torch.equal(lesson["fit_activations"], batch()["activations"])
    assert torch.equal(lesson["fit_gradient"], gradient())


def test_a_decoupled_stage_waits_for_room_above_and_for_nothing_else() -> None:
    worker = Worker(decoupled(max_waiting=2), FIRST)
    worker.start()
    worker.train(batch())
    first = int(worker.sent.numbers["batch"])
    worker.train(batch())
    assert not of_type(worker.effects, Train)
    worker.hear(MIDDLE, down(first))
    assert worker.request.inputs == {}


def test_a_decoupled_stage_whose_next_one_is_lost_goes_on_alone_and_sends_nothing() -> None:
    worker = Worker(decoupled(max_waiting=1), FIRST)
    worker.start()
    worker.train(batch())
    assert not of_type(worker.effects, Train)
    worker.tell(WorkerLost(MIDDLE))
    for _ in range(3):
        worker.train(batch())
        assert worker.request.inputs == {}
        assert not of_type(worker.effects, Send)
    worker.tell(WorkerJoined(MIDDLE, has_restarted=True))
    worker.train(batch())
    assert worker.sent.kind == "activations-0"


def test_a_gradient_is_asked_for_now_and_then_or_never() -> None:
    for every, expected in ((2, [1, 0, 1, 0]), (None, [0] * 4)):
        worker = Worker(decoupled(gradient_every=every), FIRST)
        worker.start()
        wanted = []
        for _ in range(4):
            worker.train(batch())
            wanted.append(worker.sent.numbers["wants_gradient"])
        assert wanted == expected
