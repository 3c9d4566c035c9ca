"""Compressed push-sum, one worker driven by hand: memory, replicas, compensation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.effects import only
from tests.largest import Largest
from tests.push_sum import Worker, pushed, sends
from tests.tiers import first, thorough
from tests.trained import trained_event
from tests.worlds import mix_only

from edgegossip.algorithms.push_sum.difference_push import DifferencePush
from edgegossip.algorithms.push_sum.skew_compensated_sparse_push import (
    SkewCompensatedSparsePush,
)
from edgegossip.algorithms.push_sum.sparse_push import SparsePush
from edgegossip.compression.compressor import Identity, PerLayer, Values
from edgegossip.compression.sparse import RandomK, TopK
from edgegossip.compression.values import Quantize, Sign
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.protocol import (
    Message,
    Received,
    Send,
    Started,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.randomness import generator
from edgegossip.contract.topology import directed_ring, ring, star


def test_error_memory_holds_what_was_not_offered() -> None:
    algorithm = SparsePush(
        topology=directed_ring(3), num_rounds=3, compressor=Largest(1), consensus_step=0.5
    )
    worker = Worker(algorithm)
    worker.on(Started())
    trained = trained_event(torch.tensor([4.0, 3.0]), torch.zeros(2))
    send = only(Send, worker.on(trained))
    assert send.message.payload["values"].tolist() == [4.0]
    assert worker.state.error.tolist() == [0.0, 3.0]
    # A quarter goes: half of what SGP gives.
    assert worker.state.params.tolist() == [3.0, 3.0]
    assert worker.state.weight == 0.75


def test_estimate_amid_an_exchange_is_the_one_before_it() -> None:
    algorithm = SparsePush(
        topology=directed_ring(3), num_rounds=3, compressor=Largest(1), consensus_step=0.5
    )
    worker = Worker(algorithm)
    worker.on(Started())
    worker.state.error = torch.tensor([90.0, 0.0])  # what has been held back for many rounds
    worker.trains_to(4.0)
    assert worker.state.params.tolist() == [-19.5, 4.0]
    assert worker.state.estimate.tolist() == [4.0, 4.0]
    payload = {"values": torch.tensor([94.0]), "positions": torch.tensor([0])}
    mass = {"weight": 1.0, "session": 0.0}
    worker.on(Received(0, Message("push", 0, payload, mass)))
    assert worker.state.estimate.tolist() == [4.0, 4.0]


def test_receivers_that_know_the_same_are_sent_one_payload() -> None:
    algorithm = DifferencePush(topology=star(4), num_rounds=3, compressor=Largest(1))
    state = algorithm.init(0, torch.zeros(2))
    algorithm.handle(state, Started(), 0.0)
    trained = trained_event(torch.tensor([4.0, 3.0]), torch.zeros(2))
    effects = algorithm.handle(state, trained, 0.0)
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    assert len({id(message.payload["values"]) for message in messages}) == 1
    assert len({id(replica) for replica in state.replicas.sent.values()}) == 1


def test_replicas_begin_anew_with_a_session() -> None:
    algorithm = DifferencePush(topology=ring(3), num_rounds=3, compressor=Largest(1))
    state = algorithm.init(1, torch.zeros(2))
    algorithm.handle(state, Started(), 0.0)
    algorithm.handle(state, WorkerLost(2), 0.0)
    trained = trained_event(torch.tensor([4.0, 3.0]), torch.zeros(2))
    algorithm.handle(state, trained, 0.0)
    assert state.replicas.sent[0].tolist() == [4.0, 0.0]
    algorithm.handle(state, WorkerJoined(2), 1.0)
    assert torch.equal(state.replicas.sent[2], state.estimate)
    algorithm.handle(state, pushed(1, 7.0, 0.0, session=7.0, kind="catch-up"), 2.0)
    assert state.replicas.heard[0].tolist() == [7.0, 7.0]


def test_compensation_follows_training() -> None:
    algorithm = SkewCompensatedSparsePush(
        topology=directed_ring(3),
        num_rounds=1,
        compressor=Largest(1),
        compensation_rounds=1,
        compensate_every=3,
    )
    assert [algorithm.compensates(round) for round in range(4)] == [False, True, True, True]
    worker = Worker(algorithm)
    worker.on(Started())
    assert sends(worker.trains_to(4.0)) == [(2, "push", 0)]
    assert worker.state.error.tolist() == [0.0, 4.0]
    payload = {"values": torch.ones(1), "positions": torch.tensor([0])}
    mass = {"weight": 1.0, "session": 0.0}
    effects = worker.on(Received(0, Message("push", 0, payload, mass)))
    assert sends(effects) == [(2, "compensation", 1)]  # without training
    assert worker.state.error.tolist() == [0.0, 0.0]  # all has been offered


# Arguments.


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (
            SparsePush,
            {"consensus_step": 0.0},
            r"consensus_step must be in \(0, 1\] or None, got 0.0",
        ),
        (DifferencePush, {"consensus_step": 1.1}, r"consensus_step must be in \(0, 1\]"),
        (DifferencePush, {"final_rounds": -1}, "final_rounds must be at least 0, got -1"),
        (SkewCompensatedSparsePush, {"compensation_rounds": -1}, "must be at least 0, got -1"),
        (SkewCompensatedSparsePush, {"compensate_every": 0}, "must be at least 1 or None"),
    ],
)
def test_bad_arguments_of_compressed_ones_are_refused(
    kind: type[Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(topology=directed_ring(3), num_rounds=3, compressor=Largest(1), **arguments)


def test_step_that_hardly_brings_workers_together_is_warned_of() -> None:
    settings: dict[str, Any] = {"topology": directed_ring(3), "num_rounds": 3}
    params = torch.zeros(20_000)
    one = Largest(1)
    for algorithm in (
        SparsePush(compressor=one, **settings),
        SkewCompensatedSparsePush(
            compressor=Identity(), compensation_compressor=one, **settings
        ),
        DifferencePush(compressor=Identity(), final_compressor=one, **settings),
    ):
        with pytest.warns(
            UserWarning, match="the consensus step is 5e-05 by default, as suits"
        ):
            algorithm.init(0, params)
        algorithm.init(1, params)


@pytest.mark.parametrize("kind", [SparsePush, DifferencePush, SkewCompensatedSparsePush])
def test_step_that_will_hardly_converge_is_warned_of_once(kind: type[Any]) -> None:
    settings: dict[str, Any] = {"topology": directed_ring(3), "num_rounds": 3}
    algorithm = kind(compressor=Largest(1), consensus_step=0.3, **settings)
    params = torch.zeros(100)
    with pytest.warns(UserWarning, match=r"consensus_step=0.3 is 30 times what suits"):
        algorithm.init(0, params)
    algorithm.init(1, params)
    kind(compressor=Largest(1), consensus_step=0.04, **settings).init(0, params)
    default = kind(compressor=Largest(1), **settings)
    default.init(0, params)
    assert default.step("push", 100) == 0.01


def test_random_entries_allow_smaller_steps_and_are_warned_of_sooner() -> None:
    settings: dict[str, Any] = {"topology": directed_ring(3), "num_rounds": 3}
    params = torch.zeros(100)
    SparsePush(compressor=TopK(0.1), consensus_step=0.2, **settings).init(0, params)
    for compressor in (RandomK(0.1), PerLayer(RandomK(0.1), sizes=(40, 60))):
        with pytest.warns(UserWarning, match=r"is 2 times what suits .* less than 2 times"):
            SparsePush(compressor=compressor, consensus_step=0.2, **settings).init(0, params)


@thorough
@pytest.mark.parametrize("values", first(1, [Quantize(bits=2), Identity(), Sign()]), ids=str)
@pytest.mark.parametrize("kind", first(1, [SparsePush, DifferencePush]))
def test_by_default_few_bits_bring_workers_together_as_many_do(
    kind: type[Any], values: Values
) -> None:
    """A step by the worst vector left 40 % of the distance with 2 bits."""
    start = torch.randn(8, 500, generator=generator(0, "start"))
    compressor = TopK(0.2, values)
    algorithm = kind(topology=directed_ring(8), num_rounds=60, compressor=compressor)
    assert consensus_distance(mix_only(algorithm, start)) < 0.3 * consensus_distance(start)


def test_the_final_rounds_are_sent_by_their_own_compressor() -> None:
    algorithm = DifferencePush(
        topology=directed_ring(3),
        num_rounds=9,
        compressor=TopK(0.1),
        final_compressor=Identity(),
    )
    assert algorithm._compressor("final") == Identity()
    assert algorithm._compressor("push") == TopK(0.1)
    assert replace(algorithm, final_compressor=None)._compressor("final") == TopK(0.1)
