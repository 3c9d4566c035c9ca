"""AD-PSGD against its theory: what one gains the other loses, and no circle closes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.algorithms import MATCHINGS, NUM_WORKERS
from tests.worlds import (
    INITIAL,
    TARGETS,
    UNEVEN,
    Recorder,
    Watched,
    final_params,
    make_world,
)
from torch import Tensor

from edgegossip.algorithms.gossip.adpsgd import ADPSGD
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.protocol import Event, Message, Rank, Received, Seconds, WorkerState
from edgegossip.contract.topology import Topology, complete, ring, star
from edgegossip.sim.fault import Crash, Delay, Drop, Faults, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.simulator import Simulator

START = INITIAL[:NUM_WORKERS]
SLOW_LINKS = Links(default=Link(latency=0.7, bandwidth=300.0))
LATE = Faults(script=(Delay(seconds=5.0),))
LOSSY = Faults(script=(Drop(probability=0.3), Delay(seconds=2.0)), seed=1)


@dataclass
class Ledger(Recorder):
    """Adds up, before each event, all parameters and the changes still to be made."""

    simulator: Simulator[Any] = field(init=False)
    changes: dict[tuple[Rank, int], Tensor] = field(default_factory=dict)
    sums: list[Tensor] = field(default_factory=list)
    num_averages: int = 0

    def before(self, state: WorkerState, event: Event, now: Seconds) -> None:
        self.add_up()
        if isinstance(event, Received) and event.message.kind == "average":
            self.changes.pop((state.rank, event.message.round), None)

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        request = self.simulator.states[receiver].request
        is_open = request is not None and request.send.message.round == message.round
        if message.kind == "average" and is_open:
            self.num_averages += (receiver, message.round) not in self.changes
            self.changes[receiver, message.round] = message.payload["change"]

    def add_up(self) -> None:
        held = [state.params.double() for state in self.simulator.states]
        self.sums.append(torch.stack(held).sum(0) - sum(self.changes.values()))


def watch(algorithm: ADPSGD, **arguments: Any) -> tuple[Ledger, Tensor]:  # noqa: ANN401
    """Run `algorithm` without training; give what was added up, and the final parameters."""
    ledger = Ledger()
    watched = Watched(algorithm, before=ledger.before)
    ledger.simulator = make_world(
        watched, observer=ledger, initial=START, lr=0.0, platforms=UNEVEN, **arguments
    )
    after = final_params(ledger.simulator)
    assert not ledger.changes
    ledger.add_up()
    return ledger, after


@pytest.mark.parametrize("topology", [complete(5), ring(5), star(5), MATCHINGS], ids=repr)
@pytest.mark.parametrize("faults", [Faults(), LATE, LOSSY], ids=["quick", "late", "lossy"])
def test_sum_stays_after_every_event_changes_under_way_included(
    topology: Topology, faults: Faults
) -> None:
    resend_after = 3.0 if faults is LOSSY else None
    algorithm = ADPSGD(topology=topology, num_rounds=15, resend_after=resend_after)
    ledger, _ = watch(algorithm, links=SLOW_LINKS, faults=faults)
    assert ledger.num_averages > 5
    sums = torch.stack(ledger.sums)
    expected = START.double().sum(0).expand_as(sums)
    torch.testing.assert_close(sums, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("topology", [complete(5), ring(5), star(5), MATCHINGS], ids=repr)
def test_exchange_alone_leads_to_the_mean_of_the_start(topology: Topology) -> None:
    algorithm = ADPSGD(topology=topology, num_rounds=100)
    _, after = watch(algorithm, links=Links(default=Link(latency=0.1)))
    torch.testing.assert_close(after, START.mean(0).expand_as(after), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("num_workers", [2, 3, 4, 5, 6])
def test_no_circle_of_requests_closes(num_workers: int) -> None:
    # All are equally fast and ask at the same time, so that in many rounds each worker's
    # partner is waiting itself. A run in which some wait for ever ends with an open request.
    topology = complete(num_workers) if num_workers == 2 else ring(num_workers)
    algorithm = ADPSGD(topology=topology, num_rounds=60)
    initial = INITIAL[:num_workers]
    platforms = UNEVEN[:1] * num_workers
    links = Links(default=Link(latency=0.05))
    world = make_world(algorithm, platforms=platforms, initial=initial, lr=0.0, links=links)
    after = final_params(world)
    for state in world.states:
        assert state.request is None
        assert not state.deferred
    assert consensus_distance(after) < 0.01 * consensus_distance(initial)


def test_training_brings_the_mean_near_the_optimum_of_all() -> None:
    algorithm = ADPSGD(topology=ring(5), num_rounds=300)
    after = final_params(make_world(algorithm, lr=0.02))
    torch.testing.assert_close(after.mean(0), TARGETS[:5].mean(0), atol=0.1, rtol=0.0)
    assert consensus_distance(after) < 0.3 * consensus_distance(TARGETS[:5])


def test_nobody_waits_for_the_slowest() -> None:
    recorder = Recorder()
    algorithm = ADPSGD(topology=complete(5), num_rounds=8)
    make_world(algorithm, platforms=UNEVEN, observer=recorder, links=SLOW_LINKS).run()
    finished = {rank: now for now, rank, what in recorder.trace if what == "finished"}
    assert finished == pytest.approx(
        {rank: 8 / platform.throughput for rank, platform in enumerate(UNEVEN)}
    )


def test_worker_that_comes_back_does_not_pull_the_others_to_the_start() -> None:
    # Without training all agree on 3; the one that crashed would bring in its 0.
    faults = Faults(script=(Crash(at=4.5, rank=1), Recover(at=6.25, rank=1)))
    algorithm = ADPSGD(topology=ring(5), num_rounds=30)
    initial = torch.full((5, 2), 3.0)
    after = final_params(make_world(algorithm, initial=initial, lr=0.0, faults=faults))
    assert torch.equal(after, initial)
