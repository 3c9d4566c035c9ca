"""Workers that are restarted while they wait for the others' final models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.host_runs import Run
from tests.host_worlds import Disturbance, World
from tests.virtual_network import Wire

from edgegossip.algorithms.gossip.adpsgd import ADPSGD
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.server.methods import ASP
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.topology import complete
from edgegossip.runs.final_average import FinalAverage

PEERS = complete(3)
ALGORITHMS: list[Algorithm[Any]] = [
    GoSGD(topology=PEERS, num_rounds=30, exchange_probability=0.3),
    ADPSGD(topology=PEERS, num_rounds=30),
    ASP(num_workers=2, num_rounds=30),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("ends_at", [math.inf, 3600.0])
def test_one_that_had_ended_neither_trains_again_nor_changes_the_mean(
    algorithm: Algorithm[Any], ends_at: Seconds
) -> None:
    # Worker 1 ends after some 3 s, is killed at 10 s, and comes back; worker 2 takes a minute.
    world = World(
        seed=1,
        name="returns",
        algorithm=FinalAverage(inner=algorithm, num_workers=3, ends_at=ends_at),
        step_seconds=(0.1, 0.1, 2.0),
        start_at=(0.0,) * 3,
        wire=Wire(),
        disturbances=(Disturbance(kind="kill", at=10.0, ranks=(1,), seconds=10.0),),
        meet_seconds=20.0,
        checkpoint_seconds=1.0,
    )
    run = Run(world)
    assert run.to_the_end()
    assert len(run.starts) == 4
    assert max(run.watcher.trained_at[1]) < 10.0
    estimates = [estimate(run, rank) for rank in range(3)]
    assert all(torch.equal(each, estimates[0]) for each in estimates[1:])


def estimate(run: Run, rank: Rank) -> torch.Tensor:
    process = run.processes[rank]
    assert process.reason == "finished"
    found: torch.Tensor = process.host.state.estimate
    return found
