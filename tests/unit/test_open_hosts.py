"""Hosts of an open run: they begin with those that are there, and leave at once."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.host_checks import check
from tests.host_runs import Run
from tests.host_world_draws import draw_world
from tests.host_worlds import Disturbance, World
from tests.hosts import EPOCHS, make_host
from tests.parity import SETTINGS
from tests.virtual_network import Wire

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.protocol import WorkerJoined
from edgegossip.contract.topology import OpenTopology, complete, ring
from edgegossip.net.host.host import Host
from edgegossip.net.host.status import Phase
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.agreement import agreement_of
from edgegossip.runs.final_average import FinalAverage

LIMIT = 8
RING = Gossip(topology=ring(LIMIT).open(), num_rounds=40, local_steps=2)


def host_with(*here: int, **settings: Any) -> Host[Any]:  # noqa: ANN401
    """Worker 0 of an open run, which some of the others have told that they wait too."""
    settings = {"is_open": True, **settings}
    host = make_host(EPOCHS, 0, MemoryNetwork(), settings=replace(SETTINGS, **settings))
    host.meeting.start(0.0)
    for rank in here:
        status = replace(host.peers.status_for(rank, Phase.WAITING, 0.0), life=rank)
        host.peers.appeared(rank, rank)
        host.peers.told(rank, status, 0.0)
    return host


def open_world(**changes: Any) -> World:  # noqa: ANN401
    """Eight ranks at most, of which 1, 2, 5 and 6 are there from the start."""
    start_at = tuple(0.0 if rank in (1, 2, 5, 6) else 1e6 for rank in range(LIMIT))
    world = World(
        seed=3,
        name="gossip",
        algorithm=RING,
        step_seconds=(0.1,) * LIMIT,
        start_at=start_at,
        wire=Wire(latency=(0.001, 0.01), bandwidth=1e7),
        disturbances=(),
        meet_seconds=5.0,
        checkpoint_seconds=2.0,
        is_open=True,
    )
    return replace(world, **changes)


def run_of(world: World, horizon: float = 500.0) -> Run:
    run = Run(world)
    run.time.run(horizon, lambda: False)
    return run


def test_an_open_run_begins_a_second_after_enough_have_come() -> None:
    meeting = host_with(1, min_to_begin=2).meeting
    meeting.check(3.0)
    assert not meeting.is_over(3.9)
    assert meeting.is_over(4.0)
    waiting = host_with(1, min_to_begin=3).meeting
    waiting.check(3.0)
    assert not waiting.is_over(SETTINGS.meet_seconds - 1.0)


def test_who_is_not_there_is_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    host_with(1).meeting.conclude()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert f"with 2 of at most {NUM_WORKERS} workers" in record.message


@pytest.mark.parametrize("is_open", [True, False])
def test_a_newcomer_of_an_open_run_has_the_state_of_one_that_restarted(is_open: bool) -> None:
    host = host_with(is_open=is_open)
    host.peers.begin()
    status = replace(host.peers.status_for(2, Phase.RUNNING, 0.0), life=7)
    host.peers.appeared(2, 1)
    assert host.peers.told(2, status, 1.0) == [WorkerJoined(2, has_restarted=is_open)]


def test_ranks_that_are_never_there_are_not_waited_for() -> None:
    run = run_of(open_world())
    assert sorted(run.processes) == [1, 2, 5, 6]
    for process in run.processes.values():
        assert process.reason == "finished"
        # A ring of four: each has two neighbors, whatever their ranks.
        graph = RING.topology.among(process.host.state.views.own)
        assert len(graph.out_neighbors(process.rank, 0)) == 2
    first, *others = [process.host.state.params for process in run.processes.values()]
    for params in others:
        assert torch.allclose(params, first, atol=0.5)


def test_the_final_mean_is_that_of_those_who_were_there() -> None:
    final = FinalAverage(inner=RING, num_workers=LIMIT, ends_at=math.inf)
    leaves = Disturbance(kind="leave", at=4.0, ranks=(5,), seconds=math.inf)
    run = run_of(open_world(algorithm=final, disturbances=(leaves,)))
    for rank in (1, 2, 6):
        agreement = agreement_of(final, run.processes[rank].host)
        assert agreement is not None
        assert (agreement.members, agreement.is_apart) == ((1, 2, 6), False)
        assert list(agreement.lines()) == []


def test_one_that_leaves_is_lost_at_once() -> None:
    leaves = Disturbance(kind="leave", at=4.05, ranks=(5,), seconds=math.inf)
    run = run_of(open_world(disturbances=(leaves,)), horizon=4.6)  # not after three seconds
    assert run.processes[5].reason == "interrupted"
    assert 5 in run.disks
    assert all(5 in run.processes[rank].host.state.lost for rank in (1, 2, 6))


def test_a_rank_that_left_comes_back_as_the_same_worker() -> None:
    leaves = Disturbance(kind="leave", at=4.0, ranks=(5,), seconds=3.0)
    run = check(open_world(disturbances=(leaves,), start_at=(0.0,) * LIMIT))
    assert [rank for _, rank in run.starts].count(5) == 2
    assert run.processes[5].host.state.round == RING.num_rounds


def test_a_complete_graph_is_open_as_it_is() -> None:
    assert not isinstance(complete(4).open(), OpenTopology)
    assert draw_world(0).is_open is False
