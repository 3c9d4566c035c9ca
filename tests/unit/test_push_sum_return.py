"""One push-sum worker, driven by hand: neighbors that come back, sessions of links."""

from __future__ import annotations

import math

import pytest
import torch
from tests.effects import only
from tests.push_sum import CAREFUL, Worker, acknowledged, pushed, sends

from edgegossip.algorithms.push_sum.push_sum import HARDLY_ANY
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.contract.protocol import Send, Started, Train, WorkerJoined, WorkerLost
from edgegossip.contract.topology import directed_ring


def test_neighbor_that_has_lost_all_is_given_half_and_told_the_round() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    worker.state.params, worker.state.weight = torch.tensor([3.0, 3.0]), 1.5
    worker.on(WorkerLost(2))
    send = only(Send, worker.on(WorkerJoined(2, has_restarted=True), now=7.0))
    assert (send.receiver, send.message.kind, send.message.round) == (2, "catch-up", 0)
    assert send.message.payload["params"].tolist() == [2.0, 2.0]
    assert send.message.numbers == {"weight": 0.75, "session": 7.0}
    assert worker.state.weight == 0.75
    assert worker.value == 2.0
    assert worker.state.params.tolist() == [1.5, 1.5]


def test_neighbor_that_was_only_cut_off_is_told_the_round_and_given_nothing() -> None:
    worker = Worker()
    worker.on(Started())
    worker.on(WorkerLost(2))
    send = only(Send, worker.on(WorkerJoined(2), now=7.0))
    assert send.message.numbers["weight"] == 0.0
    assert worker.state.weight == 1.0


def test_worker_that_comes_back_weighs_next_to_nothing_until_it_is_given_mass() -> None:
    worker = Worker()
    assert worker.on(Started(has_rejoined=True)) == []
    assert worker.state.weight == HARDLY_ANY
    assert worker.value == 0.0
    effects = worker.on(pushed(2, 5.0, 0.5, session=7.0, kind="catch-up"), now=8.0)
    assert sends(effects) == [(2, "catch-up", 2)]
    assert only(Train, effects).params.tolist() == pytest.approx([5.0, 5.0])
    assert worker.state.round == 2
    assert worker.state.weight == pytest.approx(0.5)


def test_worker_that_comes_back_to_nobody_starts_from_the_initial_parameters() -> None:
    worker = Worker()
    worker.state.params = torch.tensor([8.0, 8.0])
    worker.on(WorkerLost(0))
    train = only(Train, worker.on(Started(has_rejoined=True)))
    assert train.params.tolist() == [8.0, 8.0]
    assert worker.state.weight == HARDLY_ANY


def test_what_was_taken_back_is_refused_when_it_comes_after_all() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    worker.on(pushed(1, 5.0, 0.0, session=7.0, kind="catch-up"))
    assert worker.hears(0, value=100.0) == []  # of the session before, not even acknowledged
    assert not worker.state.links.inlets[0].held
    assert sends(worker.hears(1, value=4.0, session=7.0)) == [(0, "acknowledged", 2)]


def test_push_may_overtake_what_opens_its_session() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    assert worker.hears(1, value=4.0, session=7.0) == []
    effects = worker.on(pushed(1, 5.0, 0.0, session=7.0, kind="catch-up"))
    assert sends(effects) == [(0, "acknowledged", 2)]


def test_only_the_newest_session_is_waited_for() -> None:
    worker = Worker(CAREFUL)
    for session in [*range(1, 100), *range(50)]:
        worker.hears(1, value=4.0, session=float(session))
    assert [*worker.state.links.inlets[0].held] == [(99.0, 1), (0.0, 1)]


def test_a_stranger_has_no_mass_to_give() -> None:
    worker = Worker()
    worker.on(pushed(0, 100.0, sender=2))
    worker.on(pushed(0, 100.0, 0.5, sender=2, session=7.0, kind="catch-up"))
    assert not worker.state.links.inlets
    assert not worker.state.arrived


def test_older_session_does_not_return() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    worker.on(pushed(1, 5.0, 0.25, session=7.0, kind="catch-up"))
    assert worker.on(pushed(0, 5.0, 0.5, session=6.0, kind="catch-up")) == []
    assert [mass.weight for mass in worker.state.arrived] == [0.25]


def test_restarted_neighbor_may_have_a_clock_that_began_anew() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    worker.on(pushed(0, 5.0, 0.0, session=700.0, kind="catch-up"))
    worker.on(WorkerLost(0))
    worker.on(WorkerJoined(0, has_restarted=True))
    effects = worker.on(pushed(0, 5.0, 0.0, session=2.0, kind="catch-up"))
    assert sends(effects) == [(0, "acknowledged", 0)]
    assert worker.state.links.inlets[0].session == 2.0


def test_acknowledgment_of_an_earlier_session_counts_for_nothing() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    worker.on(WorkerLost(2))
    worker.on(WorkerJoined(2), now=7.0)
    worker.on(acknowledged(3, session=0.0))
    assert list(worker.state.links.outlets[2].awaiting) == [-1]
    worker.on(acknowledged(0, session=7.0))
    assert not worker.state.links.outlets[2].awaiting


def test_sessions_are_told_apart_even_if_they_begin_at_the_same_time() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    sessions = []
    for _ in range(2):
        worker.on(WorkerLost(2), now=7.0)
        send = only(Send, worker.on(WorkerJoined(2), now=7.0))
        sessions.append(send.message.numbers["session"])
    assert sessions == [7.0, math.nextafter(7.0, math.inf)]


@pytest.mark.parametrize("name", ["weight", "session"])
def test_a_weight_or_session_that_no_float32_holds_is_not_admitted(name: str) -> None:
    algorithm = StochasticGradientPush(topology=directed_ring(3), num_rounds=3)
    spec = algorithm.schema(torch.zeros(2))["catch-up"]
    payload, numbers = {"params": torch.zeros(2)}, {"weight": 0.5, "session": 7.0}
    assert spec.bad_values(payload, numbers) is None
    assert spec.bad_values(payload, {**numbers, name: 1e39}) is not None
