"""One balanced worker, driven by hand: forecasts, shares, blocks and steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.balanced_worker import BY_STEPS, CANCEL, INNER, Worker, sends
from tests.effects import asked, kinds, only
from tests.trained import trained_event

from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.server.methods import BSP
from edgegossip.algorithms.wrappers.claimed.claimed_work import ClaimedWork
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.edge_gossip.forecasts import PlatformForecast
from edgegossip.algorithms.wrappers.edge_gossip.plan import RoundPlan
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.contract.algorithm import Algorithm, Traits
from edgegossip.contract.protocol import (
    Effect,
    Epochs,
    Message,
    Predict,
    Received,
    Send,
    SetTimer,
    Steps,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import complete, ring

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
    assert asked(only(Train, effects)) == (Epochs(1.0), 0.4)


def test_the_fastest_keeps_all_of_its_data() -> None:
    effects = Worker(EdgeGossip(inner=INNER, block_share=1.0)).begins(50.0, 20.0, 40.0)
    assert asked(only(Train, effects)) == (Epochs(1.0), 1.0)


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
        assert only(Train, worker.expects(25.0)).keep_ratio == 0.5


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
    assert asked(only(Train, effects)) == (Epochs(1.0), 0.25)


def test_a_platform_never_heard_of_counts_for_nothing() -> None:
    worker = Worker(EdgeGossip(inner=INNER, block_share=1.0))
    worker.starts()
    worker.expects(20.0)
    effects = worker.on(TimerFired("forecast"), now=1.0)
    assert asked(only(Train, effects)) == (Epochs(1.0), 1.0)


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
    assert asked(only(Train, worker.hears(1, 40.0))) == (Epochs(1.0), 0.5)


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
    assert asked(only(Train, worker.begins(20.0, 50.0, 40.0))) == (Epochs(), 0.2)


# Epochs in blocks.


def test_blocks_are_one_training_for_the_inner_algorithm() -> None:
    worker = Worker(EdgeGossip(inner=INNER, block_share=0.5))
    first = only(Train, worker.begins(20.0, 50.0, 40.0))
    assert asked(first) == (Epochs(0.5), 0.4)
    assert worker.trains(first, 20.0, now=1.0) == [Predict()]
    [second] = worker.expects(20.0, now=1.0)
    assert isinstance(second, Train)
    assert asked(second) == (Epochs(0.25), 0.4)
    assert not second.begins_pass
    effects = worker.trains(second, 20.0, now=2.0)
    assert sends(effects) == [(1, "params"), (2, "params")]
    mean = (0.4 + 1.0 + 0.8) / 3
    assert worker.state.params.tolist() == pytest.approx([2.0 * (mean / 0.4) ** 0.5] * 2)


def test_speed_that_falls_within_an_epoch_ends_it_early() -> None:
    worker = Worker(EdgeGossip(inner=INNER, block_share=0.5))
    first = only(Train, worker.begins(20.0, 50.0, 40.0))
    assert worker.trains(first, 20.0, now=2.0) == [Predict()]
    assert sends(worker.expects(1.0, now=2.0)) == [(1, "params"), (2, "params")]


# Steps.


def test_steps_are_cut_to_the_share_and_so_are_their_passes() -> None:
    effects = Worker(EdgeGossip(inner=BY_STEPS)).begins(20.0, 50.0, 40.0)
    assert asked(only(Train, effects)) == (Steps(4), 0.4)


def test_at_least_one_step_is_taken() -> None:
    effects = Worker(EdgeGossip(inner=BY_STEPS)).begins(1.0, 50.0, 40.0)
    assert asked(only(Train, effects)) == (Steps(1), 0.02)


def test_where_others_wait_the_fastest_trains_until_the_slowest_has_done_a_step() -> None:
    waiting = Gossip(topology=complete(3), num_rounds=9, local_steps=10)
    worker = Worker(EdgeGossip(inner=waiting))
    train = only(Train, worker.begins(50.0, 2.0, 40.0))
    assert asked(train) == (Steps(25), 1.0)
    # Without it, there is no reason for long rounds any more.
    worker.on(WorkerLost(1))
    worker.trains(train, 25.0, num_steps=25)
    [train] = exchanges(worker, 2)  # type: ignore[assignment]
    assert asked(train) == (Steps(10), 1.0)


def test_where_nobody_waits_the_fastest_takes_the_steps_that_were_asked_for() -> None:
    free = GoSGD(topology=complete(3), num_rounds=9, local_steps=10)
    effects = Worker(EdgeGossip(inner=free)).begins(50.0, 2.0, 40.0)
    assert asked(only(Train, effects)) == (Steps(10), 1.0)


def test_by_steps_a_forecast_is_made_once_a_pass() -> None:
    algorithm = GoSGD(
        topology=complete(3), num_rounds=9, exchange_probability=0, local_steps=10
    )
    worker = Worker(EdgeGossip(inner=algorithm))
    train = only(Train, worker.begins(20.0, 50.0, 40.0))
    # The pass costs 40; each block of steps takes 16 of it.
    for _ in range(2):
        [train] = worker.trains(train, 16.0)  # type: ignore[assignment]
        assert asked(train) == (Steps(4), 0.4)
    assert worker.trains(train, 16.0) == [Predict()]


# Speeds that change within a pass of steps.


def exchanges(worker: Worker, *senders: int) -> list[Effect]:
    """End the round: the last effects after the others' models have come."""
    for sender in senders or (1, 2):
        message = Message("params", worker.state.round, {"params": torch.ones(2)})
        effects = worker.on(Received(sender, message))
    return effects


def within_a_pass(
    throughput: float = 50.0, inner: Algorithm[Any] = BY_STEPS, **settings: float
) -> tuple[Worker, Train]:
    """A worker that is as fast as two others, in the first ten steps of a long pass."""
    worker = Worker(EdgeGossip(inner=inner, **settings), cost=1e6)  # type: ignore[arg-type]
    worker.starts()
    worker.expects(throughput)
    worker.hears(1, throughput, cost=1e6)
    train = only(Train, worker.hears(2, throughput, cost=1e6))
    assert asked(train)[0] == Steps(10)
    return worker, train


def test_a_forecast_that_was_wrong_is_made_again_and_nobody_waits_for_it() -> None:
    worker, train = within_a_pass()
    worker.trains(train, 10.0, slow_down=4.0, num_steps=10)
    assert exchanges(worker) == [Predict()]
    effects = worker.expects(12.5)
    assert sends(effects) == [(1, "forecast"), (2, "forecast")]
    assert asked(only(Train, effects))[0] == Steps(2)  # two steps take as long as eight did


def test_a_forecast_that_was_right_is_not_made_again() -> None:
    worker, train = within_a_pass()
    worker.trains(train, 10.0, slow_down=1.1, num_steps=10)
    assert asked(only(Train, exchanges(worker)))[0] == Steps(10)


def test_too_little_training_shows_no_speed() -> None:
    worker, train = within_a_pass(1000.0)
    worker.trains(train, 10.0, slow_down=4.0, num_steps=10)  # in 0.04 s
    train = only(Train, exchanges(worker))
    worker.trains(train, 100.0, slow_down=4.0, num_steps=10)
    assert exchanges(worker) == [Predict()]


def test_a_forecast_like_the_last_one_is_not_news() -> None:
    worker, train = within_a_pass()
    worker.trains(train, 10.0, slow_down=4.0, num_steps=10)
    exchanges(worker)
    effects = worker.expects(48.0)  # it was slow for a moment
    assert not sends(effects)
    assert asked(only(Train, effects))[0] == Steps(10)


def test_the_next_round_follows_what_another_worker_forecasts_within_a_pass() -> None:
    worker, train = within_a_pass()
    assert not worker.hears(1, 2.0, cost=1e6)
    worker.trains(train, 10.0, num_steps=10)
    assert asked(only(Train, exchanges(worker)))[0] == Steps(13)  # half of its first one


def test_a_platform_that_fails_within_a_pass_does_what_failed_platforms_do() -> None:
    worker, train = within_a_pass()
    worker.trains(train, 10.0, slow_down=4.0, num_steps=10)
    exchanges(worker)
    # It passes its model on untrained, because the others wait for it.
    told = [(1, "forecast"), (2, "forecast"), (1, "params"), (2, "params")]
    assert sends(worker.expects(0.0)) == told
    assert exchanges(worker) == [Predict()]  # it may have recovered


# Rounds in blocks.


def test_the_steps_of_a_long_round_are_done_in_three_blocks() -> None:
    worker, train = within_a_pass()
    worker.trains(train, 100.0, num_steps=10)
    effects = exchanges(worker)  # ten steps of 0.2 s
    for now, num_steps in ((1.0, 5), (1.6, 3), (2.0, 2)):
        train = only(Train, effects)
        assert asked(train)[0] == Steps(num_steps)
        effects = worker.trains(train, 10.0 * num_steps, now, num_steps=num_steps)
    assert sends(effects) == [(1, "params"), (2, "params")]


def test_the_steps_of_a_short_round_are_done_at_once() -> None:
    worker, train = within_a_pass(1000.0)
    worker.trains(train, 100.0, num_steps=10)
    assert asked(only(Train, exchanges(worker)))[0] == Steps(10)  # of 0.01 s


@pytest.mark.parametrize(
    ("slow_down", "num_steps"),
    [
        (2.0, None),  # the time is over
        (1.5, 2),  # half a second is left, and a step takes 0.3
        (0.75, 4),  # 1.25 s, and a step takes 0.15
        (0.001, 8),  # half of the 15 that lead to twice as many as planned
    ],
)
def test_a_round_ends_on_time_at_another_speed(slow_down: float, num_steps: int | None) -> None:
    worker, train = within_a_pass()
    worker.trains(train, 100.0, num_steps=10)
    train = only(Train, exchanges(worker))
    effects = worker.trains(train, 50.0, now=slow_down, slow_down=slow_down, num_steps=5)
    if num_steps is None:
        assert sends(effects) == [(1, "params"), (2, "params")]
    else:
        assert asked(only(Train, effects))[0] == Steps(num_steps)


def test_where_nobody_waits_a_round_is_one_training() -> None:
    free = GoSGD(topology=complete(3), num_rounds=9, local_steps=10, exchange_probability=0)
    worker, train = within_a_pass(inner=free)
    [train] = worker.trains(train, 100.0, num_steps=10)  # type: ignore[assignment]
    assert asked(train)[0] == Steps(10)


def test_a_block_without_training_ends_the_round() -> None:
    worker, train = within_a_pass()
    worker.trains(train, 100.0, num_steps=10)
    train = only(Train, exchanges(worker))
    effects = worker.on(Trained.skipped(train.params), now=1.0)
    assert sends(effects) == [(1, "params"), (2, "params")]


def test_a_part_of_a_round_may_have_more_steps_than_the_bound_on_what_it_gains() -> None:
    plan = RoundPlan.begin(
        Train(torch.zeros(2), Steps(1)), 5, step_cost=10.0, throughput=10.0, most=4, now=0.0
    )
    for now, num_steps in ((2.0, 3), (4.0, 2)):  # faster than planned
        block = plan.block()
        assert block.work == Steps(num_steps)
        plan.account(
            trained_event(
                torch.ones(2),
                block.params,
                num_steps=num_steps,
                num_samples=10 * num_steps,
                seconds=2.0,
            ),
            now,
        )
    assert not plan.left


def test_a_look_at_the_data_does_not_make_later_rounds_longer() -> None:
    worker, train = within_a_pass()
    worker.trains(train, 1000.0, num_steps=10, num_samples=100)
    train = only(Train, exchanges(worker))
    effects = worker.trains(train, 50.0, now=1.0, num_steps=5)
    assert asked(only(Train, effects))[0] == Steps(3)
    effects = worker.trains(only(Train, effects), 30.0, now=1.6, num_steps=3)
    effects = worker.trains(only(Train, effects), 20.0, now=2.0, num_steps=2)
    assert sends(effects) == [(1, "params"), (2, "params")]


def test_with_one_forecast_for_a_pass_rounds_are_not_divided() -> None:
    worker, train = within_a_pass(block_share=1.0)
    worker.trains(train, 100.0, slow_down=4.0, num_steps=10)
    assert asked(only(Train, exchanges(worker)))[0] == Steps(10)


def test_an_absurd_forecast_changes_nothing() -> None:
    worker, train = within_a_pass()
    worker.hears(1, 1e308, cost=1e-20)
    worker.trains(train, 10.0, num_steps=10)
    assert asked(only(Train, exchanges(worker)))[0] == Steps(10)


def test_moments_are_given_once_and_reported_by_each_block() -> None:
    given = {"first": torch.ones(2)}
    plan = RoundPlan.begin(
        Train(torch.zeros(2), Steps(4), moments=given),
        4,
        step_cost=10.0,
        throughput=10.0,
        most=16,
        now=0.0,
    )
    block = plan.block()
    assert block.moments is given
    reported = {"first": torch.full((2,), 3.0)}
    plan.account(
        trained_event(
            torch.ones(2),
            block.params,
            num_steps=2,
            num_samples=20,
            seconds=2.0,
            moments=reported,
        ),
        2.0,
    )
    assert plan.block().moments == {}
    assert plan.result(2.0).moments is reported


# Arguments.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_keep_ratio": 1.5}, r"max_keep_ratio must be in \(0, 1\], got 1.5"),
        ({"block_share": 0.0}, r"block_share must be in \(0, 1\], got 0"),
        ({"correction": 1.5}, r"correction must be in \[0, 1\], got 1.5"),
        ({"timeout": 0.0}, "timeout must be above 0 or None, got 0.0"),
        ({"timeout": math.nan}, "timeout must be above 0 or None, got nan"),
        ({"max_age": 0}, "max_age must be at least 1 or None, got 0"),
        ({"spread": "flood"}, "spread must be one of exact, gossip, got 'flood'"),
        ({"on_failure": "panic"}, "on_failure must be one of .* got 'panic'"),
        (
            {"spares": (3,), "on_failure": "reassign"},
            r"spares names worker 3; ranks are 0\.\.2",
        ),
        ({"reachable": {0: (1, 5)}}, r"reachable names worker 5; ranks are 0\.\.2"),
        ({"spares": (1,)}, "are for on_failure='reassign'"),
        ({"reachable": {0: (1,)}}, "are for on_failure='reassign'"),
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
        (
            lambda algorithm: algorithm.traits,
            Traits(
                topology=ring(4),
                num_rounds=5,
                local_steps=1,
                is_synchronous=True,
                is_balanced=True,
            ),
        ),
    ],
)
def test_what_experiments_read_is_the_inner_algorithms(
    read: Callable[[EdgeGossip], object], expected: object
) -> None:
    assert read(EdgeGossip(inner=Gossip(topology=ring(4), num_rounds=5))) == expected


def test_servers_that_are_elected_are_refused() -> None:
    with pytest.raises(ValueError, match="keep their roles, and those of Standby"):
        EdgeGossip(inner=Standby(inner=BSP(num_workers=3, num_rounds=2)))


def test_what_is_balanced_already_is_refused() -> None:
    with pytest.raises(ValueError, match="ClaimedWork does so already; leave out one"):
        EdgeGossip(inner=ClaimedWork(inner=BY_STEPS))


def test_several_servers_are_refused_since_forecasts_ride_on_whole_models() -> None:
    with pytest.raises(ValueError, match="whole models, and Shards has slices"):
        EdgeGossip(inner=Shards(inner=BSP(num_workers=3, num_rounds=2), num_servers=2))
