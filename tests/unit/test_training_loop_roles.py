"""Training loops of one's own where ranks have roles: a server among them."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from tests.tiers import thorough
from tests.trials import trials
from tests.unit.test_training_loop import BATCH, NUM_SAMPLES, Learner, side_by_side
from torch import nn

from edgegossip.algorithms.server.adsp import ADSP
from edgegossip.algorithms.server.methods import BSP
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import (
    Finish,
    Message,
    Received,
    Send,
    SetTimer,
    Started,
    WorkerLost,
)
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.training_loop import TrainingLoop
from edgegossip.runs.final_average import FinalAverage

NUM = 2
SERVED = BSP(num_workers=NUM, num_rounds=4)
SEARCHING = ADSP(num_workers=NUM, num_rounds=12, window=0.1, min_interval=0.005)


def train(learner: Learner, loop: TrainingLoop) -> None:
    """Train until the run is over, and not a step longer."""
    with loop:
        batches = cycle(learner.batches)
        while not loop.is_over:
            loop.step(learner.step(next(batches)), BATCH)


def run(
    algorithm: Algorithm[Any],
    **options: Any,  # noqa: ANN401
) -> tuple[list[Learner], list[TrainingLoop], list[BaseException | None]]:
    """A server and two workers, from the beginning to the end."""
    network, learners = MemoryNetwork(), [Learner(rank) for rank in range(NUM + 1)]
    loops = [
        TrainingLoop(
            learner.model,
            algorithm,
            rank,
            NUM + 1,
            network.transport(rank),
            num_samples=NUM_SAMPLES if rank else 0,
            meet_seconds=20,
            **options,
        )
        for rank, learner in enumerate(learners)
    ]
    jobs = [lambda each=each: train(*each) for each in zip(learners, loops, strict=True)]
    return learners, loops, side_by_side(*jobs)


def test_a_server_trains_nothing_and_ends_with_the_model_of_all() -> None:
    learners, loops, raised = run(SERVED)
    assert raised == [None] * 3
    assert [loop.rounds for loop in loops] == [SERVED.num_rounds] * 3
    # In the end each worker has what the server last answered with.
    assert torch.equal(learners[0].values, learners[1].values)
    assert torch.equal(learners[0].values, learners[2].values)
    assert not torch.equal(learners[0].values, Learner(0).values)


def test_only_a_rank_with_data_needs_some() -> None:
    model, transport = Learner(0).model, MemoryNetwork().transport(1)
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        TrainingLoop(model, SERVED, 1, NUM + 1, transport, num_samples=0)


@thorough
def test_the_final_average_is_the_servers_model() -> None:
    learners, _, raised = run(SEARCHING, final_average=True, evaluate=measured)
    assert raised == [None] * 3
    for learner in learners[1:]:
        assert torch.equal(learner.values, learners[0].values)


def measured(model: nn.Module) -> tuple[float, float]:
    assert not model.training
    return float(model(torch.ones(4, 3)).square().mean()), 0.5


@thorough
def test_a_server_that_searches_measures_with_the_callers_function() -> None:
    _, loops, raised = run(SEARCHING, evaluate=measured)
    assert raised == [None] * 3
    assert trials(loops[0]._host.state)


def test_one_that_cannot_measure_says_what_to_give() -> None:
    network, learner = MemoryNetwork(), Learner(0)
    alone: dict[str, Any] = {"min_workers": 1, "meet_seconds": 0.05}
    transport = network.transport(0)
    loop = TrainingLoop(learner.model, SEARCHING, 0, NUM + 1, transport, num_samples=0, **alone)
    with pytest.raises(LocalProtocolError, match="give a TrainingLoop evaluate"):
        train(learner, loop)


# The final average, step by step.

FINAL = FinalAverage(inner=SERVED, num_workers=NUM + 1)


def ended(rank: int) -> Any:  # noqa: ANN401
    state = FINAL.init(rank, torch.zeros(2))
    FINAL.handle(state, Started(), 0.0)
    state.is_ending = True
    return state


def test_only_those_who_count_send_their_final_models() -> None:
    worker, server = ended(1), ended(0)
    assert [type(each) for each in FINAL._end(worker, 0.0)] == [SetTimer]
    sent = [each for each in FINAL._end(server, 0.0) if isinstance(each, Send)]
    sent = [each for each in sent if "params" in each.message.payload]
    assert [each.receiver for each in sent] == [1, 2]
    model = torch.tensor([1.0, 2.0])
    message = Message(sent[0].message.kind, 4, {"params": model})
    assert any(isinstance(e, Finish) for e in FINAL.handle(worker, Received(0, message), 1.0))
    assert torch.equal(worker.estimate, model)


def test_a_worker_whose_server_is_lost_keeps_what_it_has() -> None:
    worker = ended(1)
    own = worker.estimate.clone()
    assert any(isinstance(each, Finish) for each in FINAL.handle(worker, WorkerLost(0), 1.0))
    assert torch.equal(worker.estimate, own)
