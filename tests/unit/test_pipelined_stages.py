"""Pipelined stages, one worker at a time: batches in flight, and whoever is waited for."""

from __future__ import annotations

import pytest
import torch
from tests.effects import of_type
from tests.stage_workers import (
    FIRST,
    LAST,
    MIDDLE,
    Worker,
    batch,
    down,
    gradient,
    pipelined,
    up,
)

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.protocol import (
    Epochs,
    SetTimer,
    Started,
    TimerFired,
    Train,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import complete


def test_in_flight_are_no_more_batches_than_may_be() -> None:
    worker = Worker(pipelined(in_flight=3), FIRST)
    worker.start()
    for _ in range(2):
        worker.train(batch())
        assert worker.request
    worker.train(batch())
    assert not of_type(worker.effects, Train)
    assert len(worker.state.pending) == 3


def test_a_gradient_that_is_there_goes_before_the_next_batch() -> None:
    worker = Worker(pipelined(in_flight=3), MIDDLE)
    worker.start()
    for number in range(3):
        worker.hear(FIRST, up(number))
    worker.train(batch())
    number = int(worker.sent.numbers["batch"])
    worker.hear(LAST, down(number, gradient(), boundary=1))
    worker.train(batch())
    assert int(worker.request.inputs["batch"]) == number
    assert torch.equal(worker.request.inputs["gradient"], gradient())
    worker.train(gradient=gradient(0.25))
    assert worker.sent.kind == "done-0"
    assert worker.sent.numbers == {"batch": 0}
    assert torch.equal(worker.sent.payload["gradient"], gradient(0.25))


def test_a_pipelined_stage_whose_next_one_is_lost_waits_and_begins_its_batches_anew() -> None:
    worker = Worker(pipelined(in_flight=2), FIRST)
    worker.start()
    worker.train(batch())
    worker.train(batch())
    assert worker.state.piece is not None
    assert worker.state.piece.num_begun == 2
    worker.tell(WorkerLost(MIDDLE), now=5.0)
    assert not of_type(worker.effects, Train)
    assert worker.state.piece.num_begun == worker.state.piece.num_samples == 0
    assert SetTimer("patience", 605.0) in worker.effects
    worker.tell(WorkerJoined(MIDDLE, has_restarted=True), now=9.0)
    assert "batch" in worker.request.inputs
    assert SetTimer("patience", float("inf")) in worker.effects


def test_a_stage_that_is_away_too_long_ends_the_run_of_those_who_wait_for_it() -> None:
    worker = Worker(pipelined(), FIRST)
    worker.start()
    worker.train(batch())
    worker.tell(WorkerLost(MIDDLE))
    worker.train(batch())
    with pytest.raises(ServerLostError, match=r"has waited 600 s for worker 1, .* --resume"):
        worker.tell(TimerFired("patience"), now=600.0)


def test_one_with_nothing_to_do_waits_for_nobody() -> None:
    worker = Worker(pipelined(), MIDDLE)
    worker.start()
    assert worker.tell(WorkerLost(LAST)) == []
    effects = worker.hear(FIRST, up(0), now=2.0)
    assert effects == [SetTimer("patience", 602.0)]  # from now on there is


def test_a_middle_stage_that_gives_up_says_so_to_those_below() -> None:
    worker = Worker(pipelined(in_flight=3), MIDDLE)
    worker.start()
    worker.hear(FIRST, up(7))
    worker.train(batch())
    worker.tell(WorkerLost(LAST))
    assert worker.sent.numbers == {"batch": 7}
    assert worker.sent.payload == {}
    assert not worker.state.origins


def test_a_batch_that_is_dropped_is_begun_again_in_passes_too() -> None:
    """Or a pass of which all batches are lost would never end."""
    inner = EpochGossip(topology=complete(1), num_rounds=2)
    worker = Worker(pipelined(inner=inner), FIRST)
    worker.tell(Started(num_samples=2, epoch_cost=2.0))
    assert worker.request.begins_pass
    worker.train(batch())
    number = int(worker.sent.numbers["batch"])
    assert not of_type(worker.effects, Train)
    worker.hear(MIDDLE, down(number))
    assert worker.request.work == Epochs(1e-12)  # one batch
    worker.train(batch())
    number = int(worker.sent.numbers["batch"])
    worker.hear(MIDDLE, down(number, gradient()))
    worker.train(gradient=gradient())
    assert worker.state.round == 1


def test_a_gradient_of_another_length_counts_as_none() -> None:
    worker = Worker(pipelined(), FIRST)
    worker.start()
    worker.train(batch())
    number = int(worker.sent.numbers["batch"])
    worker.train(batch())
    worker.train(batch())
    worker.hear(MIDDLE, down(number, gradient(num_samples=3)))
    assert "gradient" not in worker.request.inputs
