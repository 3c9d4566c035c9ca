"""Training loops of one's own: how they meet, what they say, and how they end."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from tests.tiers import thorough
from tests.unit.test_training_loop import (
    BATCH,
    EPOCHS,
    GOSGD,
    NUM_SAMPLES,
    Learner,
    side_by_side,
)

from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import (
    Finish,
    Message,
    Rank,
    Received,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import complete
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.training_loop import TrainingLoop
from edgegossip.runs.final_average import FinalAverage

ENDLESS = GoSGD(topology=complete(2), num_rounds=1_000_000, exchange_probability=0.1)


def make_loop(
    learner: Learner,
    algorithm: Algorithm[Any],
    rank: Rank,
    network: MemoryNetwork,
    **options: Any,  # noqa: ANN401
) -> TrainingLoop:
    options = {"meet_seconds": 20.0} | options
    transport = network.transport(rank)
    return TrainingLoop(
        learner.model, algorithm, rank, 2, transport, num_samples=NUM_SAMPLES, **options
    )


def both(
    *algorithms: Algorithm[Any],
    **options: Any,  # noqa: ANN401
) -> tuple[list[Learner], list[BaseException | None]]:
    network, learners = MemoryNetwork(), [Learner(0), Learner(1)]
    loops = [make_loop(learners[r], algorithms[r], r, network, **options) for r in (0, 1)]
    jobs = [lambda each=each: train(*each) for each in zip(learners, loops, strict=True)]
    return learners, side_by_side(*jobs)


def train(learner: Learner, loop: TrainingLoop, pause: float = 0.0) -> None:
    """Train until the run is over, and not a step longer."""
    with loop:
        for x in cycle(learner.batches):
            time.sleep(pause)
            loop.step(learner.step(x), BATCH)
            if loop.is_over:
                break


# Final averages.


@thorough
@pytest.mark.parametrize("final_average", [False, True])
def test_models_that_differ_at_the_end_are_averaged_if_asked_for(final_average: bool) -> None:
    learners, raised = both(GOSGD, GOSGD, final_average=final_average)
    assert raised == [None, None]
    assert torch.equal(learners[0].values, learners[1].values) == final_average


@thorough
def test_models_are_averaged_when_the_time_is_over() -> None:
    learners, raised = both(ENDLESS, ENDLESS, final_average=True, max_seconds=0.1)
    assert raised == [None, None]
    assert torch.equal(learners[0].values, learners[1].values)
    assert not torch.equal(learners[0].values, Learner(0).values)


def finals(algorithm: FinalAverage, rank: Rank, value: float) -> Received:
    return Received(rank, Message("final average", 0, {"params": torch.full((2,), value)}))


def test_the_average_waits_for_all_who_are_there_and_for_no_others() -> None:
    inner = GoSGD(topology=complete(4), num_rounds=1)
    algorithm = FinalAverage(inner=inner, num_workers=4)
    state = algorithm.init(1, torch.zeros(2))
    algorithm.handle(state, Started(), 0.0)
    algorithm.handle(state, finals(algorithm, 0, 1.0), 0.0)
    algorithm.handle(state, WorkerLost(2), 0.0)
    trained = Trained(
        params=torch.full((2,), 4.0),
        before=torch.zeros(2),
        num_samples=1,
        num_steps=1,
        loss=0.0,
        seconds=1.0,
        cost=1.0,
    )
    effects = algorithm.handle(state, trained, 1.0)
    sent = [each.receiver for each in effects if isinstance(each, Send)]
    assert sent[-2:] == [0, 3]
    assert Finish() not in effects
    later = SetTimer("final ask", 11.0)
    assert effects[-1] == later
    assert [type(each) for each in algorithm.handle(state, WorkerJoined(2), 1.0)] == [Send]
    algorithm.handle(state, WorkerLost(2), 1.0)
    *told, last = algorithm.handle(state, finals(algorithm, 3, 10.0), 1.0)
    assert last == Finish()
    assert [each.receiver for each in told] == [0, 3]  # type: ignore[union-attr]
    assert state.estimate.tolist() == [5.0, 5.0]
    # A model that arrives later is averaged, too, and the run does not finish twice.
    *told, last = algorithm.handle(state, finals(algorithm, 2, 17.0), 1.0)
    assert Finish() not in [*told, last]
    assert state.estimate.tolist() == [8.0, 8.0]


def test_the_inner_algorithm_ends_when_its_time_is_over() -> None:
    algorithm = FinalAverage(inner=ENDLESS, num_workers=2, ends_at=8.0)
    state = algorithm.init(0, torch.zeros(1))
    assert any(effect.at == 8.0 for effect in algorithm.handle(state, Started(), 0.0)[1:])  # type: ignore[union-attr]
    effects = algorithm.handle(state, TimerFired("final average"), 8.0)
    assert [type(effect) for effect in effects] == [Send, SetTimer]
    assert state.is_cut


def test_a_model_that_was_lost_on_the_way_is_asked_for_again() -> None:
    algorithm = FinalAverage(inner=ENDLESS, num_workers=2, ends_at=8.0)
    states = [algorithm.init(rank, torch.full((2,), float(rank))) for rank in range(2)]
    for state in states:
        algorithm.handle(state, Started(), 0.0)
        algorithm.handle(state, TimerFired("final average"), 8.0)  # the models are lost
    ask, again = algorithm.handle(states[0], TimerFired("final ask"), 18.0)
    assert isinstance(ask, Send)
    assert again == SetTimer("final ask", 38.0)
    (answer,) = algorithm.handle(states[1], Received(0, ask.message), 18.0)
    assert isinstance(answer, Send)
    effects = algorithm.handle(states[0], Received(1, answer.message), 18.0)
    assert Finish() in effects
    assert states[0].estimate.tolist() == [0.5, 0.5]
    # One that never sends its model is not awaited for ever.
    effects = algorithm.handle(states[1], TimerFired("final ask"), 2 * 8.0 + 60.0)
    assert Finish() in effects
    assert states[1].estimate.tolist() == [1.0, 1.0]


# Meeting.


def test_loops_of_different_settings_end_with_an_error_that_names_them() -> None:
    _, raised = both(EPOCHS, replace(EPOCHS, num_rounds=5))
    assert [type(error) for error in raised] == [NetworkError] * 2
    assert "worker 1 has algorithm.num_rounds 5, this one 4" in str(raised[0])
    assert "worker 0 has algorithm.num_rounds 4, this one 5" in str(raised[1])


def test_a_loop_that_nobody_joins_says_whom_it_waits_for_and_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgegossip.net.host.meeting._AGAIN", 0.02)
    monkeypatch.setattr("edgegossip.net.host.meeting._SOON", 0.01)
    caplog.set_level("INFO", "edgegossip.net")
    loop = make_loop(Learner(0), EPOCHS, 0, MemoryNetwork(), meet_seconds=0.1)
    with pytest.raises(NetworkError, match="worker 1 cannot be reached"), loop:
        raise AssertionError("the block must not begin")
    assert "waiting for worker 1" in caplog.text


def test_a_loop_that_is_interrupted_while_it_waits_for_others_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = MemoryNetwork()
    loop = make_loop(Learner(0), EPOCHS, 0, network)

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_take_next", ctrl_c)
    with pytest.raises(KeyboardInterrupt), loop:
        raise AssertionError("the block must not begin")
    assert not [t for t in threading.enumerate() if t.name == "host 0"]
    network.join(network.transport(0))  # its place is free


# Losing others.


def leave_soon(learner: Learner, loop: TrainingLoop) -> None:
    with loop:
        for x in learner.batches:
            loop.step(learner.step(x), BATCH)


@thorough
@pytest.mark.parametrize("min_workers", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_one_that_is_left_alone_goes_on_unless_it_is_told_not_to(
    caplog: pytest.LogCaptureFixture, min_workers: int | None
) -> None:
    caplog.set_level(logging.INFO)
    network, learners = MemoryNetwork(), [Learner(0), Learner(1)]
    options = {"min_workers": min_workers, "meet_seconds": 3.0 if min_workers else 20.0}
    algorithm = ENDLESS if min_workers else replace(ENDLESS, num_rounds=300)
    left, right = (make_loop(learners[r], algorithm, r, network, **options) for r in (0, 1))

    raised = side_by_side(
        lambda: train(learners[0], left, pause=0.001), lambda: leave_soon(learners[1], right)
    )
    assert "link with worker 1 is lost (it has left the run)" in caplog.text
    if min_workers is None:
        assert raised[0] is None
        assert "worker 0: finished after 300 rounds" in caplog.text
    else:
        assert isinstance(raised[0], NetworkError)
        assert "fewer than 2 workers were left for 3 s" in str(raised[0])


def test_the_final_model_of_one_that_has_lied_is_not_averaged() -> None:
    algorithm = FinalAverage(inner=ENDLESS, num_workers=3, ends_at=8.0)
    state = algorithm.init(0, torch.zeros(2))
    algorithm.handle(state, finals(algorithm, 1, 8.0), 1.0)
    algorithm.handle(state, WorkerLost(1, has_lied=True), 2.0)
    assert 1 not in state.models
    algorithm.handle(state, finals(algorithm, 2, 8.0), 3.0)
    algorithm.handle(state, WorkerLost(2), 4.0)
    assert 2 in state.models
