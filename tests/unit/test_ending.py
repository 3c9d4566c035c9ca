"""When a worker that has finished may leave."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.parity import SETTINGS

from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.contract.protocol import Evaluated, TimerFired, WorkerJoined
from edgegossip.contract.topology import complete
from edgegossip.net.host.meeting import Ending
from edgegossip.net.host.peers import Peers
from edgegossip.net.host.receiving import connect
from edgegossip.net.host.status import Phase
from edgegossip.net.memory import MemoryNetwork
from edgegossip.net.runtime import RealRuntime, RunClock


def finished(num_workers: int, num_unfinished: int) -> Ending:
    """The end of worker 0, at second 2; the last of the others have work left."""
    settings = replace(SETTINGS, settle_seconds=5.0)
    algorithm = GoSGD(topology=complete(num_workers), num_rounds=1)
    peers = Peers(0, num_workers, life=1)
    transport = MemoryNetwork().transport(0)
    runtime = RealRuntime()
    sending, *_ = connect(
        algorithm,
        torch.zeros(1),
        transport,
        runtime.inbox(),
        peers,
        settings,
        RunClock(runtime.clock),
    )
    for rank, _ in peers:
        has_finished = rank < num_workers - num_unfinished
        phase = Phase.FINISHED if has_finished else Phase.RUNNING
        peers.appeared(rank, incarnation=1)
        status = peers.status_for(rank, phase, 0.0)
        peers.told(rank, replace(status, life=1 + rank, begun_with=peers.life), clock=0.0)
    assert peers.begin() == []
    sending.phase = Phase.FINISHED
    ending = Ending(settings, sending, peers)
    ending.finish(2.0)
    ending.changed(2.0)
    return ending


@pytest.mark.parametrize(("num_workers", "num_unfinished"), [(2, 1), (3, 1), (4, 2)])
def test_those_who_never_finish_are_waited_for_ten_times_as_long_as_the_run_took(
    num_workers: int, num_unfinished: int
) -> None:
    ending = finished(num_workers, num_unfinished)
    assert not ending.is_over(26.9)
    assert ending.is_over(27.1)  # 2 s, ten times that, and 5 s to settle


def test_one_that_finishes_before_most_waits_for_them() -> None:
    assert not finished(num_workers=3, num_unfinished=2).is_over(1e6)


def test_timers_and_what_they_ask_for_keep_nobody() -> None:
    ending = finished(num_workers=2, num_unfinished=0)
    for event in (TimerFired("window"), Evaluated(0.5)):
        ending.changed(7.1, event)
    assert ending.is_over(7.1)  # 2 s, and 5 s to settle
    ending.changed(7.1, WorkerJoined(1))
    assert not ending.is_over(7.1)


def test_one_that_stays_repeats_its_report_which_may_have_been_lost() -> None:
    ending = finished(num_workers=2, num_unfinished=1)
    assert [ending.repeats(now) for now in (6.9, 7.0, 7.1, 11.9, 12.0)] == [
        False,
        True,
        False,
        False,
        True,
    ]
