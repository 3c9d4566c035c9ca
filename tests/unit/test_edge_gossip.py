"""One balanced worker, driven by hand: events in, effects out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.algorithms.gosgd import GoSGD
from edgegossip.algorithms.gossip import Gossip
from edgegossip.balance.balancer import Balancer
from edgegossip.balance.edge_gossip import EdgeGossip
from edgegossip.balance.forecasts import FIELD, PlatformForecast
from edgegossip.core.errors import PlatformError
from edgegossip.core.protocol import (
    Assign,
    Assigned,
    Effect,
    Epochs,
    Event,
    Finish,
    Message,
    Predict,
    Predicted,
    Received,
    Send,
    SetTimer,
    Started,
    Steps,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.core.topology import complete, ring

T = TypeVar("T")

INNER = EpochGossip(topology=complete(3), num_rounds=2)
BY_STEPS = Gossip(topology=complete(3), num_rounds=9, local_steps=10)
CANCEL = SetTimer("forecast", math.inf)


class Worker:
    """One worker of an algorithm; `cost` is what a pass over its data costs."""

    def __init__(self, algorithm: EdgeGossip, rank: int = 0, cost: float = 100.0) -> None:
        self.algorithm = algorithm
        self.cost = cost
        self.state = algorithm.init(rank, torch.zeros(2))

    def on(self, event: Event, now: float = 0.0) -> list[Effect]:
        return self.algorithm.handle(self.state, event, now)

    def starts(self, now: float = 0.0) -> list[Effect]:
        return self.on(Started(False, int(self.cost), self.cost), now)

    def expects(self, throughput: float, now: float = 0.0) -> list[Effect]:
        return self.on(Predicted(throughput), now)

    def hears(
        self,
        sender: int,
        throughput: float,
        round: int = 0,
        cost: float = 100.0,
        now: float = 0,
    ) -> list[Effect]:
        message = PlatformForecast(round, throughput, cost).message()
        return self.on(Received(sender, message), now)

    def trains(self, train: Train, cost: float, now: float = 0.0) -> list[Effect]:
        trained = Trained(train.params + 1, train.params, int(cost), 1, 1.0, 0.0, cost=cost)
        return self.on(trained, now)

    def begins(self, own: float, *others: float) -> list[Effect]:
        """Start with these forecasts, and give what it does in the end."""
        self.starts()
        effects = self.expects(own)
        for sender, throughput in enumerate(others, start=1):
            effects = self.hears(sender, throughput)
        return effects


def only(kind: type[T], effects: list[Effect]) -> T:
    [found] = [effect for effect in effects if isinstance(effect, kind)]
    return found


def kinds(effects: list[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def sends(effects: list[Effect]) -> list[tuple[int, str]]:
    return [(e.receiver, e.message.kind) for e in effects if isinstance(e, Send)]


# Shares from forecasts.


def test_it_forecasts_before_it_trains_and_tells_everybody() -> None:
    worker = Worker(EdgeGossip(inner=INNER))
    assert worker.starts() == [Predict()]
    effects = worker.expects(20.0)
    assert sends(effects) == [(1, "forecast"), (2, "forecast")]
    heard = only(SetTimer, effects)
    assert heard == SetTimer("forecast", 0.05 * 5.0)
    message = next(e.message for e in effects if isinstance(e, Send))
    assert PlatformForecast.from_message(message) == PlatformForecast(0, 20.0, 100.0)


def test_the_share_follows_from_all_forecasts() -> None:
    effects = Worker(EdgeGossip(inner=INNER, block_share=1.0)).begins(20.0, 50.0, 40.0)
    assert effects[0] == CANCEL
    assert only(Train, effects).work == Epochs(1.0, keep_ratio=0.4)


def test_the_fastest_keeps_all_of_its_data() -> None:
    effects = Worker(EdgeGossip(inner=INNER, block_share=1.0)).begins(50.0, 20.0, 40.0)
    assert only(Train, effects).work == Epochs(1.0, keep_ratio=1.0)


def test_it_waits_for_the_last_forecast() -> None:
    worker = Worker(EdgeGossip(inner=INNER))
    worker.starts()
    assert worker.hears(1, 50.0) == []
    assert "Train" not in kinds(worker.expects(20.0))
    assert kinds(worker.hears(2, 40.0)) == ["SetTimer", "Train"]


def test_nothing_begins_before_the_own_forecast_is_there() -> None:
    for inner in (INNER, BY_STEPS):
        worker = Worker(EdgeGossip(inner=inner, block_share=1.0))
        [train] = worker.begins(20.0, 50.0, 40.0)[1:]
        assert isinstance(train, Train)
        worker.trains(train, 40.0)
        for sender in (1, 2):
            payload = {"params": torch.ones(2)}
            effects = worker.on(Received(sender, Message("params", 0, payload)))
        assert effects == [Predict()]
        assert worker.hears(1, 50.0, round=1) == []
        assert worker.hears(2, 40.0, round=1) == []
        assert worker.on(TimerFired("forecast")) == []
        assert worker.on(WorkerLost(2)) == []
        assert only(Train, worker.expects(25.0)).work.keep_ratio == 0.5


def test_with_the_inner_algorithm_waiting_forecasts_only_are_noted() -> None:
    worker = Worker(EdgeGossip(inner=INNER, block_share=1.0))
    train = only(Train, worker.begins(20.0, 50.0, 40.0))
    worker.trains(train, 40.0)
    assert worker.hears(1, 99.0, round=1) == []
    assert worker.state.forecasts[1].throughput == 99.0


def test_a_late_forecast_is_replaced_by_the_last_one_known() -> None:
    worker = Worker(EdgeGossip(inner=INNER, timeout=3.0, block_share=1.0))
    worker.starts()
    worker.hears(1, 50.0)
    worker.hears(2, 80.0, round=-1)
    assert only(SetTimer, worker.expects(20.0, now=1.0)) == SetTimer("forecast", 4.0)
    effects = worker.on(TimerFired("forecast"), now=4.0)
    assert only(Train, effects).work == Epochs(1.0, keep_ratio=0.25)


def test_a_platform_never_heard_of_counts_for_nothing() -> None:
    worker = Worker(EdgeGossip(inner=INNER, block_share=1.0))
    worker.starts()
    worker.expects(20.0)
    effects = worker.on(TimerFired("forecast"), now=1.0)
    assert only(Train, effects).work == Epochs(1.0, keep_ratio=1.0)


def test_a_forecast_that_comes_late_does_not_begin_another_epoch() -> None:
    worker = Worker(EdgeGossip(inner=INNER))
    worker.begins(20.0, 50.0, 40.0)
    assert worker.hears(1, 60.0) == []
    assert worker.on(TimerFired("forecast")) == []


def test_an_old_forecast_does_not_replace_a_newer_one() -> None:
    worker = Worker(EdgeGossip(inner=INNER))
    worker.hears(1, 50.0, round=3)
    worker.hears(1, 10.0, round=2)
    assert worker.state.forecasts[1].throughput == 50.0


def test_a_lost_worker_is_not_waited_for_nor_told() -> None:
    worker = Worker(EdgeGossip(inner=INNER, block_share=1.0))
    worker.starts()
    worker.on(WorkerLost(2))
    assert sends(worker.expects(20.0)) == [(1, "forecast")]
    assert only(Train, worker.hears(1, 40.0)).work == Epochs(1.0, keep_ratio=0.5)


def test_the_loss_of_the_last_one_waited_for_begins_the_epoch() -> None:
    worker = Worker(EdgeGossip(inner=INNER))
    worker.starts()
    worker.expects(20.0)
    worker.hears(1, 40.0)
    assert kinds(worker.on(WorkerLost(2))) == ["SetTimer", "Train"]


def test_a_worker_that_comes_back_is_told_the_forecast_it_missed() -> None:
    worker = Worker(EdgeGossip(inner=INNER))
    worker.begins(20.0, 50.0, 40.0)
    worker.on(WorkerLost(2))
    effects = worker.on(WorkerJoined(2, has_restarted=True))
    assert sends(effects) == [(2, "forecast"), (2, "catch-up")]
    assert 2 not in worker.state.forecasts


def test_the_wait_for_forecasts_is_short_for_a_slow_platform_too() -> None:
    worker = Worker(EdgeGossip(inner=INNER, block_share=1.0))
    train = only(Train, worker.begins(1.0, 50.0, 50.0))
    worker.trains(train, 2.0)
    for sender in (1, 2):
        worker.on(Received(sender, Message("params", 0, {"params": torch.ones(2)})))
    # 5 % of 2 s, what its epochs take, not of the 100 s of all of its data.
    assert only(SetTimer, worker.expects(1.0, now=2.0)) == SetTimer("forecast", 2.1)


def test_less_than_all_data_may_be_the_most_that_anybody_keeps() -> None:
    worker = Worker(EdgeGossip(inner=INNER, max_keep_ratio=0.5, block_share=1.0))
    assert only(Train, worker.begins(20.0, 50.0, 40.0)).work == Epochs(keep_ratio=0.2)


# Epochs in blocks.


def test_blocks_are_one_training_for_the_inner_algorithm() -> None:
    worker = Worker(EdgeGossip(inner=INNER, block_share=0.5))
    first = only(Train, worker.begins(20.0, 50.0, 40.0))
    assert first.work == Epochs(0.5, keep_ratio=0.4)
    assert worker.trains(first, 20.0, now=1.0) == [Predict()]
    [second] = worker.expects(20.0, now=1.0)
    assert isinstance(second, Train)
    assert second.work == Epochs(0.25, keep_ratio=0.4, goes_on=True)
    effects = worker.trains(second, 20.0, now=2.0)
    assert sends(effects) == [(1, "params"), (2, "params")]
    assert worker.state.params.tolist() == [2.0, 2.0]


def test_speed_that_falls_within_an_epoch_ends_it_early() -> None:
    worker = Worker(EdgeGossip(inner=INNER, block_share=0.5))
    first = only(Train, worker.begins(20.0, 50.0, 40.0))
    assert worker.trains(first, 20.0, now=2.0) == [Predict()]
    assert sends(worker.expects(1.0, now=2.0)) == [(1, "params"), (2, "params")]


# Steps.


def test_steps_are_cut_to_the_share_and_so_are_their_passes() -> None:
    effects = Worker(EdgeGossip(inner=BY_STEPS)).begins(20.0, 50.0, 40.0)
    assert only(Train, effects).work == Steps(4, keep_ratio=0.4)


def test_at_least_one_step_is_taken() -> None:
    effects = Worker(EdgeGossip(inner=BY_STEPS)).begins(1.0, 50.0, 40.0)
    assert only(Train, effects).work == Steps(1, keep_ratio=0.02)


def test_by_steps_a_forecast_is_made_once_a_pass() -> None:
    algorithm = GoSGD(
        topology=complete(3), num_rounds=9, exchange_probability=0, local_steps=10
    )
    worker = Worker(EdgeGossip(inner=algorithm))
    train = only(Train, worker.begins(20.0, 50.0, 40.0))
    # The pass costs 40; each block of steps takes 16 of it.
    for _ in range(2):
        [train] = worker.trains(train, 16.0)  # type: ignore[assignment]
        assert train.work == Steps(4, keep_ratio=0.4)
    assert worker.trains(train, 16.0) == [Predict()]


# Gossip.


def gossiping(inner: Any = INNER, **settings: Any) -> Worker:  # noqa: ANN401
    return Worker(EdgeGossip(inner=inner, spread="gossip", block_share=1.0, **settings))


def params_message(seconds: float | None = None, age: float = 0.0) -> Message:
    payload = {"params": torch.ones(2)}
    if seconds is not None:
        payload[FIELD] = torch.tensor([seconds, age], dtype=torch.float64)
    return Message("params", 0, payload)


def test_gossip_sends_no_messages_of_its_own_and_waits_for_none() -> None:
    worker = gossiping()
    worker.starts()
    [train] = worker.expects(20.0)
    assert isinstance(train, Train)
    assert train.work == Epochs(1.0, keep_ratio=1.0)


def test_gossip_takes_the_fastest_from_what_it_hears() -> None:
    worker = gossiping()
    worker.starts()
    train = only(Train, worker.expects(20.0))
    effects = worker.trains(train, 100.0)
    for effect in effects:
        assert isinstance(effect, Send)
        assert effect.message.payload[FIELD].tolist() == [5.0, 0.0]
    worker.on(Received(1, params_message(2.0, age=1.0)))
    assert worker.on(Received(2, params_message())) == [Predict()]
    assert only(Train, worker.expects(20.0)).work == Epochs(1.0, keep_ratio=0.4)
    assert worker.state.fastest.age == 2


def test_gossip_leaves_the_inner_algorithm_its_messages() -> None:
    worker = gossiping()
    worker.starts()
    worker.on(Received(1, params_message(2.0)))
    assert set(worker.state.inner.inbox[0][1]) == {"params"}


def test_gossip_with_a_worker_without_data_stops_nobody() -> None:
    worker = gossiping()
    worker.cost = 0.0
    worker.starts()
    effects = worker.expects(20.0)
    # It passes on untrained parameters, and does not claim to be the fastest.
    assert sends(effects) == [(1, "params"), (2, "params")]
    for effect in effects:
        assert isinstance(effect, Send)
        assert FIELD not in effect.message.payload


def test_gossip_lets_a_failed_platform_pass_on_untrained() -> None:
    worker = gossiping()
    worker.starts()
    assert sends(worker.expects(1e-9)) == [(1, "params"), (2, "params")]


# Failures.


def test_a_failed_platform_passes_on_its_parameters_untrained() -> None:
    worker = Worker(EdgeGossip(inner=INNER))
    effects = worker.begins(1e-9, 50.0, 40.0)
    assert effects[0] == CANCEL
    assert sends(effects) == [(1, "params"), (2, "params")]
    assert worker.state.params.tolist() == [0.0, 0.0]


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


def test_to_continue_is_to_train_without_the_failed() -> None:
    effects = Worker(EdgeGossip(inner=INNER, block_share=1.0)).begins(20.0, 1e-9, 1e-9)
    assert only(Train, effects).work == Epochs(1.0, keep_ratio=1.0)


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
    assert only(Train, effects).work == Epochs(1.0, keep_ratio=0.625)


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


def test_a_platform_never_heard_of_is_no_heir() -> None:
    worker = reassigning()
    worker.starts()
    worker.expects(5.0)
    worker.on(WorkerLost(2))
    assert worker.on(TimerFired("forecast"), now=9.0) == [Assign((0, 2))]


# Spares.


def test_a_spare_has_no_data_and_is_not_evaluated() -> None:
    algorithm = EdgeGossip(inner=INNER, on_failure="reassign", spares=(2,))
    assert [algorithm.role(rank).has_data for rank in range(3)] == [True, True, False]
    assert [algorithm.role(rank).is_evaluated for rank in range(3)] == [True, True, False]
    assert algorithm.role(2).name == algorithm.role(0).name


def test_a_spare_says_how_fast_it_is_and_waits() -> None:
    worker = reassigning(2, spares=(2,))
    worker.cost = 0.0
    assert worker.starts() == [Predict(), Finish()]
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
    worker = reassigning(2, spares=(2,))
    worker.cost = 0.0
    worker.starts()
    worker.expects(10.0)
    worker.hears(0, 50.0)
    assert worker.on(WorkerLost(1)) == [Assign((1,))]
    joined = worker.on(Assigned(100, 100.0), now=5.0)
    assert sends(joined) == [(0, "spare-joined")]
    answer = Message("catch-up", 1, {"params": torch.full((2,), 7.0)})
    caught_up = worker.on(Received(0, answer), now=5.0)
    assert sends(caught_up) == [(0, "catch-up")]
    assert Predict() in caught_up
    assert worker.state.round == 1
    assert worker.state.params.tolist() == [7.0, 7.0]


def test_others_welcome_a_spare_that_joins() -> None:
    worker = reassigning(0, spares=(2,))
    worker.begins(50.0, 40.0)
    effects = worker.on(Received(2, Message("spare-joined", 0)))
    assert sends(effects) == [(2, "catch-up")]


def test_a_spare_that_has_joined_says_so_to_who_comes_back() -> None:
    worker = reassigning(2, spares=(2,))
    worker.cost = 0.0
    worker.starts()
    worker.expects(10.0)
    worker.on(WorkerLost(1))
    worker.on(Assigned(100, 100.0))
    told = sends(worker.on(WorkerJoined(1, has_restarted=True)))
    assert told == [(1, "spare-joined"), (1, "forecast")]


def test_a_spare_that_fails_itself_keeps_what_it_has() -> None:
    worker = reassigning(2, spares=(2,))
    worker.cost = 0.0
    worker.starts()
    worker.expects(10.0)
    worker.on(WorkerLost(1))
    worker.on(Assigned(100, 100.0))
    worker.on(Received(0, Message("catch-up", 0, {"params": torch.zeros(2)})))
    worker.hears(0, 50.0)
    effects = worker.expects(1e-9)
    assert "Assign" not in kinds(effects)


# Arguments.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_keep_ratio": 1.5}, r"max_keep_ratio must be in \(0, 1\], got 1.5"),
        ({"block_share": 0.0}, r"block_share must be in \(0, 1\], got 0"),
        ({"timeout": 0.0}, "timeout must be positive or None, got 0.0"),
        ({"timeout": math.nan}, "timeout must be positive or None, got nan"),
        ({"max_age": 0}, "max_age must be at least 1 or None, got 0"),
        ({"spread": "flood"}, r"spread must be one of \('exact', 'gossip'\), got 'flood'"),
        ({"on_failure": "panic"}, "on_failure must be one of .* got 'panic'"),
        ({"spares": (3,), "on_failure": "reassign"}, r"spares name worker 3; ranks are 0\.\.2"),
        ({"spares": (1,)}, "spares wait for on_failure='reassign'"),
        ({"spread": "gossip", "on_failure": "halt"}, "needs all forecasts"),
    ],
)
def test_bad_arguments_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EdgeGossip(inner=INNER, **settings)


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda algorithm: algorithm.num_workers, 4),
        (lambda algorithm: algorithm.num_rounds, 5),
        (lambda algorithm: algorithm.topology.name, ring(4).name),
        (lambda algorithm: algorithm.exchanges_per_round, 1),
    ],
)
def test_what_experiments_read_is_the_inner_algorithms(
    read: Callable[[EdgeGossip], object], expected: object
) -> None:
    assert read(EdgeGossip(inner=Gossip(topology=ring(4), num_rounds=5))) == expected
