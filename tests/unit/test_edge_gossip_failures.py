"""One balanced worker, driven by hand: who fails, who takes over, who stands by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from tests.balanced_worker import CANCEL, INNER, PUSHING, Worker, sends
from tests.effects import asked, kinds, only

from edgegossip.algorithms.wrappers.edge_gossip.balancer import Balancer
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.edge_gossip.forecasts import PlatformForecast
from edgegossip.contract.errors import PlatformError
from edgegossip.contract.protocol import (
    Assign,
    Assigned,
    Effect,
    Epochs,
    Finish,
    Message,
    Predict,
    Received,
    Send,
    SetTimer,
    Steps,
    TimerFired,
    Train,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.runs.final_average import FinalAverage

FREE = Finish(may_resume=True)
"""Has no work, but may get some."""

# Failures.


def test_a_failed_platform_passes_on_its_parameters_untrained() -> None:
    worker = Worker(EdgeGossip(inner=INNER))
    effects = worker.begins(1e-9, 50.0, 40.0)
    assert effects[0] == CANCEL
    assert sends(effects) == [(1, "params"), (2, "params")]
    assert worker.state.params.tolist() == [0.0, 0.0]


def test_where_nobody_waits_for_it_a_failed_platform_rests_until_it_has_recovered() -> None:
    worker = Worker(EdgeGossip(inner=PUSHING))
    # The fastest takes 2 s for its pass.
    assert worker.begins(1e-9, 50.0, 40.0) == [CANCEL, FREE, SetTimer("rest", 2.0)]
    assert worker.hears(1, 50.0, now=1.0) == []  # what it hears meanwhile changes nothing
    assert worker.on(TimerFired("rest"), now=2.0) == [Predict()]
    # Nothing new: telling it again and again would keep the run open.
    assert worker.expects(1e-9, now=2.0) == [SetTimer("rest", 4.0)]
    assert worker.on(TimerFired("rest"), now=4.0) == [Predict()]
    recovered = worker.expects(25.0, now=4.0)
    assert asked(only(Train, recovered)) == (Steps(1), 0.5)


@pytest.mark.parametrize("spread", ["exact", "gossip"])
def test_a_failed_platform_that_has_heard_of_nobody_rests_too(
    spread: Literal["exact", "gossip"],
) -> None:
    worker = Worker(EdgeGossip(inner=PUSHING, spread=spread))
    worker.starts()
    effects = worker.expects(1e-9)
    if spread == "exact":
        effects = worker.on(TimerFired("forecast"))
    assert effects[-2:] == [FREE, SetTimer("rest", 1.0)]


@pytest.mark.parametrize(("throughput", "cost"), [(1e-9, 100.0), (0.0, 100.0), (20.0, 0.0)])
def test_who_is_not_to_train_waits_for_no_forecasts(throughput: float, cost: float) -> None:
    worker = Worker(EdgeGossip(inner=INNER), cost=cost)
    worker.starts()
    assert only(SetTimer, worker.expects(throughput)) == SetTimer("forecast", 0.0)
    assert "params" in [kind for _, kind in sends(worker.on(TimerFired("forecast")))]
    for sender in (1, 2):
        worker.on(Received(sender, Message("params", 0, {"params": torch.ones(2)})))
    # The second time it knows that it is to do nothing.
    assert only(SetTimer, worker.expects(throughput, now=3.0)) == SetTimer("forecast", 3.0)


def test_a_failed_platform_that_has_trained_takes_a_step_from_time_to_time() -> None:
    """The look costs 5 samples' worth, or 2.5 s at the forecast speed."""
    worker = Worker(EdgeGossip(inner=PUSHING, balancer=Balancer(min_throughput=10.0)))
    train = only(Train, worker.begins(50.0, 40.0, 40.0))
    worker.trains(train, 200.0, now=1.0)
    assert only(Finish, worker.expects(2.0, now=1.0)) == FREE
    worker.state.step_cost = 5.0
    assert worker.on(TimerFired("rest"), now=25.0) == [Predict()]
    assert kinds(worker.expects(2.0, now=25.0)) == ["SetTimer"]
    assert worker.on(TimerFired("rest"), now=26.0) == [Predict()]
    assert only(Train, worker.expects(2.0, now=26.0)).work == Steps(1)


def test_a_platform_that_has_recovered_waits_for_forecasts_again() -> None:
    worker = Worker(EdgeGossip(inner=INNER))
    worker.begins(1e-9, 50.0, 40.0)
    for sender in (1, 2):
        worker.on(Received(sender, Message("params", 0, {"params": torch.ones(2)})))
    assert only(SetTimer, worker.expects(20.0, now=3.0)) == SetTimer("forecast", 3.25)


def test_to_continue_is_to_train_without_the_failed() -> None:
    effects = Worker(EdgeGossip(inner=INNER, block_share=1.0)).begins(20.0, 1e-9, 1e-9)
    assert asked(only(Train, effects)) == (Epochs(1.0), 1.0)


def test_too_many_failures_can_halt_the_run() -> None:
    worker = Worker(EdgeGossip(inner=INNER, on_failure="halt"))
    with pytest.raises(PlatformError, match=r"1 of 3 platforms have failed \(ranks \[2\]\)"):
        worker.begins(20.0, 50.0, 1e-9)


def test_as_many_failures_as_allowed_do_not_halt_the_run() -> None:
    algorithm = EdgeGossip(
        inner=INNER, on_failure="halt", balancer=Balancer(max_failed_share=1 / 3)
    )
    assert "Train" in kinds(Worker(algorithm).begins(20.0, 50.0, 1e-9))


def reassigning(rank: int = 0, **settings: Any) -> Worker:  # noqa: ANN401
    return Worker(
        EdgeGossip(inner=INNER, on_failure="reassign", block_share=1.0, **settings), rank
    )


def test_the_fastest_asks_for_the_data_of_the_failed() -> None:
    worker = reassigning()
    assert worker.begins(50.0, 40.0, 1e-9) == [Assign((0, 2))]
    assert worker.on(TimerFired("forecast")) == []
    assert worker.on(WorkerLost(2)) == []
    effects = worker.on(Assigned(200, 200.0), now=1.0)
    assert sends(effects) == [(1, "forecast")]
    # It has twice as much now, so the other is the fastest: 2.5 s against 4 s.
    assert asked(only(Train, effects)) == (Epochs(1.0), 0.625)


def test_nobody_but_the_heir_asks_for_data() -> None:
    assert kinds(reassigning().begins(40.0, 50.0, 1e-9)) == ["SetTimer", "Train"]


def test_only_who_can_reach_the_data_is_heir() -> None:
    reachable = {0: (0,), 1: (1, 2), 2: (2,)}
    effects = reassigning(reachable=reachable).begins(50.0, 40.0, 1e-9)
    assert kinds(effects) == ["SetTimer", "Train"]


def test_data_goes_back_to_a_platform_that_recovered() -> None:
    worker = reassigning()
    worker.begins(50.0, 40.0, 1e-9)
    train = only(Train, worker.on(Assigned(200, 200.0)))
    worker.trains(train, 125.0)
    for sender in (1, 2):
        worker.on(Received(sender, Message("params", 0, {"params": torch.ones(2)})))
    worker.expects(50.0)
    worker.hears(1, 40.0, round=1)
    assert worker.hears(2, 30.0, round=1) == [Assign((0,))]


def says(worker: Worker, sender: int, throughput: float, *inherited: int) -> list[Effect]:
    message = PlatformForecast(0, throughput, 100.0, inherited).message()
    return worker.on(Received(sender, message))


def test_an_heir_that_comes_back_leaves_the_data_to_who_has_it_meanwhile() -> None:
    worker = reassigning()
    worker.starts()
    worker.expects(50.0)
    worker.on(WorkerLost(2))
    assert "Assign" not in kinds(says(worker, 1, 40.0, 0, 2))
    other = reassigning()
    other.starts()
    other.expects(50.0)
    other.on(WorkerLost(2))
    assert says(other, 1, 40.0) == [Assign((0, 2))]  # nobody has it: it is the fastest


def test_who_has_data_says_so() -> None:
    worker = reassigning()
    worker.begins(50.0, 40.0, 1e-9)
    effects = worker.on(Assigned(200, 200.0))
    told = next(effect.message for effect in effects if isinstance(effect, Send))
    assert PlatformForecast.from_message(told).inherited == (2,)
    schema = worker.algorithm.schema(torch.zeros(2))["forecast"]
    assert schema.mismatch(told.payload, told.numbers) is None


def test_of_two_who_have_the_same_data_one_gives_it_back() -> None:
    worker = reassigning(1)
    worker.starts()
    worker.expects(50.0)
    worker.hears(0, 40.0)
    assert worker.hears(2, 1e-9) == [Assign((1, 2))]
    train = only(Train, worker.on(Assigned(200, 200.0)))
    says(worker, 0, 40.0, 2)
    worker.trains(train, 125.0)
    for sender in (0, 2):
        worker.on(Received(sender, Message("params", 0, {"params": torch.ones(2)})))
    worker.expects(50.0)
    assert worker.on(TimerFired("forecast")) == [Assign((1,))]


def test_a_platform_never_heard_of_is_no_heir() -> None:
    worker = reassigning()
    worker.starts()
    worker.expects(5.0)
    worker.on(WorkerLost(2))
    assert worker.on(TimerFired("forecast"), now=9.0) == [Assign((0, 2))]


# Spares.


def idle_spare() -> Worker:
    """The third of three, which has said how fast it is."""
    worker = reassigning(2, spares=(2,))
    worker.cost = 0.0
    worker.starts()
    worker.expects(10.0)
    return worker


def test_a_spare_has_no_data_and_is_not_evaluated() -> None:
    algorithm = EdgeGossip(inner=INNER, on_failure="reassign", spares=(2,))
    assert [algorithm.role(rank).has_data for rank in range(3)] == [True, True, False]
    assert [algorithm.role(rank).is_evaluated for rank in range(3)] == [True, True, False]
    assert algorithm.role(2).name == algorithm.role(0).name


def test_a_spare_says_how_fast_it_is_and_waits() -> None:
    worker = reassigning(2, spares=(2,))
    worker.cost = 0.0
    assert worker.starts() == [Predict(), FREE]
    effects = worker.expects(70.0)
    assert sends(effects) == [(0, "forecast"), (1, "forecast")]
    assert "SetTimer" not in kinds(effects)
    assert worker.hears(0, 50.0) == []
    # Its parameters are of no use to one that comes back.
    assert sends(worker.on(WorkerJoined(0))) == [(0, "forecast")]


def test_others_neither_wait_for_an_idle_spare_nor_send_it_parameters() -> None:
    worker = reassigning(0, spares=(2,))
    worker.starts()
    worker.expects(20.0)
    train = only(Train, worker.hears(1, 40.0))
    assert sends(worker.trains(train, 50.0)) == [(1, "params")]


def test_a_spare_takes_over_and_catches_up() -> None:
    worker = idle_spare()
    worker.hears(0, 50.0)
    assert worker.on(WorkerLost(1)) == [Assign((1,))]
    joined = worker.on(Assigned(100, 100.0), now=5.0)
    assert sends(joined) == [(0, "spare-joined")]
    # Workers refuse messages from rounds ahead of theirs, and may be in their first.
    assert [each.message.round for each in joined if isinstance(each, Send)] == [0]
    answer = Message("catch-up", 1, {"params": torch.full((2,), 7.0)})
    caught_up = worker.on(Received(0, answer), now=5.0)
    assert sends(caught_up) == [(0, "catch-up")]
    assert Predict() in caught_up
    assert worker.state.round == 1
    assert worker.state.params.tolist() == [7.0, 7.0]


def spare_under_a_final_average() -> Worker:
    balanced = EdgeGossip(inner=INNER, on_failure="reassign", spares=(2,))
    algorithm = FinalAverage(inner=replace(balanced, block_share=1.0), num_workers=3)
    worker = Worker(algorithm, rank=2, cost=0.0)
    assert worker.starts() == [Predict()]
    worker.expects(10.0)
    return worker


def test_a_spare_trains_although_the_run_ends_with_a_mean() -> None:
    worker = spare_under_a_final_average()
    assert worker.on(WorkerLost(1)) == [Assign((1,))]
    worker.on(Assigned(100, 100.0))
    worker.on(Received(0, Message("catch-up", 0, {"params": torch.zeros(2)})))
    worker.hears(0, 50.0)
    assert only(Train, worker.expects(10.0)).keep_ratio == 0.2
    final = Message("final average", 2, {"params": torch.ones(2)}, {"cut": 0})
    assert "Finish" not in kinds(worker.on(Received(0, final)))  # it trains


@pytest.mark.parametrize("are_lost", [True, False])
def test_a_spare_ends_with_the_others_and_not_before(are_lost: bool) -> None:
    worker = spare_under_a_final_average()
    if are_lost:
        assert "Finish" not in kinds(worker.on(WorkerLost(0)))
        assert "Finish" in kinds(worker.on(WorkerLost(1)))
        return
    finals = [
        worker.on(Received(rank, Message("final average", 2, {"params": model}, {"cut": 0})))
        for rank, model in enumerate((torch.zeros(2), torch.ones(2)))
    ]
    assert ["Finish" in kinds(effects) for effects in finals] == [False, True]
    assert worker.state.estimate.tolist() == [0.5, 0.5]


def test_a_spare_that_is_cut_off_takes_over_nothing() -> None:
    worker = idle_spare()
    worker.hears(0, 50.0)
    assert kinds(worker.on(WorkerLost(1))) == ["Assign"]
    assert worker.on(WorkerLost(0)) == []
    assert worker.on(Assigned(100, 100.0)) == []
    for rank in (0, 1):  # the cut heals
        worker.on(WorkerJoined(rank))
    assert worker.hears(1, 50.0) == []
    assert worker.state.is_spare
    assert worker.on(WorkerLost(1)) == [Assign((1,))]


def test_others_welcome_a_spare_that_joins() -> None:
    worker = reassigning(0, spares=(2,))
    worker.begins(50.0, 40.0)
    effects = worker.on(Received(2, Message("spare-joined", 0)))
    assert sends(effects) == [(2, "catch-up")]


def test_a_spare_that_has_joined_says_so_to_who_comes_back() -> None:
    worker = idle_spare()
    worker.on(WorkerLost(1))
    worker.on(Assigned(100, 100.0))
    told = sends(worker.on(WorkerJoined(1, has_restarted=True)))
    assert told == [(1, "spare-joined"), (1, "forecast")]


def test_a_spare_that_fails_itself_keeps_what_it_has() -> None:
    worker = idle_spare()
    worker.on(WorkerLost(1))
    worker.on(Assigned(100, 100.0))
    worker.on(Received(0, Message("catch-up", 0, {"params": torch.zeros(2)})))
    worker.hears(0, 50.0)
    effects = worker.expects(1e-9)
    assert "Assign" not in kinds(effects)
