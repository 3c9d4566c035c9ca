"""The event loop by hand-computed times: training, links, timers, faults, the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from edgegossip.core.codec import num_bytes
from edgegossip.core.errors import LocalProtocolError
from edgegossip.core.protocol import (
    WORKER,
    Effect,
    Epochs,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Message,
    Payload,
    Predict,
    Predicted,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    SetTimer,
    Started,
    Steps,
    TimerFired,
    Train,
    Trained,
    TrainingResult,
    Work,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.core.snapshot import assemble, dismantle
from edgegossip.sim.fault import Crash, Delay, Drop, Fault, Faults, Partition, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Contention, ContentionTrace, Platform, Sensitivity
from edgegossip.sim.pool import ComputePool
from edgegossip.sim.simulator import Simulator

Answer: TypeAlias = Callable[[Rank, Event, Seconds], list[Effect]]
Happened: TypeAlias = tuple[Seconds, Rank, Event]


@dataclass(frozen=True)
class Scripted:
    """Answers as it is told, and notes what it is asked."""

    answer: Answer
    seen: list[Happened]

    def init(self, rank: Rank, params: Tensor) -> WorkerState:
        return WorkerState(rank=rank, params=params)

    def role(self, rank: Rank) -> Role:
        return WORKER

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        self.seen.append((now, state.rank, event))
        if isinstance(event, Trained):
            state.params = event.params
        return self.answer(state.rank, event, now)


@dataclass
class Counting:
    """Adds one for each step, and costs a sample a step."""

    rank: Rank
    incarnation: int

    @property
    def num_samples(self) -> int:
        return 10 + self.rank

    def cost(self, work: Work, inputs: Payload) -> float:
        return work.num_steps if isinstance(work, Steps) else 1

    def train(self, params: Tensor, work: Work, inputs: Payload) -> TrainingResult:
        steps = int(self.cost(work, inputs))
        return TrainingResult(params + steps + 100 * self.incarnation, steps, steps, loss=0.5)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Watcher:
    """Keeps what the observer is told."""

    def __init__(self) -> None:
        self.spans: list[tuple[Rank, Seconds, Seconds]] = []
        self.uplinks: list[tuple[Rank, Rank, tuple[Seconds, Seconds]]] = []
        self.arrivals: list[tuple[Seconds, Rank, Rank, int]] = []
        self.losses: list[tuple[Seconds, Rank, Rank, str]] = []
        self.changes: list[tuple[Seconds, Rank, str]] = []

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self.spans.append((rank, start, now))

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        self.uplinks.append((rank, receiver, uplink))

    def received(self, now: Seconds, rank: Rank, sender: Rank, staleness: int) -> None:
        self.arrivals.append((now, rank, sender, staleness))

    def lost(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, reason: str
    ) -> None:
        self.losses.append((now, rank, sender, reason))

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        self.changes.append((now, rank, what))


@dataclass
class World:
    """A simulator with everything that came out of it."""

    simulator: Simulator[WorkerState]
    seen: list[Happened]
    watcher: Watcher

    def run(self, until: Seconds = math.inf) -> World:
        self.simulator.run(until)
        return self

    def times(self, kind: type, rank: Rank | None = None) -> list[Seconds]:
        return [
            now for now, r, event in self.seen if isinstance(event, kind) and rank in (None, r)
        ]

    def told(self, kind: type) -> list[tuple[Seconds, Rank, Rank]]:
        return [(now, r, event.rank) for now, r, event in self.seen if type(event) is kind]  # type: ignore[union-attr]


def world(
    answer: Answer,
    num_workers: int = 2,
    *script: Fault,
    platforms: tuple[Platform, ...] | None = None,
    detection_time: Seconds = 1.0,
    **settings: Any,  # noqa: ANN401
) -> World:
    seen: list[Happened] = []
    watcher = Watcher()
    simulator = Simulator(
        Scripted(answer, seen),
        platforms or (Platform(throughput=10.0),) * num_workers,
        torch.zeros(3),
        Counting,
        faults=Faults(script=script, detection_time=detection_time),
        observer=watcher,
        **settings,
    )
    return World(simulator, seen, watcher)


def on_start(effects: dict[Rank, list[Effect]]) -> Answer:
    """Do this at the start and finish; nothing later."""

    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        return [*effects.get(rank, []), Finish()] if isinstance(event, Started) else []

    return answer


def message(round: int = 0, num_floats: int = 10) -> Message:
    return Message("note", round, {"x": torch.zeros(num_floats)})


SIZE = num_bytes(message())
SECOND = Links(default=Link(latency=0.25, bandwidth=float(SIZE)))
"""Links on which a `message` takes a second, and a quarter more to arrive."""


# Training.


def test_a_worker_is_told_how_much_data_it_has() -> None:
    assert world(on_start({})).run().seen[1] == (0.0, 1, Started(num_samples=11))


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
        return [Finish()] if now > 0 else []

    trace = ContentionTrace((0.0,), (Contention(cores=1.0),))
    platform = Platform(throughput=10.0, trace=trace, sensitivity=Sensitivity(cores=0.5))
    result = world(answer, platforms=(platform,)).run()
    found = [event.throughput for _, _, event in result.seen if isinstance(event, Predicted)]
    assert found == [10.0, 5.0]


def test_an_evaluation_takes_no_virtual_time() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        is_start = isinstance(event, Started)
        return [Evaluate(torch.full((3,), 2.0))] if is_start else [Finish()]

    result = world(answer, 1, evaluate=lambda params: (float(params.sum()), 0.5)).run()
    assert result.seen[1:] == [(0.0, 0, Evaluated(6.0, 0.5))]


def test_an_evaluation_without_test_data_is_refused() -> None:
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


# Faults.


def test_drops_are_drawn_for_each_message_on_its_own() -> None:
    num_workers = 41
    sends: list[Effect] = [Send(j, message()) for j in range(1, num_workers)]
    answer = on_start({0: sends})
    result = world(answer, num_workers, Drop(probability=0.5)).run()
    lost = [reason for _, _, _, reason in result.watcher.losses]
    assert set(lost) == {"dropped"}
    assert 10 <= len(lost) <= 30  # 6 in 10,000 draws of 40 fair coins are outside
    assert len(lost) + len(result.watcher.arrivals) == num_workers - 1


@pytest.mark.parametrize(("probability", "num_lost"), [(0.0, 0), (1.0, 20)])
def test_certain_drops_are_certain(probability: float, num_lost: int) -> None:
    sends: list[Effect] = [Send(1, message())] * 20
    result = world(on_start({0: sends}), 2, Drop(probability=probability)).run()
    assert len(result.watcher.losses) == num_lost


def test_a_dropped_message_still_takes_the_uplink() -> None:
    sends: list[Effect] = [Send(1, message()), Send(2, message())]
    drop = Drop(probability=1.0, receiver=1)
    result = world(on_start({0: sends}), 3, drop, links=SECOND).run()
    assert result.watcher.arrivals == [(2.25, 2, 0, 0)]


def test_delays_are_drawn_for_each_message_on_its_own() -> None:
    sends: list[Effect] = [Send(1, message())] * 50
    result = world(on_start({0: sends}), 2, Delay(seconds=2.0)).run()
    times = [now for now, *_ in result.watcher.arrivals]
    assert len(set(times)) == 50
    assert 0 <= min(times) < 0.3
    assert 1.7 < max(times) < 2


def test_a_message_that_arrives_during_a_partition_is_lost() -> None:
    sends: list[Effect] = [Send(1, message()), Send(2, message())]
    inside: list[Effect] = [Send(1, message())]
    partition = Partition(start=1.0, end=1.5, group=(0,))
    result = world(on_start({0: sends, 2: inside}), 3, partition, links=SECOND).run()
    assert result.watcher.losses == [(1.25, 1, 0, "partitioned")]
    assert [(now, rank) for now, rank, *_ in result.watcher.arrivals] == [(1.25, 1), (2.25, 2)]


def test_a_message_to_a_crashed_worker_is_lost() -> None:
    result = world(
        on_start({0: [Send(1, message())]}), 2, Crash(at=1.0, rank=1), links=SECOND
    ).run()
    assert result.watcher.losses == [(1.25, 1, 0, "crashed")]


@pytest.mark.parametrize(("crash", "arrives"), [(0.9, False), (1.1, True)])
def test_a_crash_cuts_off_only_what_has_not_left_the_sender(
    crash: Seconds, arrives: bool
) -> None:
    answer = on_start({0: [Send(1, message())]})
    result = world(answer, 2, Crash(at=crash, rank=0), links=SECOND).run()
    assert bool(result.watcher.arrivals) == arrives
    assert bool(result.watcher.losses) != arrives


def test_a_crashed_worker_comes_back_as_a_new_one() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                return [Train(torch.zeros(3), Steps(20))]
            case Trained():
                return [Finish()]
        return []

    result = world(answer, 1, Crash(at=1.0, rank=0), Recover(at=1.5, rank=0)).run()
    assert result.seen[:2] == [(0.0, 0, Started(False, 10)), (1.5, 0, Started(True, 10))]
    assert result.times(Trained) == [3.5]  # and not at 2.0 what it began before
    assert result.simulator.states[0].params.tolist() == [120.0] * 3
    changes = [(1.0, 0, "crashed"), (1.5, 0, "recovered"), (3.5, 0, "finished")]
    assert result.watcher.changes == changes


def test_others_hear_of_a_crash_after_the_detection_time_and_of_the_return_at_once() -> None:
    wait: list[Effect] = [Train(torch.zeros(3), Steps(100))]
    faults = Crash(at=1.0, rank=0), Recover(at=4.0, rank=0)
    result = world(on_start(dict.fromkeys(range(3), wait)), 3, *faults, detection_time=0.5)
    result.run()
    assert result.told(WorkerLost) == [(1.5, 1, 0), (1.5, 2, 0)]
    assert result.told(WorkerJoined) == [(4.0, 1, 0), (4.0, 2, 0)]


def test_both_sides_hear_of_a_partition_and_of_its_end() -> None:
    wait: list[Effect] = [Train(torch.zeros(3), Steps(100))]
    partition = Partition(start=1.0, end=4.0, group=(0,))
    result = world(on_start({0: wait, 1: wait}), 2, partition, detection_time=0.5).run()
    assert result.told(WorkerLost) == [(1.5, 0, 1), (1.5, 1, 0)]
    assert result.told(WorkerJoined) == [(4.0, 0, 1), (4.0, 1, 0)]


def test_a_crash_of_a_worker_that_is_gone_changes_nothing() -> None:
    faults = Crash(at=1.0, rank=0), Crash(at=2.0, rank=0), Recover(at=0.5, rank=1)
    result = world(on_start({1: [Train(torch.zeros(3), Steps(50))]}), 2, *faults).run()
    assert result.watcher.changes.count((1.0, 0, "crashed")) == 1
    assert result.simulator.is_over


# The end.


def test_a_run_ends_when_all_have_finished_and_nothing_is_under_way() -> None:
    result = world(on_start({0: [Send(1, message())]}), links=SECOND).run()
    assert result.simulator.is_over
    assert result.simulator.now == 1.25
    assert result.times(Received) == [1.25]


def test_workers_that_wait_for_ever_are_named() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        return [] if rank in (1, 3) else [Finish()]

    with pytest.raises(LocalProtocolError, match=r"at 0 s .* workers \[1, 3\] have not fin"):
        world(answer, 4).run()


def test_a_run_whose_workers_are_all_gone_is_over() -> None:
    faults = Crash(at=1.0, rank=0), Crash(at=2.0, rank=1)
    work: list[Effect] = [Train(torch.zeros(3), Steps(100))]
    answer = on_start({0: work, 1: work})
    assert world(answer, 2, *faults).run().simulator.is_over


def test_a_run_whose_workers_are_all_gone_waits_for_one_that_comes_back() -> None:
    faults = Crash(at=1.0, rank=0), Recover(at=9.0, rank=0)
    result = world(on_start({0: [Train(torch.zeros(3), Steps(20))]}), 1, *faults).run()
    assert result.simulator.now == 11.0


def test_estimates_are_of_those_online_or_of_all_if_nobody_is() -> None:
    def answer(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        work = Train(torch.full((3,), float(rank)), Steps(100))
        return [work, Finish()] if isinstance(event, Started) else []

    faults = Crash(at=11.0, rank=0), Crash(at=12.0, rank=1)
    result = world(answer, 2, *faults)
    result.simulator._num_open += 1  # keeps it open until both are gone
    result.run(until=11.5)
    assert [params[0] for params in result.simulator.estimates()] == [101.0]
    result.run(until=12.5)
    assert [params[0] for params in result.simulator.estimates()] == [100.0, 101.0]


# Pieces and checkpoints.


FAULTY: tuple[Fault, ...] = (
    Crash(at=1.2, rank=1),
    Recover(at=2.7, rank=1),
    Drop(probability=0.3),
    Delay(seconds=0.4),
    Partition(start=2.5, end=6.0, group=(0, 2)),
)


def restless(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
    """Train, send to everybody, set timers, until time 4."""
    match event:
        case Started():
            return [Train(torch.full((3,), float(rank)), Steps(5))]
        case Trained() if now < 4:
            sends = [Send(j, message(int(now), rank + 3)) for j in range(4) if j != rank]
            timer = SetTimer("tick", now + 0.3)
            return [*sends, timer, Train(event.params + 0.5, Steps(3 + rank))]
        case Trained():
            return [Finish()]
    return []


def restless_world(answer: Answer = restless, **settings: Any) -> World:  # noqa: ANN401
    return world(answer, 4, *FAULTY, detection_time=0.3, links=SECOND, **settings)


def trace(seen: list[Happened]) -> list[tuple[Seconds, Rank, str]]:
    return [(now, rank, type(event).__name__) for now, rank, event in seen]


def test_a_run_in_pieces_is_the_whole_run() -> None:
    whole, pieces = restless_world().run(), restless_world()
    for until in range(1000):
        if pieces.simulator.run(until / 7):
            break
        assert pieces.simulator.now <= until / 7
    assert trace(pieces.seen) == trace(whole.seen)
    assert pieces.watcher.losses == whole.watcher.losses


def test_every_message_arrives_or_is_lost_and_every_loss_has_a_reason() -> None:
    watcher = restless_world().run().watcher
    assert len(watcher.uplinks) == len(watcher.arrivals) + len(watcher.losses)
    assert {reason for *_, reason in watcher.losses} == {"dropped", "crashed", "partitioned"}


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_run_kept_and_resumed_after_every_event_is_the_whole_run(num_threads: int) -> None:
    seen: list[Happened] = []

    def stopping(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        seen.append((now, rank, event))
        current.simulator.should_stop = True
        return restless(rank, event, now)

    whole = restless_world().run()
    with ComputePool(num_threads) as pool:
        current = restless_world(stopping, pool=pool)
        while not current.simulator.run():
            kept = assemble(*dismantle(current.simulator.state_dict()))
            current = restless_world(stopping, pool=pool)
            current.simulator.load_state_dict(kept)
    assert trace(seen) == trace(whole.seen)
    assert current.simulator.num_events == whole.simulator.num_events
    for state, expected in zip(current.simulator.states, whole.simulator.states, strict=True):
        assert torch.equal(state.params, expected.params)


def test_a_run_asked_to_stop_does_nothing_more() -> None:
    result = restless_world()
    result.simulator.should_stop = True
    assert not result.simulator.run()
    assert result.seen == []
