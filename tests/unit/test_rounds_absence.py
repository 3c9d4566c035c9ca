"""One worker of a round-based algorithm, driven by hand: neighbors that go and come back."""

from __future__ import annotations

import pytest
import torch
from tests.algorithms import ALL
from tests.effects import kinds
from tests.round_worker import PATIENT, RING, Worker, heard, sends

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.mixing import MetropolisHastings
from edgegossip.contract.protocol import (
    Message,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Train,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import complete, ring, star

# Losing neighbors.


def test_lost_neighbors_weight_goes_to_oneself() -> None:
    worker = Worker(RING)
    worker.on(Started())
    worker.on(WorkerLost(3))
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=9.0)
    assert worker.value == pytest.approx((2 * 3 + 9) / 3)


@pytest.mark.parametrize("is_seen_again", [False, True])
def test_survivors_on_a_complete_graph_average_exactly(is_seen_again: bool) -> None:
    worker = Worker(Gossip(topology=complete(4), num_rounds=3))
    worker.on(Started())
    worker.on(WorkerLost(3))
    if is_seen_again:  # but has not said yet from which round on it takes part
        worker.on(WorkerJoined(3))
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=9.0)
    worker.hears(2, round=0, value=6.0)
    assert worker.value == pytest.approx((3 + 9 + 6) / 3)


def test_weights_of_survivors_keep_their_mean() -> None:
    # Without worker 2 the star has two leaves, and W[0, 1] = W[0, 3] = 1 / 3.
    middle = Worker(Gossip(topology=star(4), num_rounds=3))
    middle.on(Started())
    middle.on(WorkerLost(2))
    middle.trains_to(3.0)
    middle.hears(1, round=0, value=9.0)
    middle.hears(3, round=0, value=0.0)
    assert middle.value == pytest.approx((3 + 9 + 0) / 3)
    leaf = MetropolisHastings().weights(star(4), rank=1, round=0, absent=[2])
    assert leaf == pytest.approx({0: 1 / 3, 1: 2 / 3})


def test_loss_ends_the_waiting() -> None:
    worker = Worker(RING)
    worker.on(Started())
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=3.0)
    assert kinds(worker.on(WorkerLost(3))) == ["Train"]


def test_last_words_of_a_lost_neighbor_count() -> None:
    worker = Worker(RING)
    worker.on(Started())
    worker.hears(3, round=0, value=6.0)
    worker.on(WorkerLost(3))
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=9.0)
    assert worker.value == pytest.approx(6.0)


def test_last_words_of_a_lost_neighbor_do_not_make_it_waited_for() -> None:
    worker = Worker(RING)
    worker.on(Started())
    worker.on(WorkerLost(3))
    worker.hears(3, round=0, value=6.0)  # was long under way
    worker.trains_to(3.0)
    assert kinds(worker.hears(1, round=0, value=9.0)) == ["Train"]
    worker.trains_to(3.0)
    assert kinds(worker.hears(1, round=1, value=9.0)) == ["Train"]


def test_all_neighbors_lost_leaves_a_worker_to_itself() -> None:
    worker = Worker(RING)
    worker.on(Started())
    worker.on(WorkerLost(1))
    worker.on(WorkerLost(3))
    # Nothing is sent to those who cannot hear it.
    assert kinds(worker.trains_to(3.0)) == ["Train"]
    assert worker.value == 3.0


# Coming back.


def test_neighbor_that_joins_gets_parameters_and_the_next_round_it_will_hear() -> None:
    worker = Worker(RING)
    worker.on(Started())
    worker.on(WorkerLost(3))
    [training] = worker.on(WorkerJoined(3))
    worker.trains_to(3.0)
    [exchanging] = worker.on(WorkerJoined(3))
    assert sends([training, exchanging]) == [(3, "catch-up", 0), (3, "catch-up", 1)]
    assert isinstance(exchanging, Send)
    assert exchanging.message.payload["params"].tolist() == [3.0, 3.0]


def test_stranger_that_joins_gets_nothing() -> None:
    assert Worker(RING).on(WorkerJoined(2)) == []


def test_joined_neighbor_is_waited_for_from_the_round_it_names() -> None:
    worker = Worker(RING)
    worker.on(Started())
    worker.on(WorkerLost(3))
    worker.on(WorkerJoined(3))
    worker.on(heard(3, 1, 0.0, kind="catch-up"))
    worker.trains_to(3.0)
    assert kinds(worker.hears(1, round=0, value=3.0)) == ["Train"]
    worker.trains_to(3.0)
    assert worker.hears(1, round=1, value=3.0) == []
    assert kinds(worker.hears(3, round=1, value=3.0)) == ["Train"]


def test_rejoining_worker_takes_over_the_neighbor_that_is_furthest() -> None:
    worker = Worker(Gossip(topology=ring(4), num_rounds=9))
    assert worker.on(Started(has_rejoined=True)) == []
    assert worker.on(heard(3, 5, 50.0, kind="catch-up")) == []
    effects = worker.on(heard(1, 4, 40.0, kind="catch-up"))
    assert worker.state.round == 5
    assert worker.value == 50.0
    # It tells everybody from which round on it sends.
    assert sends(effects) == [(1, "catch-up", 5), (3, "catch-up", 5)]
    assert isinstance(effects[-1], Train)


def test_rejoining_worker_waits_for_neighbors_from_where_they_are() -> None:
    worker = Worker(Gossip(topology=ring(4), num_rounds=9))
    worker.on(Started(has_rejoined=True))
    worker.hears(3, round=5, value=7.0)  # overtakes the catch-up message
    worker.hears(1, round=2, value=1000.0)
    worker.on(heard(1, 4, 1.0, kind="catch-up"))
    worker.on(heard(3, 5, 1.0, kind="catch-up"))
    assert list(worker.state.inbox) == [5]
    worker.trains_to(7.0)
    assert worker.state.round == 5
    assert kinds(worker.hears(1, round=5, value=7.0)) == ["Train"]
    assert worker.value == pytest.approx(7.0)


def test_rejoining_at_the_end_finishes_at_once() -> None:
    worker = Worker(Gossip(topology=ring(2), num_rounds=3))
    worker.on(Started(has_rejoined=True))
    assert kinds(worker.on(heard(1, 3, 8.0, kind="catch-up"))) == ["Send", "Finish"]
    assert worker.value == 8.0


def test_rejoining_with_all_neighbors_lost_starts_over() -> None:
    worker = Worker(RING)
    worker.on(WorkerLost(1))
    worker.on(WorkerLost(3))
    assert kinds(worker.on(Started(has_rejoined=True))) == ["Train"]
    assert worker.state.round == 0


def test_loss_of_a_neighbor_ends_the_waiting_for_its_answer() -> None:
    worker = Worker(RING)
    worker.on(Started(has_rejoined=True))
    assert worker.on(heard(1, 2, 4.0, kind="catch-up")) == []
    assert kinds(worker.on(WorkerLost(3))) == ["Send", "Train"]
    assert worker.state.round == 2


def test_timeout_ends_the_waiting_for_answers() -> None:
    worker = Worker(PATIENT)
    assert worker.on(Started(has_rejoined=True), now=5.0) == [SetTimer("round", 15.0)]
    worker.on(heard(1, 2, 4.0, kind="catch-up"), now=6.0)
    assert "Train" in kinds(worker.on(TimerFired("round"), now=15.0))
    assert worker.state.round == 2


def test_worker_that_is_catching_up_helps_another_only_once_it_has_caught_up() -> None:
    # Were it to answer with round 0 and then go on in round 2, the other would wait for
    # messages of rounds that were never sent.
    worker = Worker(RING)
    worker.on(WorkerLost(3))
    worker.on(Started(has_rejoined=True))
    assert worker.on(WorkerJoined(3)) == []
    effects = worker.on(heard(1, 2, 4.0, kind="catch-up"))
    assert (3, "catch-up", 2) in sends(effects)


def test_two_that_catch_up_do_not_wait_for_each_other_whatever_they_hear() -> None:
    worker = Worker(RING)
    worker.on(Started(has_rejoined=True))
    worker.on(WorkerLost(3))
    worker.on(WorkerJoined(3))
    worker.hears(3, round=0, value=1.0)  # from before it was lost
    assert "Train" in kinds(worker.on(heard(1, 2, 4.0, kind="catch-up")))


def test_old_catch_up_message_does_not_undo_a_newer_one() -> None:
    # A worker that comes back twice may be announced in the wrong order. Waiting too little
    # does no harm; waiting for rounds that it never sends would last for ever.
    worker = Worker(RING)
    worker.on(Started())
    worker.on(WorkerLost(3))
    worker.on(WorkerJoined(3))
    worker.on(heard(3, 1, 0.0, kind="catch-up"))
    worker.on(heard(3, 0, 0.0, kind="catch-up"))
    worker.trains_to(3.0)
    assert kinds(worker.hears(1, round=0, value=3.0)) == ["Train"]


def test_an_announcement_replaces_models_that_its_receiver_will_skip() -> None:
    # The wrapper asks its inner one. On an undirected graph, a lead of one round is usual.
    algorithm = EdgeGossip(inner=EpochGossip(topology=ring(4), num_rounds=9))
    model = {"params": torch.zeros(2)}
    announcement = Message("catch-up", 3, model)
    for kind, exchange in (("params", 1), ("catch-up", 2), ("catch-up", 3)):
        assert algorithm.replaces(announcement, Message(kind, exchange, model))
    for exchange in (2, 3, 4):  # both ends may be in exchange 2, and must mix the same
        assert not algorithm.replaces(announcement, Message("params", exchange, model))
    assert not algorithm.replaces(announcement, Message("forecast", 1))
    assert not algorithm.replaces(Message("params", 3, model), Message("params", 1, model))
    # What only the older one says would be lost.
    assert not algorithm.replaces(announcement, Message("params", 1, model, {"speed": 1.0}))


def test_increments_and_mass_are_not_replaced() -> None:
    for name in ("choco-gossip", "sparse-push", "double-squeeze", "gosgd"):
        algorithm = ALL[name]
        for kind in ("params", "push", "catch-up"):
            older = Message(kind, 1, {"params": torch.zeros(2)})
            assert not algorithm.replaces(Message("catch-up", 3, older.payload), older)
