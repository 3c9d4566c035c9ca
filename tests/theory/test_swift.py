"""SWIFT: mixing with what is known, of any age, and nobody waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.algorithms import MATCHINGS, NUM_WORKERS
from tests.effects import of_type, only
from tests.trained import trained_event
from tests.worlds import (
    EVEN,
    INITIAL,
    TARGETS,
    UNEVEN,
    Recorder,
    final_params,
    make_world,
    mix_only,
)

from edgegossip.algorithms.gossip.swift import SWIFT, SWIFTState
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.mixing import (
    ColumnStochastic,
    MetropolisHastings,
    Uniform,
    mixing_matrix,
)
from edgegossip.contract.protocol import (
    Effect,
    Message,
    Received,
    Send,
    Started,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import Topology, complete, directed_ring, ring, star
from edgegossip.sim.fault import Crash, Drop, Faults, Recover
from edgegossip.sim.link import Link, Links

START = INITIAL[:NUM_WORKERS]
PATH = SWIFT(topology=star(3), num_rounds=99, mixing=Uniform())


def swift(**arguments: Any) -> SWIFT:  # noqa: ANN401
    return SWIFT(**{"topology": ring(5), "num_rounds": 15} | arguments)


def started(algorithm: SWIFT, value: float, has_rejoined: bool = False) -> SWIFTState:
    state = algorithm.init(0, torch.tensor([value]))
    algorithm.handle(state, Started(has_rejoined=has_rejoined), 0.0)
    return state


def model(sender: int, value: float, round: int = 1, is_new: bool = False) -> Received:
    numbers = {"is_new": 1} if is_new else {}
    return Received(sender, Message("model", round, {"params": torch.tensor([value])}, numbers))


def end_block(algorithm: SWIFT, state: SWIFTState, now: float = 1.0) -> list[Effect]:
    return algorithm.handle(state, trained_event(state.params, state.params), now)


@pytest.mark.parametrize("topology", [ring(5), star(5), complete(5)], ids=repr)
def test_among_equals_it_is_gossip_with_models_of_the_round_before(topology: Topology) -> None:
    lr, links = 0.1, Links(default=Link(latency=0.25))
    after = final_params(
        make_world(swift(topology=topology, num_rounds=9), initial=START, lr=lr, links=links)
    )
    matrix = mixing_matrix(topology, MetropolisHastings()).double()
    own = torch.diag(matrix.diagonal())
    targets, x, known = TARGETS[:5].double(), START.double(), None
    for _ in range(9):
        z = x + lr * (targets - x)
        x = z if known is None else own @ z + (matrix - own) @ known
        known = z
    torch.testing.assert_close(after, x.float())


def test_a_model_counts_until_a_newer_one_comes() -> None:
    state = started(PATH, 0.0)
    PATH.handle(state, model(2, 9.0), 0.5)
    end_block(PATH, state)
    assert state.params.tolist() == [3.0]  # nothing of worker 1: its weight is its own
    end_block(PATH, state)
    assert state.params.tolist() == [5.0]
    PATH.handle(state, model(2, 2.0, round=5), 2.5)
    PATH.handle(state, model(1, -1.0), 2.6)
    end_block(PATH, state)
    assert state.params.tolist() == [2.0]


def test_others_get_the_own_model_and_not_the_mixed_one() -> None:
    state = started(PATH, 0.0)
    PATH.handle(state, model(2, 9.0), 0.5)
    sent = of_type(end_block(PATH, state), Send)
    assert [send.receiver for send in sent] == [1, 2]
    assert all(send.message.payload["params"].tolist() == [0.0] for send in sent)
    assert state.params.tolist() == [3.0]


def test_a_slow_link_carries_the_newest_model() -> None:
    state = started(PATH, 0.0)
    assert len(of_type(end_block(PATH, state), Send)) == 2
    for value in (1.0, 2.0):
        event = trained_event(torch.tensor([value]), state.params)
        assert of_type(PATH.handle(state, event, 1 + value), Send) == []
    send = only(Send, PATH.handle(state, Received(1, Message("ack", 1)), 3.5))
    assert (send.receiver, send.message.round) == (1, 3)
    assert send.message.payload["params"].tolist() == [2.0]
    assert PATH.handle(state, Received(1, Message("ack", 3)), 3.6) == []  # it has the newest


def test_after_the_last_block_the_last_model_is_still_sent() -> None:
    algorithm = swift(num_rounds=2)
    state = started(algorithm, 0.0)
    end_block(algorithm, state)
    assert of_type(end_block(algorithm, state, 2.0), Send) == []
    send = only(Send, algorithm.handle(state, Received(1, Message("ack", 1)), 3.0))
    assert send.message.round == 2


def test_a_lost_neighbor_has_no_weight_and_gets_nothing() -> None:
    state = started(PATH, 0.0)
    PATH.handle(state, model(1, 9.0), 0.5)
    PATH.handle(state, model(2, 4.0), 0.5)
    PATH.handle(state, WorkerLost(1), 0.6)
    [sent] = of_type(end_block(PATH, state), Send)
    assert sent.receiver == 2
    assert state.params.tolist() == [2.0]
    PATH.handle(state, WorkerJoined(1), 1.5)
    [sent] = of_type(end_block(PATH, state, 2.0), Send)
    assert sent.receiver == 1


def test_worker_that_comes_back_takes_over_the_first_models_that_it_has() -> None:
    state = started(PATH, 0.0, has_rejoined=True)
    sent = of_type(end_block(PATH, state), Send)
    assert [send.message.numbers for send in sent] == [{"is_new": 1}] * 2
    PATH.handle(state, model(1, 4.0), 1.5)
    PATH.handle(state, model(2, 6.0), 1.5)
    PATH.handle(state, Received(1, Message("ack", 1)), 1.6)
    [sent_now] = of_type(end_block(PATH, state, 2.0), Send)
    assert state.params.tolist() == pytest.approx([5.0])
    assert sent_now.message.payload["params"].tolist() == pytest.approx([5.0])
    assert sent_now.message.numbers == {}


def test_a_model_of_one_that_has_come_back_counts_only_for_another_such() -> None:
    others, alike = started(PATH, 0.0), started(PATH, 0.0, has_rejoined=True)
    for state in (others, alike):
        PATH.handle(state, model(1, 3.0, is_new=True), 0.5)
        end_block(PATH, state)
    assert others.params.tolist() == [0.0]
    assert alike.params.tolist() == [1.0]
    assert alike.is_new


def test_one_that_had_to_go_back_mixes_with_no_earlier_model() -> None:
    state = started(PATH, 0.0)
    PATH.handle(state, model(1, 1e30), 0.5)
    good = torch.ones(1)
    PATH.handle(state, trained_event(good, good, num_steps=0, has_gone_back=True), 1.0)
    assert torch.equal(state.params, good)
    assert state.models == {}


@pytest.mark.parametrize("topology", [ring(5), star(5), MATCHINGS], ids=repr)
def test_exchange_alone_leads_to_agreement(topology: Topology) -> None:
    algorithm = swift(topology=topology, num_rounds=120)
    assert consensus_distance(mix_only(algorithm, START)) < 1e-3 * consensus_distance(START)


def test_training_comes_near_the_optimum_of_all() -> None:
    links = Links(default=Link(latency=0.1))
    after = final_params(make_world(swift(num_rounds=300), lr=0.02, links=links))
    torch.testing.assert_close(after.mean(0), TARGETS[:5].mean(0), atol=0.1, rtol=0.0)
    assert consensus_distance(after) < 0.3 * consensus_distance(TARGETS[:5])


def test_nobody_waits_for_the_slowest() -> None:
    recorder = Recorder()
    links = Links(default=Link(latency=0.7, bandwidth=40.0))
    make_world(swift(num_rounds=8), platforms=UNEVEN, observer=recorder, links=links).run()
    finished = {rank: now for now, rank, what in recorder.trace if what == "finished"}
    assert finished == pytest.approx(
        {rank: 8 / platform.throughput for rank, platform in enumerate(UNEVEN)}
    )


def test_losses_cost_only_what_is_lost() -> None:
    faults = Faults(script=(Drop(probability=0.3),), seed=1)
    algorithm = swift(num_rounds=120, timeout=2.0)
    after = final_params(
        make_world(algorithm, initial=START, lr=0.0, faults=faults, platforms=EVEN)
    )
    assert consensus_distance(after) < 1e-3 * consensus_distance(START)


def test_worker_that_comes_back_does_not_pull_the_others_to_the_start() -> None:
    # Without training all agree on 3; the one that crashed would bring in its 0.
    faults = Faults(script=(Crash(at=4.5, rank=1), Recover(at=6.25, rank=1)))
    initial = torch.full((5, 2), 3.0)
    after = final_params(
        make_world(swift(num_rounds=30), initial=initial, lr=0.0, faults=faults)
    )
    torch.testing.assert_close(after, initial)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": directed_ring(4)}, "SWIFT needs an undirected topology"),
        ({"mixing": ColumnStochastic()}, "rows of its mixing matrix must add up to 1"),
        ({"timeout": 0.0}, "timeout must be above 0 or None, got 0.0"),
        ({"local_steps": 0}, "local_steps must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swift(**arguments)
