"""One worker of a round-based algorithm, driven by hand: some were away, others went on."""

from __future__ import annotations

from tests.effects import kinds
from tests.round_worker import Worker, heard, sends

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.protocol import Started, Train, WorkerJoined, WorkerLost
from edgegossip.contract.topology import complete, directed_ring, ring, star

RING = Gossip(topology=ring(4), num_rounds=30)  # worker 0 hears from 1 and 3
ALL_TO_ALL = Gossip(topology=complete(4), num_rounds=30)


def cut_off(algorithm: Gossip) -> Worker:
    """A worker that has lost all others in round 0, and reaches them again."""
    worker = Worker(algorithm)
    worker.on(Started())
    others = algorithm.topology.in_neighbors(0, 0)
    for rank in others:
        worker.on(WorkerLost(rank))
    for rank in others:
        worker.on(WorkerJoined(rank))
    return worker


def test_one_that_was_away_goes_on_where_the_others_are_once_its_training_is_done() -> None:
    worker = cut_off(RING)
    assert worker.on(heard(1, 20, 7.0, kind="catch-up")) == []
    worker.on(heard(3, 20, 9.0, kind="catch-up"))
    effects = worker.trains_to(1.0)
    assert sends(effects) == [(1, "catch-up", 20), (3, "catch-up", 20)]
    assert kinds(effects) == ["Send", "Send", "Train"]
    assert (worker.state.round, worker.value) == (20, 7.0)


def test_one_that_waits_goes_on_at_once() -> None:
    worker = cut_off(RING)
    worker.on(heard(3, 0, 7.0, kind="catch-up"))
    assert "Train" not in kinds(worker.trains_to(1.0))  # it waits for worker 3
    assert kinds(worker.on(heard(1, 20, 7.0, kind="catch-up")))[-1] == "Train"
    assert worker.state.round == 20


def test_a_neighbor_that_is_a_round_ahead_is_followed_round_by_round() -> None:
    worker = cut_off(RING)
    worker.on(heard(1, 1, 7.0, kind="catch-up"))
    assert sends(worker.trains_to(1.0))[0][1:] == ("params", 0)


def test_of_three_neighbors_one_alone_sends_nobody_ahead() -> None:
    worker = cut_off(ALL_TO_ALL)
    worker.on(heard(3, 0, 7.0, kind="catch-up"))
    worker.on(heard(1, 30, 7.0, kind="catch-up"))
    assert sends(worker.trains_to(1.0)) == [(j, "params", 0) for j in (1, 2, 3)]
    worker.on(heard(2, 20, 9.0, kind="catch-up"))
    assert (worker.state.round, worker.value) == (20, 9.0)  # the second furthest


def test_one_that_comes_back_believes_the_second_furthest_of_three() -> None:
    worker = Worker(ALL_TO_ALL)
    worker.on(Started(has_rejoined=True))
    worker.on(heard(1, 30, 7.0, kind="catch-up"))
    worker.on(heard(2, 20, 8.0, kind="catch-up"))
    [*_, training] = worker.on(heard(3, 19, 9.0, kind="catch-up"))
    assert isinstance(training, Train)
    assert (worker.state.round, worker.value) == (20, 8.0)


def ahead(algorithm: Gossip) -> Worker:
    """A worker in round 10 that has lost worker 1 and reaches it again, far behind."""
    worker = Worker(algorithm)
    worker.on(Started(has_rejoined=True))
    others = [j for j in algorithm.topology.in_neighbors(0, 0) if j != 1]
    worker.on(WorkerLost(1))
    for rank in others:
        worker.on(heard(rank, 10, 1.0, kind="catch-up"))
    assert worker.state.round == 10
    worker.on(WorkerJoined(1))
    worker.on(heard(1, 2, 1.0, kind="catch-up"))
    worker.trains_to(2.0)
    return worker


def test_nobody_waits_for_one_that_will_skip_its_rounds_until_it_has() -> None:
    worker = ahead(ALL_TO_ALL)
    worker.hears(2, round=10, value=2.0)
    worker.hears(1, round=2, value=2.0)  # what it still had to say of its own round
    assert kinds(worker.hears(3, round=10, value=2.0)) == ["Train"]
    worker.on(heard(1, 11, 2.0, kind="catch-up"))
    worker.trains_to(2.0)
    worker.hears(2, round=11, value=2.0)
    assert worker.hears(3, round=11, value=2.0) == []  # now it is waited for
    assert kinds(worker.hears(1, round=11, value=2.0)) == ["Train"]


def test_one_that_does_not_know_how_far_it_is_behind_is_told_again() -> None:
    worker = ahead(ALL_TO_ALL)
    assert sends(worker.hears(1, round=2, value=2.0)) == [(1, "catch-up", 11)]
    worker.on(heard(1, 11, 2.0, kind="catch-up"))
    assert sends(worker.hears(1, round=11, value=2.0)) == []
    worker.on(WorkerLost(1))
    assert sends(worker.hears(1, round=2, value=2.0)) == []


def test_one_that_is_ahead_alone_waits_for_the_others() -> None:
    worker = Worker(Gossip(topology=star(4), num_rounds=30))  # worker 1 hears from 0 only
    worker.on(Started(has_rejoined=True))
    for rank in (1, 2, 3):
        worker.on(WorkerLost(rank))
    for _ in range(10):
        worker.trains_to(1.0)
    worker.on(WorkerJoined(1))
    worker.on(heard(1, 2, 1.0, kind="catch-up"))
    assert kinds(worker.trains_to(1.0))[-1] == "Train"  # it will skip: it hears nobody else
    worker = Worker(ALL_TO_ALL)
    worker.on(Started(has_rejoined=True))
    for rank in (1, 2, 3):
        worker.on(WorkerLost(rank))
    for _ in range(10):
        worker.trains_to(1.0)
    for rank in (1, 2, 3):
        worker.on(WorkerJoined(rank))
        worker.on(heard(rank, 2, 1.0, kind="catch-up"))
    assert "Train" not in kinds(worker.trains_to(1.0))


def test_in_a_directed_graph_a_lead_is_no_sign_of_having_been_away() -> None:
    topology = directed_ring(4)
    assert topology.longest_lead == 3
    assert complete(4).longest_lead == 1
