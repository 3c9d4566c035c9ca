"""GoSGD against its theory: weight is conserved, and with it the weighted mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.worlds import INITIAL, TARGETS, UNEVEN, Recorder, Watched, final_params, make_world
from torch import Tensor

from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.protocol import Event, Message, Rank, Received, Seconds, WorkerState
from edgegossip.contract.topology import Topology, complete, directed_ring, ring
from edgegossip.sim.fault import Delay, Faults
from edgegossip.sim.link import Link, Links
from edgegossip.sim.simulator import Simulator

START = INITIAL[:NUM_WORKERS]
SLOW_LINKS = Links(default=Link(latency=0.7, bandwidth=300.0))
LATE = Faults(script=(Delay(seconds=5.0),))


@dataclass
class Ledger(Recorder):
    """Adds up weight, and weight times parameters, before each event."""

    simulator: Simulator[Any] = field(init=False)
    in_flight: list[Message] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    moments: list[Tensor] = field(default_factory=list)

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        self.in_flight.append(message)

    def before(self, state: WorkerState, event: Event, now: Seconds) -> None:
        self.add_up()
        if isinstance(event, Received):
            self.in_flight.remove(event.message)

    def add_up(self) -> None:
        queued = [message for s in self.simulator.states for _, message in s.queue]
        under_way = (*self.in_flight, *queued)
        held = [(s.weight, s.params) for s in self.simulator.states]
        held += [(m.numbers["weight"], m.payload["params"]) for m in under_way]
        self.weights.append(sum(weight for weight, _ in held))
        self.moments.append(torch.stack([w * x.double() for w, x in held]).sum(0))


def watch(algorithm: GoSGD, **arguments: Any) -> tuple[Ledger, Tensor]:  # noqa: ANN401
    """Run `algorithm` on a world and give what was added up, and the final parameters."""
    ledger = Ledger()
    watched = Watched(algorithm, before=ledger.before)
    ledger.simulator = make_world(watched, observer=ledger, platforms=UNEVEN, **arguments)
    after = final_params(ledger.simulator)
    assert not ledger.in_flight
    ledger.add_up()
    return ledger, after


@pytest.mark.parametrize("topology", [complete(5), ring(5), directed_ring(5)], ids=repr)
@pytest.mark.parametrize("probability", [0.1, 0.5, 1.0])
def test_weights_sum_to_one_after_every_event_those_in_flight_included(
    topology: Topology, probability: float
) -> None:
    algorithm = GoSGD(topology=topology, num_rounds=15, exchange_probability=probability)
    ledger, _ = watch(algorithm, links=SLOW_LINKS, faults=LATE)
    assert len(ledger.weights) > 5 * 15
    assert ledger.weights == pytest.approx([1.0] * len(ledger.weights), abs=1e-12)


def test_weighted_mean_stays_without_training() -> None:
    algorithm = GoSGD(topology=ring(5), num_rounds=30, exchange_probability=0.7)
    ledger, _ = watch(algorithm, initial=START, lr=0.0, links=SLOW_LINKS, faults=LATE)
    moments = torch.stack(ledger.moments)
    torch.testing.assert_close(
        moments, START.mean(0).double().expand_as(moments), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("topology", [complete(5), ring(5), directed_ring(5)], ids=repr)
def test_exchange_alone_leads_to_the_mean_of_the_start(topology: Topology) -> None:
    algorithm = GoSGD(topology=topology, num_rounds=300, exchange_probability=1.0)
    after = final_params(make_world(algorithm, initial=START, lr=0.0, platforms=UNEVEN))
    assert consensus_distance(after) < 1e-3 * consensus_distance(START)
    torch.testing.assert_close(after.mean(0), START.mean(0), atol=1e-3, rtol=1e-3)


def test_more_exchange_agrees_better() -> None:
    algorithm = GoSGD(topology=complete(5), num_rounds=150)
    distances: Sequence[float] = [
        consensus_distance(final_params(make_world(replace(algorithm, exchange_probability=p))))
        for p in (0.02, 0.2, 1.0)
    ]
    assert distances[0] > distances[1] > distances[2]


def test_nobody_waits_for_the_slowest() -> None:
    # Speeds differ fourfold; each worker ends after its own steps, at its own pace.
    recorder = Recorder()
    algorithm = GoSGD(topology=complete(5), num_rounds=8, exchange_probability=0.5)
    make_world(algorithm, platforms=UNEVEN, observer=recorder, links=SLOW_LINKS).run()
    finished = {rank: now for now, rank, what in recorder.trace if what == "finished"}
    assert finished == pytest.approx(
        {rank: 8 / platform.throughput for rank, platform in enumerate(UNEVEN)}
    )


def test_workers_data_count_alike_whatever_their_speeds() -> None:
    # Near consensus, the models are where gradients cancel, weighted by how much each counts.
    algorithm = GoSGD(topology=complete(NUM_WORKERS), num_rounds=10**6, exchange_probability=1)
    simulator = make_world(algorithm, platforms=UNEVEN, lr=0.01)
    means = []
    for now in range(1000, 4000, 10):
        simulator.run(until=now)
        means.append(torch.stack([state.estimate for state in simulator.states]).mean(0))
    found, targets = torch.stack(means).mean(0), TARGETS[:NUM_WORKERS]
    speeds = torch.tensor([platform.throughput for platform in UNEVEN])
    by_speed = (speeds / speeds.sum()) @ targets
    alike = targets.mean(0)
    assert (found - alike).norm() < 0.1 * (by_speed - alike).norm()
