"""Workers that come for the first time during a run, and workers that leave."""

from __future__ import annotations

import math

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.scripted import SECOND, message, on_start, world
from tests.worlds import make_world

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Rank,
    Seconds,
    Send,
    Started,
    Steps,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import complete
from edgegossip.sim.fault import Arrival, Crash, Fault, Faults, Leave, Partition, Recover
from edgegossip.sim.platform import Platform

PARAMS = torch.zeros(3)


def working(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
    """Train 10 s and finish."""
    match event:
        case Started():
            return [Train(PARAMS, Steps(100))]
        case Trained():
            return [Finish()]
    return []


def test_who_is_not_there_is_lost_before_the_others_start_and_joins_when_it_comes() -> None:
    result = world(working, 3, Arrival(at=4.0, rank=2)).run()
    assert result.told(WorkerLost) == [(0.0, 0, 2), (0.0, 1, 2)]
    assert result.told(WorkerJoined) == [(4.0, 0, 2), (4.0, 1, 2)]
    for rank in (0, 1):
        kinds = [type(event) for _, r, event in result.seen if r == rank]
        assert kinds[:2] == [WorkerLost, Started]
    (start,) = [event for _, r, event in result.seen if r == 2 and isinstance(event, Started)]
    assert start.has_rejoined
    assert [now for now, r, what in result.watcher.changes if r == 2] == [0.0, 4.0, 14.0]


def test_who_never_comes_keeps_no_run_open() -> None:
    result = world(working, 2, Arrival(at=math.inf, rank=1)).run()
    assert result.simulator.is_over
    assert result.times(Started) == [0.0]


def test_the_first_that_comes_to_an_empty_run_begins_it() -> None:
    result = world(working, 2, Arrival(at=3.0, rank=0), Arrival(at=5.0, rank=1)).run()
    starts = [(now, r, e.has_rejoined) for now, r, e in result.seen if isinstance(e, Started)]
    assert starts == [(3.0, 0, False), (5.0, 1, True)]
    assert result.simulator.is_over


def test_a_newcomer_learns_who_else_is_not_there() -> None:
    result = world(working, 3, Arrival(at=1.0, rank=1), Arrival(at=2.0, rank=2)).run()
    assert (1.0, 1, 2) in result.told(WorkerLost)
    assert (2.0, 1, 2) in result.told(WorkerJoined)


def test_who_leaves_ends_its_training_and_is_gone_at_once() -> None:
    slow = (Platform(throughput=5.0), Platform(throughput=10.0))
    leave = Leave(at=4.0, rank=1)
    result = world(working, 2, leave, platforms=slow, detection_time=50.0).run()
    assert result.times(Trained, 1) == [10.0]
    assert result.told(WorkerLost) == [(10.0, 0, 1)]


def test_what_a_leaving_worker_has_sent_arrives_and_it_may_come_back() -> None:
    sends: dict[Rank, list[Effect]] = {1: [Send(0, message())]}
    script: list[Fault] = [Leave(at=0.1, rank=1), Recover(at=0.5, rank=1)]
    result = world(on_start(sends), 2, *script, links=SECOND).run()
    assert result.watcher.losses == []
    assert len(result.watcher.arrivals) == 2
    assert result.told(WorkerLost)[0] == (0.1, 0, 1)
    assert result.told(WorkerJoined) == [(0.5, 0, 1)]


def test_a_partition_hides_that_a_worker_leaves_until_its_silence_is_noticed() -> None:
    cut = Partition(start=0.0, end=100.0, group=(1,))
    slow = (Platform(throughput=2.0), Platform(throughput=2.0), Platform(throughput=10.0))
    leave = Leave(at=1.0, rank=2)
    result = world(working, 3, cut, leave, platforms=slow, detection_time=20.0).run(until=40.0)
    assert (10.0, 0, 2) in result.told(WorkerLost)
    assert all(now >= 20.0 for now, told, lost in result.told(WorkerLost) if told == 1)


def test_goodput_counts_what_a_machine_could_have_done_before_it_came() -> None:
    late = make_world(
        Gossip(topology=complete(NUM_WORKERS), num_rounds=20),
        faults=Faults(script=(Arrival(at=10.0, rank=3),)),
    )
    late.run()
    use = late.use(late.now)
    assert use is not None
    assert use.node_seconds == pytest.approx(NUM_WORKERS * late.now - 10.0)
    assert use.goodput <= 1 - 10.0 / (NUM_WORKERS * late.now) + 1e-9
    assert use.compute_used > 0.9


def test_spans_of_availability_become_arrivals_crashes_and_returns() -> None:
    faults = Faults.available([[(0.0, math.inf)], [(2.0, 3.0), (4.0, 5.0)], []])
    assert faults.script == (
        Arrival(at=2.0, rank=1),
        Crash(at=3.0, rank=1),
        Recover(at=4.0, rank=1),
        Crash(at=5.0, rank=1),
        Arrival(at=math.inf, rank=2),
    )
    assert faults.absent == {1, 2}


@pytest.mark.parametrize("spans", [[(2.0, 1.0)], [(0.0, 3.0), (2.0, 4.0)], [(-1.0, 2.0)]])
def test_spans_must_be_in_order(spans: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="spans of worker 0 must be ascending"):
        Faults.available([spans])


def test_an_arrival_at_the_start_is_none() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Faults(script=(Arrival(at=0.0, rank=1),))
