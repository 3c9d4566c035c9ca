"""Faults, the end of a run, and runs in pieces."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.scripted import SECOND, SIZE, Answer, Happened, World, message, on_start, world
from tests.tiers import first, thorough

from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    Steps,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.sim.fault import Crash, Delay, Drop, Fault, Partition, Recover
from edgegossip.sim.platform import Platform
from edgegossip.sim.pool import ComputePool

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


def test_a_message_under_way_while_a_partition_lasts_is_lost() -> None:
    sends: list[Effect] = [Send(1, message()), Send(2, message())]
    inside: list[Effect] = [Send(1, message())]
    partition = Partition(start=1.0, end=1.5, group=(0,))
    result = world(on_start({0: sends, 2: inside}), 3, partition, links=SECOND).run()
    # The one to worker 2 is due after the end, but was under way when the partition began.
    assert result.watcher.losses == [(1.25, 1, 0, "partitioned"), (2.25, 2, 0, "partitioned")]
    assert [(now, rank) for now, rank, *_ in result.watcher.arrivals] == [(1.25, 1)]


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
    assert result.seen[:2] == [(0.0, 0, Started(False, 10, 1)), (1.5, 0, Started(True, 10, 1))]
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
    assert [params[0] for params in result.simulator.estimates().values()] == [101.0]
    result.run(until=12.5)
    assert [params[0] for params in result.simulator.estimates().values()] == [100.0, 101.0]


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


def restless_world(
    answer: Answer = restless,
    downlink: float = math.inf,
    **settings: Any,  # noqa: ANN401
) -> World:
    platforms = (Platform(throughput=10.0, downlink=downlink),) * 4
    return world(
        answer,
        4,
        *FAULTY,
        detection_time=0.3,
        links=SECOND,
        platforms=platforms,
        **settings,
    )


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


@thorough
@pytest.mark.parametrize("downlink", [math.inf, SIZE / 2])
@pytest.mark.parametrize("num_threads", first(1, [0, 2]))
def test_a_run_kept_and_resumed_after_every_event_is_the_whole_run(
    num_threads: int, downlink: float
) -> None:
    seen: list[Happened] = []

    def stopping(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
        seen.append((now, rank, event))
        current.simulator.should_stop = True
        return restless(rank, event, now)

    whole = restless_world(downlink=downlink).run()
    with ComputePool(num_threads) as pool:
        current = restless_world(stopping, downlink, pool=pool)
        while not current.simulator.run():
            kept = assemble(*dismantle(current.simulator.state_dict()))
            current = restless_world(stopping, downlink, pool=pool)
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
