"""One push-sum worker, driven by hand: shares, waiting, acknowledgments, comings and goings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.effects import kinds, only
from tests.push_sum import CAREFUL, Worker, acknowledged, pushed, sends

from edgegossip.algorithms.push_sum.difference_push import DifferencePush
from edgegossip.algorithms.push_sum.push_sum import HARDLY_ANY
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.compression.compressor import Identity
from edgegossip.contract.protocol import (
    Finish,
    Send,
    SetTimer,
    Started,
    Steps,
    TimerFired,
    Train,
    WorkerLost,
)
from edgegossip.contract.topology import (
    ListedTopology,
    complete,
    directed_ring,
    from_edges_by_round,
    ring,
)

# A round.


def test_trains_from_the_estimate_and_keeps_half_of_numerator_and_weight() -> None:
    worker = Worker(
        StochasticGradientPush(topology=directed_ring(3), num_rounds=3, local_steps=4)
    )
    worker.state.params, worker.state.weight = torch.tensor([6.0, 8.0]), 2.0
    train = only(Train, worker.on(Started()))
    assert train.params.tolist() == [3.0, 4.0]
    assert train.work == Steps(4)
    send = only(Send, worker.trains_to(5.0))
    assert send.receiver == 2
    assert send.message.payload["params"].tolist() == [10.0, 10.0]
    assert send.message.numbers == {"weight": 2.0, "session": 0.0}
    assert worker.state.params.tolist() == [5.0, 5.0]
    assert worker.state.weight == 1.0


def test_waits_for_the_in_neighbor_and_merges_its_half() -> None:
    worker = Worker()
    worker.on(Started())
    assert kinds(worker.trains_to(4.0)) == ["Send"]
    train = only(Train, worker.hears(0, value=9.0, weight=3.0))
    # (2 + 4.5) / (0.5 + 1.5)
    assert train.params.tolist() == [3.25, 3.25]
    assert worker.state.round == 1


def test_no_worker_ever_claims_more_weight_than_others_let_in() -> None:
    worker = Worker()
    most = worker.algorithm.schema(torch.zeros(2))["push"].numbers["weight"][1]
    worker.on(Started())
    for session in (1.0, 2.0):
        worker.hears(0, value=6.0, weight=most, session=session, kind="catch-up")
    worker.trains_to(0.0)
    worker.hears(0, value=6.0, weight=1.0, session=2.0)
    assert worker.value == pytest.approx(6.0, abs=0.01)
    send = only(Send, worker.trains_to(5.0))
    assert 0.9 * most < send.message.numbers["weight"] <= most


def test_what_one_that_has_lied_has_sent_too_early_is_forgotten() -> None:
    worker = Worker()
    worker.on(Started())
    worker.hears(0, value=100.0)
    worker.hears(2, value=100.0)
    worker.on(WorkerLost(0, has_lied=True))
    worker.trains_to(4.0)
    assert worker.value == 4.0
    assert not any(link.held for link in worker.state.links.inlets.values())


def test_mass_of_a_later_round_waits() -> None:
    worker = Worker()
    worker.on(Started())
    worker.hears(0, value=4.0)
    worker.hears(1, value=100.0)
    worker.trains_to(4.0)
    assert worker.state.round == 1
    assert worker.value == 4.0
    worker.trains_to(4.0)
    assert worker.state.round == 2
    assert worker.value == pytest.approx((2 + 50) / 1)


def test_message_that_overtakes_another_is_merged_after_it() -> None:
    worker = Worker()
    worker.on(Started())
    worker.trains_to(4.0)
    assert worker.hears(1, value=100.0) == []
    worker.hears(0, value=4.0)
    assert worker.value == 4.0


def test_mass_that_comes_too_late_is_merged_in_the_next_round() -> None:
    worker = Worker(
        StochasticGradientPush(topology=directed_ring(3), num_rounds=3, timeout=5.0)
    )
    worker.on(Started())
    worker.trains_to(4.0)
    assert kinds(worker.on(TimerFired("round"), now=5.0)) == ["Train"]
    worker.hears(0, value=9.0, weight=1.0)
    assert worker.value == 4.0  # training is under way
    worker.trains_to(4.0)
    worker.hears(1, value=4.0)
    # (0.25 * 4 + 4.5 + 2) / (0.25 + 0.5 + 0.5)
    assert worker.value == pytest.approx(6.0)


def test_mass_that_comes_after_the_end_is_merged_at_once() -> None:
    worker = Worker(
        StochasticGradientPush(topology=directed_ring(3), num_rounds=1, timeout=5.0)
    )
    worker.on(Started())
    worker.trains_to(4.0)
    assert worker.on(TimerFired("round"), now=5.0) == [Finish()]
    assert worker.hears(0, value=8.0) == []
    assert worker.value == pytest.approx(6.0)


def test_masses_of_a_round_are_merged_in_rank_order() -> None:
    def merge(order: list[int]) -> list[float]:
        worker = Worker(StochasticGradientPush(topology=complete(5), num_rounds=3))
        worker.on(Started())
        worker.trains_to(0.1)
        for sender in order:
            worker.on(pushed(0, (-7.3) ** sender / 3, sender=sender))
        assert worker.state.round == 1
        values: list[float] = worker.state.params.tolist()
        return values

    assert merge([0, 2, 3, 4]) == merge([4, 2, 0, 3]) == merge([3, 4, 2, 0])


def test_worker_that_is_sent_to_in_no_round_is_not_waited_for() -> None:
    graph = from_edges_by_round(3, [[(0, 1)], [(1, 2), (2, 0)]], directed=True)
    worker = Worker(StochasticGradientPush(topology=graph, num_rounds=4))
    worker.on(Started())
    assert worker.trains_to(4.0) == []  # nobody to send to, 0 to wait for
    assert kinds(worker.hears(0, value=4.0)) == ["Train"]
    assert kinds(worker.trains_to(4.0)) == ["Send", "Train"]


# Links that lose messages.


def test_push_is_kept_until_it_is_acknowledged() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    assert worker.trains_to(4.0, now=1.0)[1] == SetTimer("resend", 3.0)
    assert list(worker.state.links.outlets[2].awaiting) == [0]
    assert worker.on(acknowledged(1)) == []
    assert not worker.state.links.outlets[2].awaiting


def test_push_is_sent_again_as_it_was_and_with_growing_patience() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    send = only(Send, worker.trains_to(4.0, now=1.0))
    again = worker.on(TimerFired("resend"), now=3.0)
    assert only(Send, again).message is send.message
    assert only(SetTimer, again) == SetTimer("resend", 6.0)
    assert only(SetTimer, worker.on(TimerFired("resend"), now=6.0)) == SetTimer("resend", 10.5)
    assert worker.state.weight == 0.5


def test_only_what_the_receiver_needs_next_is_sent_again() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    worker.trains_to(4.0, now=0.0)
    worker.hears(0, value=4.0)
    worker.trains_to(4.0, now=0.5)
    assert list(worker.state.links.outlets[2].awaiting) == [0, 1]
    assert sends(worker.on(TimerFired("resend"), now=9.0)) == [(2, "push", 0)]


def test_acknowledgments_say_what_is_needed_next_and_cover_all_before_it() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    first, early = worker.hears(0, value=4.0), worker.hears(2, value=4.0)
    assert sends(first) == [(0, "acknowledged", 1)]
    assert sends(early) == [(0, "acknowledged", 1)]
    assert sends(worker.hears(1, value=4.0)) == [(0, "acknowledged", 3)]


def test_message_that_comes_twice_is_acknowledged_twice_and_merged_once() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    worker.trains_to(4.0)
    assert "Train" in kinds(worker.hears(0, value=4.0))
    weight = worker.state.weight
    assert sends(worker.hears(0, value=4.0)) == [(0, "acknowledged", 1)]
    assert worker.state.weight == weight
    assert not worker.state.arrived
    assert not worker.state.links.inlets[0].held


def test_finishes_once_all_is_acknowledged() -> None:
    worker = Worker(
        StochasticGradientPush(topology=directed_ring(3), num_rounds=1, resend_after=2)
    )
    worker.on(Started())
    worker.trains_to(4.0)
    assert "Finish" not in kinds(worker.hears(0, value=4.0))
    assert worker.on(acknowledged(1)) == [Finish()]
    assert worker.on(acknowledged(1)) == []


def test_no_acknowledgment_is_sent_where_links_lose_nothing() -> None:
    worker = Worker()
    worker.on(Started())
    assert kinds(worker.trains_to(4.0)) == ["Send"]
    assert kinds(worker.hears(0, value=4.0)) == ["Train"]
    assert not worker.state.links.outlets[2].awaiting


# Workers that go.


def test_lost_neighbors_share_stays() -> None:
    worker = Worker()
    worker.on(Started())
    worker.on(WorkerLost(2))
    assert worker.trains_to(4.0) == []
    assert worker.state.weight == 1.0


def test_what_a_lost_neighbor_has_not_acknowledged_is_taken_back() -> None:
    worker = Worker(CAREFUL)
    worker.on(Started())
    worker.trains_to(4.0)
    worker.on(WorkerLost(2))
    worker.hears(0, value=4.0)
    assert worker.state.weight == 1.5
    assert worker.value == pytest.approx(4.0)
    assert worker.on(TimerFired("resend"), now=99.0) == []


def test_loss_of_the_receiver_may_be_what_finishes_a_worker() -> None:
    worker = Worker(
        StochasticGradientPush(topology=directed_ring(3), num_rounds=1, resend_after=2)
    )
    worker.on(Started())
    worker.trains_to(4.0)
    worker.hears(0, value=4.0)
    assert worker.on(WorkerLost(2)) == [Finish()]
    assert worker.state.weight == 1.5


def test_one_to_which_nobody_sends_any_more_keeps_its_estimate() -> None:
    """It gives half of its weight away each round, to the end."""
    worker = Worker(StochasticGradientPush(topology=directed_ring(3), num_rounds=400))
    worker.on(Started())
    worker.on(WorkerLost(0))
    given = 0.0
    for _ in range(400):
        [push, *_] = worker.trains_to(4.0)
        assert isinstance(push, Send)
        given += push.message.numbers["weight"] / 2
    assert worker.state.round == 400
    assert worker.value == pytest.approx(4.0)
    # What was made on the way weighs next to nothing.
    assert given + worker.state.weight == pytest.approx(1.0, abs=10 * HARDLY_ANY)


def test_rounds_that_wait_for_nobody_follow_each_other_however_many() -> None:
    algorithm = DifferencePush(
        topology=ring(1), num_rounds=1, final_rounds=5000, compressor=Identity()
    )
    worker = Worker(algorithm)
    worker.state = algorithm.init(0, torch.zeros(2))
    worker.on(Started())
    assert kinds(worker.trains_to(1.0)) == ["Finish"]
    assert worker.state.round == 5001


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rounds": 0}, "num_rounds must be at least 1, got 0"),
        ({"local_steps": 0}, "local_steps must be at least 1, got 0"),
        ({"resend_after": 0.0}, "resend_after must be above 0 or None, got 0.0"),
        ({"timeout": -1.0}, "timeout must be above 0 or None, got -1.0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"topology": directed_ring(3), "num_rounds": 3, **arguments}
    with pytest.raises(ValueError, match=message):
        StochasticGradientPush(**settings)


def test_graph_on_which_some_never_hear_of_others_is_refused() -> None:
    one_way = ListedTopology(
        name="one way",
        num_workers=2,
        is_directed=True,
        period=1,
        outgoing=(((1,), ()),),
        incoming=(((), (0,)),),
    )
    with pytest.raises(ValueError, match="worker 0 cannot be reached by worker 1"):
        StochasticGradientPush(topology=one_way, num_rounds=1)
