"""The best model by validation on disturbed hosts: all come to their end, and know one best."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.end_agreement import ALL, KINDS, ONE_MEAN, Kind, measure
from tests.host_runs import Run
from tests.host_worlds import Disturbance, World
from tests.tiers import thorough
from tests.virtual_network import Wire

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.topology import complete
from edgegossip.real.best_model import BestState, best_state, with_best
from edgegossip.runs.best import KeepBest
from edgegossip.runs.final_average import FinalAverage

EPOCHS = EpochGossip(topology=complete(4), num_rounds=12)


def keeping(algorithm: Algorithm[Any], keep: KeepBest = KeepBest(rounds=2)) -> FinalAverage:
    topology = algorithm.traits.topology
    number = 5 if topology is None else topology.num_workers
    return FinalAverage(inner=with_best(algorithm, number, keep), num_workers=number)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL)
def test_disturbed_workers_come_to_the_end_that_they_have_without_it(
    name: str, kind: Kind
) -> None:
    for left in (2, 8):
        found = measure(ALL[name], 1, kind, left, keeping)
        # A server in reach of a minority ends with an error, with the best model or without.
        assert all("ServerLostError" in each for each in found.unfinished.values())
        assert found.unnamed == []
        if name not in ONE_MEAN and kind != "to the end":
            assert found.distance == 0


def world(*disturbances: Disturbance, **keep: Any) -> list[BestState]:  # noqa: ANN401
    """The workers' states at the end of a disturbed run in which the first mean is the best."""
    run = Run(
        World(
            seed=0,
            name="best",
            algorithm=keeping(EPOCHS, KeepBest(**keep)),
            step_seconds=(0.9, 1.0, 1.05, 1.1),
            start_at=(0.0,) * 4,
            wire=Wire(bandwidth=1e5),
            disturbances=disturbances,
            meet_seconds=5.0,
            checkpoint_seconds=10.0 if disturbances else math.inf,
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.host_runs.loss_of", lambda params: (float(params.norm()), {}))
        assert run.to_the_end()
    states = [best_state(run.processes[rank].host.state) for rank in range(4)]
    return [state for state in states if state is not None]


@thorough
@pytest.mark.parametrize("with_disk", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_workers_replacement_knows_the_best(victim: int, with_disk: bool) -> None:
    kill = Disturbance(kind="kill", at=17.0, ranks=(victim,), seconds=6.0, with_disk=with_disk)
    states = world(kill)
    assert len(states) == 4
    assert len({replace(state.record, check=0) for state in states}) == 1
    assert states[victim].record.best_check == 1
    assert all(len(state.best) and state.best.equal(states[1].best) for state in states)


@thorough
def test_hosts_stop_early_in_the_same_round() -> None:
    states = world(patience=3)
    assert [state.round for state in states] == [5] * 4


@thorough
def test_stopped_and_resumed_workers_know_the_best() -> None:
    stop = Disturbance(kind="stop all", at=17.0, ranks=(), seconds=4.0)
    states, whole = world(stop), world()
    assert states[0].record.best_check == 1
    assert all(state.best.equal(whole[0].best) for state in states)
