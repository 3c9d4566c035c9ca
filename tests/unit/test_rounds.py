"""One worker of a round-based algorithm, driven by hand: rounds, timeouts, arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.algorithms import SYNCHRONOUS
from tests.effects import kinds
from tests.round_worker import PATIENT, RING, Worker, sends
from torch import Tensor

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.mixing import ColumnStochastic
from edgegossip.contract.protocol import (
    Epochs,
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
    complete,
    directed_ring,
    from_edges,
    from_edges_by_round,
    ring,
)

# A round.


@pytest.mark.parametrize(
    ("algorithm", "work"),
    [
        (Gossip(topology=ring(4), num_rounds=1, local_steps=7), Steps(7)),
        (EpochGossip(topology=ring(4), num_rounds=1), Epochs()),
    ],
)
def test_trains_before_it_exchanges(algorithm: Gossip, work: object) -> None:
    [effect] = Worker(algorithm).on(Started())
    assert isinstance(effect, Train)
    assert effect.work == work


def test_trains_from_a_snapshot_that_mixing_does_not_write_to() -> None:
    worker = Worker(RING)
    [train] = worker.on(Started())
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=6.0)
    worker.hears(3, round=0, value=9.0)
    assert isinstance(train, Train)
    assert train.params.tolist() == [0.0, 0.0]


def test_what_one_that_has_lied_has_sent_for_later_is_forgotten() -> None:
    worker = Worker(RING)
    worker.on(Started())
    for round in (0, 1, 2):
        worker.hears(1, round=round, value=1e6)
    worker.hears(3, round=0, value=3.0)
    worker.on(WorkerLost(1, has_lied=True))
    worker.trains_to(3.0)
    assert worker.value == 3.0
    assert not any(1 in box for box in worker.state.inbox.values())


def test_sends_to_its_neighbors_only_what_it_has_after_training() -> None:
    worker = Worker(RING)
    worker.on(Started())
    effects = worker.trains_to(3.0)
    assert sends(effects) == [(1, "params", 0), (3, "params", 0)]
    assert all(
        effect.message.payload["params"].tolist() == [3.0, 3.0]
        for effect in effects
        if isinstance(effect, Send)
    )


def test_waits_for_all_neighbors_then_mixes_and_trains_again() -> None:
    worker = Worker(RING)
    worker.on(Started())
    worker.trains_to(3.0)
    assert worker.hears(3, round=0, value=6.0) == []
    [train] = worker.hears(1, round=0, value=9.0)
    assert isinstance(train, Train)
    assert worker.value == pytest.approx((3 + 6 + 9) / 3)
    assert worker.state.round == 1


def test_message_that_comes_during_training_waits() -> None:
    worker = Worker(RING)
    worker.on(Started())
    assert worker.hears(1, round=0, value=6.0) == []
    assert worker.hears(3, round=0, value=9.0) == []
    assert worker.value == 0.0
    assert kinds(worker.trains_to(3.0)) == ["Send", "Send", "Train"]
    assert worker.value == pytest.approx(6.0)


def test_message_early_by_a_round_waits_for_its_round() -> None:
    worker = Worker(RING)
    worker.on(Started())
    worker.trains_to(3.0)
    assert worker.hears(1, round=1, value=100.0) == []
    worker.hears(1, round=0, value=3.0)
    worker.hears(3, round=0, value=3.0)
    assert worker.value == pytest.approx(3.0)
    worker.trains_to(10.0)
    worker.hears(3, round=1, value=10.0)
    assert worker.value == pytest.approx(40.0)


def test_message_of_an_earlier_round_is_ignored() -> None:
    worker = Worker(RING)
    worker.on(Started())
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=3.0)
    worker.hears(3, round=0, value=3.0)
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=1000.0)
    worker.hears(3, round=0, value=1000.0)
    assert worker.state.round == 1
    assert worker.state.inbox == {}
    assert worker.value == 3.0


def test_message_of_one_who_is_no_neighbor_is_ignored() -> None:
    worker = Worker(RING)
    worker.on(Started())
    worker.trains_to(3.0)
    worker.hears(2, round=0, value=1000.0)
    worker.hears(2, round=7, value=1000.0)
    worker.hears(1, round=0, value=3.0)
    worker.hears(3, round=0, value=3.0)
    assert worker.state.round == 1
    assert worker.value == 3.0
    assert not worker.state.inbox  # nor kept: it may come without end


def test_arrival_order_does_not_matter() -> None:
    def mix(order: list[int]) -> Tensor:
        algorithm = Gossip(topology=complete(4), num_rounds=1)
        worker = Worker(algorithm)
        worker.on(Started())
        worker.trains_to(0.1)
        for sender in order:
            worker.hears(sender, round=0, value=0.7**sender * 1e3)
        return worker.state.params

    assert torch.equal(mix([1, 2, 3]), mix([3, 2, 1]))
    assert torch.equal(mix([1, 2, 3]), mix([2, 3, 1]))


def test_finishes_after_its_rounds_and_stays_finished() -> None:
    worker = Worker(Gossip(topology=ring(2), num_rounds=1, timeout=1.0))
    worker.on(Started())
    worker.trains_to(1.0)
    assert kinds(worker.hears(1, round=0, value=3.0)) == ["Finish"]
    assert worker.hears(1, round=0, value=9.0) == []
    assert worker.on(TimerFired("round"), now=1.0) == []
    assert worker.on(WorkerLost(1)) == []
    assert worker.value == pytest.approx(2.0)


def test_worker_without_neighbors_goes_from_round_to_round() -> None:
    worker = Worker(Gossip(topology=ring(1), num_rounds=2))
    worker.on(Started())
    assert kinds(worker.trains_to(1.0)) == ["Train"]
    assert kinds(worker.trains_to(2.0)) == ["Finish"]
    assert worker.value == 2.0


def test_topology_may_change_from_round_to_round() -> None:
    topology = from_edges_by_round(3, [[(0, 1)], [(0, 2)], [(1, 2)]])
    worker = Worker(Gossip(topology=topology, num_rounds=3))
    worker.on(Started())
    assert sends(worker.trains_to(2.0)) == [(1, "params", 0)]
    worker.hears(1, round=0, value=4.0)
    assert worker.value == pytest.approx(3.0)
    assert sends(worker.trains_to(2.0)) == [(2, "params", 1)]
    worker.hears(2, round=1, value=6.0)
    assert worker.value == pytest.approx(4.0)
    # Nobody to hear from in round 2: it goes on at once.
    assert kinds(worker.trains_to(8.0)) == ["Finish"]


# Waiting no longer than the timeout.


def test_sets_a_timer_when_it_starts_to_wait() -> None:
    worker = Worker(PATIENT)
    worker.on(Started(), now=1.0)
    effects = worker.trains_to(3.0, now=5.0)
    assert [effect for effect in effects if isinstance(effect, SetTimer)] == [
        SetTimer("round", 15.0)
    ]


def test_timeout_goes_on_with_what_has_arrived() -> None:
    worker = Worker(PATIENT)
    worker.on(Started())
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=9.0)
    assert kinds(worker.on(TimerFired("round"), now=10.0)) == ["Train"]
    # The weight of the neighbor that is missing goes to the worker itself.
    assert worker.value == pytest.approx((2 * 3 + 9) / 3)
    assert worker.hears(3, round=0, value=1000.0) == []
    assert worker.state.inbox == {}


def test_timer_of_an_earlier_round_does_no_harm_to_training() -> None:
    worker = Worker(PATIENT)
    worker.on(Started())
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=3.0)
    worker.hears(3, round=0, value=3.0)
    assert worker.on(TimerFired("round"), now=10.0) == []
    assert worker.state.round == 1


# Arguments.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gossip(topology=ring(4), num_rounds=0), r"num_rounds .* at least 1, got 0"),
        (
            lambda: Gossip(topology=ring(4), num_rounds=1.5),  # type: ignore[arg-type]
            r"num_rounds must be a whole number, got 1.5",
        ),
        (
            lambda: Gossip(topology=ring(4), num_rounds=1, local_steps=2.5),  # type: ignore[arg-type]
            r"local_steps must be a whole number, got 2.5",
        ),
        (
            lambda: Gossip(topology=ring(4), num_rounds=1, timeout=0.0),
            r"timeout must be above 0 or None, got 0.0",
        ),
        (
            lambda: Gossip(topology=ring(4), num_rounds=1, timeout=math.nan),
            r"timeout must be above 0 or None, got nan",
        ),
        (
            lambda: Gossip(topology=ring(4), num_rounds=1, local_steps=0),
            r"local_steps must be at least 1, got 0",
        ),
        (
            lambda: Gossip(topology=directed_ring(4), num_rounds=1),
            r"Gossip needs an undirected topology, got a directed one.*push-sum",
        ),
        (
            lambda: EpochGossip(topology=directed_ring(4), num_rounds=1),
            r"EpochGossip needs an undirected topology",
        ),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("algorithm", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_every_rank_trains_and_is_evaluated(algorithm: Gossip) -> None:
    assert {algorithm.role(rank).name for rank in range(5)} == {"worker"}


def test_star_gives_the_middle_what_theory_says() -> None:
    # Metropolis-Hastings on a path 1 - 0 - 2: all weights 1/3.
    worker = Worker(Gossip(topology=from_edges(3, [(0, 1), (0, 2)]), num_rounds=1))
    worker.on(Started())
    worker.trains_to(1.0)
    worker.hears(1, round=0, value=2.0)
    assert kinds(worker.hears(2, round=0, value=6.0)) == ["Finish"]
    assert worker.value == pytest.approx(3.0)


def test_finish_is_said_once() -> None:
    worker = Worker(Gossip(topology=ring(2), num_rounds=1))
    worker.on(Started())
    worker.trains_to(1.0)
    effects = worker.hears(1, round=0, value=1.0)
    assert effects == [Finish()]


def test_a_rule_that_does_not_average_is_refused() -> None:
    with pytest.raises(ValueError, match="must add up to 1"):
        EpochGossip(topology=ring(4), num_rounds=1, mixing=ColumnStochastic())


def test_a_timer_of_another_name_is_not_a_timeout() -> None:
    worker = Worker(Gossip(topology=ring(4), num_rounds=2, timeout=1.0))
    worker.on(Started())
    worker.trains_to(3.0)
    assert worker.on(TimerFired("forecast")) == []
