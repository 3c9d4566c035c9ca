"""The event loop by hand-computed times: training, links, timers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.scripted import (
    SECOND,
    SIZE,
    Answer,
    Counting,
    Happened,
    Scripted,
    Watcher,
    World,
    message,
    on_start,
    world,
)

from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import (
    Assign,
    Assigned,
    Effect,
    Epochs,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Message,
    Predict,
    Predicted,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    Steps,
    TimerFired,
    Train,
    Trained,
)
from edgegossip.machine.contention import Contention
from edgegossip.sim.fault import Crash, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import ContentionTrace, Platform, Sensitivity
from edgegossip.sim.simulator import Simulator

# Training.


def test_a_worker_is_told_how_much_data_it_has() -> None:
    assert world(on_start({})).run().seen[1] == (0.0, 1, Started(num_samples=11, epoch_cost=1))


def test_training_takes_work_over_throughput() -> None:
    platforms = (Platform(throughput=10.0), Platform(throughput=4.0, executors=2))
    train: list[Effect] = [Train(torch.zeros(3), Steps(20))]
    result = world(on_start({0: train, 1: train}), platforms=platforms).run()
    assert result.watcher.spans == [(0, 0.0, 2.0), (1, 0.0, 2.5)]


def test_training_under_contention_takes_the_integral_of_the_trace() -> None:
    # 10 samples in the first second, then 5 a second: 20 samples take 3 s.
    trace = ContentionTrace((0.0, 1.0), (Contention(), Contention(cores=1.0)))
    platform = Platform(throughput=10.0, trace=trace, sensitivity=Sensitivity(cores=0.5))
    train: list[Effect] = [Train(torch.zeros(3), Steps(20))]
    result = world(on_start({0: train}), platforms=(platform,)).run()
    assert result.times(Trained) == [3.0]


def test_to_begin_and_end_a_training_takes_time_that_contention_slows_too() -> None:
    train: list[Effect] = [Train(torch.zeros(3), Steps(20))]
    platform = Platform(throughput=10.0, seconds_per_training=0.5)
    trace = ContentionTrace((0.0,), (Contention(cores=1.0),))
    busy = replace(platform, trace=trace, sensitivity=Sensitivity(cores=0.5))
    result = world(on_start({0: train, 1: train}), platforms=(platform, busy)).run()
    assert result.watcher.spans == [(0, 0.0, 2.5), (1, 0.0, 5.0)]


def sent_while_training(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
    """Each trains for a second, three times; worker 0 sends a message at the start."""
    train = Train(torch.zeros(3), Steps(10))
    match event:
        case Started():
            return [train, *([Send(1, message())] if rank == 0 else [])]
        case Trained():
            return [Finish()] if now > 2.5 else [train]
    return []


DEAR = Platform(throughput=10.0, seconds_per_byte=0.5 / SIZE)
DEAR_AT_ANY_SIZE = Platform(throughput=10.0, seconds_per_message=0.5)
"""With both, a message takes half a second of its sender and of its receiver."""


@pytest.mark.parametrize("dear", [DEAR, DEAR_AT_ANY_SIZE])
def test_messages_take_their_time_from_the_next_training_at_both_ends(dear: Platform) -> None:
    result = world(sent_while_training, platforms=(dear, dear)).run()
    assert result.watcher.spans == [
        *((0, 0.0, 1.0), (1, 0.0, 1.0)),
        *((0, 1.0, 2.5), (1, 1.0, 2.5)),
        *((0, 2.5, 3.5), (1, 2.5, 3.5)),
    ]
    cheap = world(sent_while_training, platforms=(dear, Platform(throughput=10.0))).run()
    assert (1, 1.0, 2.0) in cheap.watcher.spans


def test_a_resumed_run_pays_for_messages_of_before() -> None:
    first = world(sent_while_training, platforms=(DEAR, DEAR)).run(0.5)
    second = world(sent_while_training, platforms=(DEAR, DEAR))
    second.simulator.load_state_dict(first.simulator.state_dict())
    assert (1, 1.0, 2.5) in second.run().watcher.spans


def test_a_worker_that_comes_back_owes_nothing() -> None:
    script = (Crash(rank=1, at=0.5), Recover(rank=1, at=1.0))
    result = world(sent_while_training, 2, *script, platforms=(DEAR, DEAR)).run()
    assert (1, 1.0, 2.0) in result.watcher.spans


def test_trained_says_what_was_done() -> None:
    before = torch.ones(3)
    result = world(on_start({0: [Train(before, Steps(5))]})).run()
    [event] = [event for _, _, event in result.seen if isinstance(event, Trained)]
    assert event.before is before
    assert event.delta.tolist() == [5.0] * 3
    assert (event.num_samples, event.num_steps, event.seconds) == (5, 5, 0.5)
    assert event.loss == 0.5


def test_training_starts_from_the_snapshot_whatever_arrives_meanwhile() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started() if rank == 0:
                return [Train(torch.full((3,), 7.0), Steps(10)), Finish()]
            case Started():
                return [Send(0, message()), Finish()]
        return []

    result = world(answer).run()
    assert result.times(Received) == [0.0]
    assert result.simulator.states[0].params.tolist() == [17.0] * 3


def test_a_second_train_at_once_is_refused() -> None:
    twice: list[Effect] = [Train(torch.zeros(3), Epochs()), Train(torch.zeros(3), Epochs())]
    with pytest.raises(LocalProtocolError, match="worker 1 asked for a second Train at once"):
        world(on_start({1: twice})).run()


def test_a_worker_may_train_again_once_it_has_trained() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        return [Finish()] if now >= 3 else [Train(torch.zeros(3), Steps(10))]

    assert world(answer, 1).run().times(Trained) == [1.0, 2.0, 3.0]


def test_a_forecast_is_the_machine_alone_and_then_as_fast_as_the_last_time() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                return [Predict(), Train(torch.zeros(3), Steps(10))]
            case Trained():
                return [Predict()]
        return [Finish()] if now > 2 else []

    trace = ContentionTrace((0.0,), (Contention(cores=1.0),))
    platform = Platform(throughput=10.0, trace=trace, sensitivity=Sensitivity(cores=0.5))
    result = world(answer, platforms=(platform,)).run()
    found = {now: e.throughput for now, _, e in result.seen if isinstance(e, Predicted)}
    # A forecast takes a millisecond.
    assert found == pytest.approx({0.001: 10.0, 2.001: 5.0})


EVALUATION: dict[str, Any] = {
    "evaluate": lambda params: (float(params.sum()), {}),
    "evaluation_cost": 20.0,
}
"""Two seconds of a platform of 10 samples a second."""


def test_an_evaluation_that_costs_nothing_takes_no_virtual_time() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        is_start = isinstance(event, Started)
        return [Evaluate(torch.full((3,), 2.0))] if is_start else [Finish()]

    result = world(answer, 1, evaluate=lambda params: (float(params.sum()), {})).run()
    assert result.seen[1:] == [(0.0, 0, Evaluated(6.0))]


def test_an_evaluation_takes_its_cost_over_the_throughput() -> None:
    platforms = (Platform(throughput=10.0), Platform(throughput=4.0, executors=2))
    evaluate: list[Effect] = [Evaluate(torch.full((3,), 2.0))]

    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        return evaluate if isinstance(event, Started) else [Finish()]

    result = world(answer, platforms=platforms, **EVALUATION).run()
    assert result.seen[2:] == [(2.0, 0, Evaluated(6.0)), (2.5, 1, Evaluated(6.0))]


def test_work_and_evaluations_of_one_platform_take_turns_in_the_order_asked() -> None:
    def train(num_steps: int) -> Train:
        return Train(torch.zeros(3), Steps(num_steps))

    first: list[Effect] = [Evaluate(torch.zeros(3)), train(10), Evaluate(torch.ones(3))]

    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                return first if rank == 0 else [train(10), Finish()]
            case Trained() if rank == 0 and now == 3.0:
                return [train(5), Finish()]
        return []

    result = world(answer, **EVALUATION).run()
    assert result.times(Evaluated) == [2.0, 5.0]
    assert result.times(Trained, 0) == [3.0, 5.5]  # after the one, and after the other
    assert result.times(Trained, 1) == [1.0]  # another platform's


def test_a_monitor_does_not_take_an_evaluation_for_training() -> None:
    effects: list[Effect] = [Evaluate(torch.zeros(3)), Train(torch.zeros(3), Steps(20))]
    result = world(on_start({0: [*effects, Evaluate(torch.zeros(3))]}), 1, **EVALUATION).run()
    assert result.simulator._machines.monitor(0)._all_spans() == [(2.0, 4.0)]


def test_an_evaluation_begins_when_the_data_is_ready() -> None:
    class Aggregating(Counting):
        setup_cost = 5.0

    result = world(
        lambda rank, event, now: (
            [Evaluate(torch.zeros(3))] if isinstance(event, Started) else [Finish()]
        ),
        1,
        **EVALUATION,
    )
    result.simulator._machines._make_trainer = Aggregating
    assert result.run().times(Evaluated) == [2.5]


def test_an_evaluation_ends_with_a_crash_and_leaves_the_platform_free() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started(has_rejoined=True):
                return [Train(torch.zeros(3), Steps(5)), SetTimer("end", 9.0)]
            case Started():
                return [Evaluate(torch.zeros(3)), SetTimer("end", 9.0)]
            case TimerFired():
                return [Finish()]
        return []

    script = (Crash(at=1.0, rank=1), Recover(at=1.5, rank=1))
    result = world(answer, 2, *script, **EVALUATION).run()
    assert result.times(Evaluated, 0) == [2.0]
    assert result.times(Evaluated, 1) == []
    assert result.times(Trained, 1) == [2.0]


def test_a_run_does_not_stay_open_for_an_evaluation() -> None:
    result = world(on_start({0: [Evaluate(torch.zeros(3))]}), **EVALUATION).run()
    assert result.simulator.is_over
    assert result.times(Evaluated) == []


def test_an_evaluation_without_validation_data_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="worker 0 asked to Evaluate"):
        world(on_start({0: [Evaluate(torch.zeros(3))]})).run()


# Messages.


def test_a_message_takes_its_bytes_over_the_bandwidth_and_the_latency() -> None:
    result = world(on_start({0: [Send(1, message())]}), links=SECOND).run()
    assert result.watcher.arrivals == [(1.25, 1, 0, 0)]


def test_messages_queue_on_the_senders_uplink() -> None:
    sends: list[Effect] = [Send(1, message()), Send(2, message()), Send(1, message())]
    result = world(on_start({0: sends, 2: [Send(0, message())]}), 3, links=SECOND).run()
    spans = [(0, 1, (0.0, 1.0)), (0, 2, (1.0, 2.0)), (0, 1, (2.0, 3.0)), (2, 0, (0.0, 1.0))]
    assert result.watcher.uplinks == spans
    arrivals = [(1.25, 1, 0, 0), (1.25, 0, 2, 0), (2.25, 2, 0, 0), (3.25, 1, 0, 0)]
    assert result.watcher.arrivals == arrivals


def test_an_uplink_that_is_free_again_starts_at_once() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        if rank == 0 and isinstance(event, Started):
            return [Send(1, message()), SetTimer("later", 5.0)]
        return [Send(1, message()), Finish()] if isinstance(event, TimerFired) else [Finish()]

    result = world(answer, links=SECOND).run()
    assert [span for _, _, span in result.watcher.uplinks] == [(0.0, 1.0), (5.0, 6.0)]


def test_a_slow_link_of_its_own_holds_up_only_what_comes_after_it() -> None:
    slow = Link(latency=2.0, bandwidth=SIZE / 4)
    links = Links(default=SECOND.default, overrides={(0, 1): slow})
    sends: list[Effect] = [Send(2, message()), Send(1, message()), Send(2, message())]
    back: list[Effect] = [Send(0, message())]
    result = world(on_start({0: sends, 1: back}), 3, links=links).run()
    # 0..1 to 2, 1..5 to 1, 5..6 to 2; the way back from 1 is as fast as any.
    assert sorted(result.watcher.arrivals) == [
        (1.25, 0, 1, 0),
        (1.25, 2, 0, 0),
        (6.25, 2, 0, 0),
        (7.0, 1, 0, 0),
    ]


def test_staleness_is_how_many_rounds_the_receiver_is_ahead() -> None:
    result = world(on_start({0: [Send(1, message(round=2)), Send(1, message(round=9))]}))
    result.simulator.states[1].round = 5
    assert [arrival[3] for arrival in result.run().watcher.arrivals] == [3, 0]


@pytest.mark.parametrize("receiver", [-1, 0, 2])
def test_a_receiver_that_is_no_other_worker_is_refused(receiver: Rank) -> None:
    with pytest.raises(LocalProtocolError, match=f"worker 0 sent to {receiver}"):
        world(on_start({0: [Send(receiver, message())]})).run()


def test_a_wire_hands_over_equal_messages_of_their_own() -> None:
    sent = Message("note", 3, {"x": torch.tensor([1.0, 2.0])})
    for wire in (False, True):
        result = world(on_start({0: [Send(1, sent)]}), wire=wire).run()
        [got] = [event.message for _, _, event in result.seen if isinstance(event, Received)]
        assert (got.kind, got.round) == ("note", 3)
        assert got.payload["x"].tolist() == [1.0, 2.0]
        assert (got is sent) != wire


def test_ties_break_in_the_order_of_sending() -> None:
    sends: list[Effect] = [Send(3, message())]
    result = world(on_start({2: sends, 0: sends, 1: sends}), 4).run()
    assert [sender for _, _, sender, _ in result.watcher.arrivals] == [0, 1, 2]


# Timers.


def test_timers_of_several_names_fire_at_their_times() -> None:
    timers: list[Effect] = [SetTimer("b", 2.0), SetTimer("a", 1.0)]
    keep: list[Effect] = [Train(torch.zeros(3), Steps(50))]
    result = world(on_start({0: [*timers, *keep]})).run()
    fired = [(now, event) for now, _, event in result.seen if isinstance(event, TimerFired)]
    assert fired == [(1.0, TimerFired("a")), (2.0, TimerFired("b"))]


@pytest.mark.parametrize(
    ("later", "expected"), [(3.0, [3.0]), (1.0, [1.0]), (math.inf, []), (-5.0, [0.0])]
)
def test_a_timer_set_again_is_replaced_or_cancelled(
    later: Seconds, expected: list[Seconds]
) -> None:
    timers: list[Effect] = [SetTimer("a", 2.0), SetTimer("a", later)]
    keep: list[Effect] = [Train(torch.zeros(3), Steps(50))]
    assert world(on_start({0: [*timers, *keep]})).run().times(TimerFired) == expected


def test_a_timer_that_fired_may_be_set_again() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        return [SetTimer("a", now + 1), *([Finish()] if now >= 3 else [])]

    assert world(answer, 1).run().times(TimerFired) == [1.0, 2.0, 3.0]


def test_timers_do_not_keep_a_run_open() -> None:
    result = world(on_start({0: [SetTimer("a", 2.0)]})).run()
    assert result.simulator.is_over
    assert result.times(TimerFired) == []


def test_a_timer_of_a_crashed_worker_does_not_wake_its_successor() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started(has_rejoined=False):
                return [SetTimer("a", 3.0), Train(torch.zeros(3), Steps(20))]
            case Started():
                return [SetTimer("a", 5.0)]
            case TimerFired():
                return [Finish()]
        return []

    result = world(answer, 1, Crash(at=1.0, rank=0), Recover(at=2.0, rank=0)).run()
    assert result.times(TimerFired) == [5.0]


# Getting ready with data.


class Preparing(Counting):
    """Needs 20 samples' worth to get ready with what it has."""

    @property
    def setup_cost(self) -> float:
        return 20.0

    def assign(self, ranks: tuple[Rank, ...]) -> None:
        self.rank = sum(ranks)


def preparing_world(answer: Answer) -> World:
    seen: list[Happened] = []
    watcher = Watcher()
    platforms = (Platform(throughput=10.0),)
    simulator = Simulator(
        Scripted(answer, seen), platforms, torch.zeros(3), Preparing, observer=watcher
    )
    return World(simulator, seen, watcher)


def test_getting_ready_keeps_a_platform_busy_before_it_trains() -> None:
    result = preparing_world(on_start({0: [Train(torch.zeros(3), Steps(10))]})).run()
    assert result.times(Started) == [0.0]
    assert result.times(Trained) == [3.0]


def test_other_data_is_told_of_and_takes_time_to_get_ready_with() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                return [Train(torch.zeros(3), Steps(10))]
            case Trained() if now == 3.0:
                return [Assign((0, 5))]
            case Assigned():
                return [Train(torch.zeros(3), Steps(10)), Finish()]
        return []

    result = preparing_world(answer).run()
    [assigned] = [event for _, _, event in result.seen if isinstance(event, Assigned)]
    assert assigned == Assigned(num_samples=15, epoch_cost=1)
    assert result.times(Trained) == [3.0, 6.0]


def test_other_data_in_the_middle_of_training_is_a_mistake() -> None:
    start: list[Effect] = [Train(torch.zeros(3), Steps(10)), Assign((0, 5))]
    with pytest.raises(LocalProtocolError, match="asked for other data while it trains"):
        preparing_world(on_start({0: start})).run()


def test_a_trainer_that_takes_over_no_data_says_so() -> None:
    with pytest.raises(LocalProtocolError, match="Counting cannot take over data of others"):
        world(on_start({0: [Assign((1,))]})).run()
