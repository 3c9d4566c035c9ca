"""The four systems written to design the contract run in the simulator, with lost messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.examples.contract_systems.adsp import ADSP
from tests.examples.contract_systems.edge_gossip import EdgeGossip
from tests.examples.contract_systems.sparse_push import SparsePush
from tests.examples.contract_systems.stages import Stages
from tests.examples.contract_worlds import (
    TARGETS,
    EpochAllReduce,
    Identity,
    Recorder,
    ShardTrainer,
    StageTrainer,
    TopK,
    simulate,
)
from tests.tiers import thorough
from torch import Tensor

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.protocol import Event, Message, Rank, Seconds, TimerFired
from edgegossip.contract.rounds import RoundBased
from edgegossip.contract.topology import (
    Topology,
    complete,
    directed_exponential,
    one_peer_exponential,
)
from edgegossip.sim.fault import Crash, Drop, Fault, Recover
from edgegossip.sim.platform import uneven
from edgegossip.sim.simulator import Simulator
from edgegossip.training.quadratic import QuadraticTrainer

# 1. ADSP.

# As shards of shuffled data are: nearly alike.
SIMILAR_TARGETS = TARGETS[0] + 0.05 * TARGETS


OPTIMUM = SIMILAR_TARGETS[1:5].mean(0)


def adsp_world(*script: Fault, observer: Recorder | None = None) -> Simulator[Any]:
    """A server and four workers, of which the fastest is four times as fast as the slowest."""
    return simulate(
        ADSP(num_workers=4, window=20.0, epoch=200.0, duration=400.0, min_interval=1.0),
        (1.0, 10.0, 8.0, 3.0, 2.5),
        script,
        lambda rank: QuadraticTrainer(SIMILAR_TARGETS[rank], lr=0.005),
        observer=observer,
        evaluate=lambda params: (0.5 * float((params - OPTIMUM).square().sum()), {}),
    )


@thorough
@pytest.mark.parametrize("drop_probability", [0.0, 0.2])
def test_adsp_ends_and_brings_the_server_to_the_optimum(drop_probability: float) -> None:
    simulator = adsp_world(Drop(probability=drop_probability))
    assert simulator.run()
    server, *workers = simulator.states
    num_commits = [worker.round for worker in workers]
    assert max(num_commits) <= 1.2 * min(num_commits)
    assert min(num_commits) > 1.5 * server.round  # the search went beyond one a window
    (estimate,) = simulator.estimates().values()
    assert (estimate - OPTIMUM).norm() < 0.05 * OPTIMUM.norm()


@thorough
def test_adsp_sends_each_update_once_though_replies_come_in_the_middle_of_a_step() -> None:
    recorder = Recorder()
    simulator = adsp_world(observer=recorder)
    assert simulator.run()
    server, *workers = simulator.states
    assert list(server.num_commits.values()) == [worker.round for worker in workers]
    torch.testing.assert_close(server.params, torch.stack(recorder.deltas).sum(0) / 4)


def test_adsp_outlives_the_crash_of_a_worker_that_comes_back() -> None:
    simulator = adsp_world(Crash(at=100.0, rank=2), Recover(at=200.0, rank=2))
    assert not simulator.run(until=201.0)
    server, returned = simulator.states[0], simulator.states[2]
    assert returned.round == 1  # it commits at once, to be sent the server's parameters
    assert (returned.params - server.params).norm() < 0.05 * server.params.norm()
    assert simulator.run()
    assert (server.params - OPTIMUM).norm() < 0.05 * OPTIMUM.norm()


# 2. Sparse-Push.

ONE_PEER = one_peer_exponential(8)
UNEVEN_SPEEDS = (1.0, 0.9, 0.5, 0.3, 1.0, 1.0, 0.8, 0.7)


def mixing_world(algorithm: Algorithm[Any], *script: Fault, seed: int = 0) -> Simulator[Any]:
    """Eight workers that start at their targets and stay there but for mixing."""
    simulator = simulate(
        algorithm,
        UNEVEN_SPEEDS,
        script,
        lambda rank: QuadraticTrainer(TARGETS[rank], lr=0),
        seed=seed,
    )
    for state, target in zip(simulator.states, TARGETS, strict=True):
        state.params = target
    return simulator


def sparse_push(
    kind: type[Any], num_rounds: int, topology: Topology = ONE_PEER
) -> Algorithm[Any]:
    algorithm: Algorithm[Any] = kind(
        topology=topology,
        compressor=Identity(),
        consensus_step=1.0,
        num_rounds=num_rounds,
        timeout=0.5,
    )
    return algorithm


def total_mass(states: Sequence[Any]) -> Tensor:
    """Numerators and weight, of workers and of messages not yet merged, [num_params + 1]."""
    masses = [
        torch.cat([state.params, torch.tensor([state.weight], dtype=torch.float64)])
        for state in states
    ]
    masses += [
        mass_of(message)
        for state in states
        for (receiver, number), message in state.unacknowledged.items()
        if (state.rank, number) not in states[receiver].merged
    ]
    return torch.stack(masses).sum(0)


def mass_of(message: Message) -> Tensor:
    mass, numbers = message.payload, message.numbers
    compressor = TopK(2) if "indices" in mass else Identity()
    x = mass["params"] if "params" in mass else compressor.decompress(mass)
    weight = torch.tensor([numbers["weight"]], dtype=torch.float64)
    return torch.cat([numbers["share"] * x, weight])


@thorough
@pytest.mark.parametrize(
    ("compressor", "consensus_step", "num_rounds"),
    [(Identity(), 1.0, 40), (TopK(2), 0.2, 80)],
    ids=["dense", "sparse"],
)
def test_sparse_push_conserves_mass_though_a_third_of_the_messages_is_lost(
    compressor: Identity | TopK, consensus_step: float, num_rounds: int
) -> None:
    algorithm = SparsePush(
        topology=ONE_PEER,
        compressor=compressor,
        consensus_step=consensus_step,
        num_rounds=num_rounds,
        timeout=0.5,
    )
    simulator = mixing_world(algorithm, Drop(probability=0.3))
    expected = torch.cat([TARGETS.sum(0), torch.tensor([8.0], dtype=torch.float64)])
    until = 0.0
    while not simulator.run(until):
        torch.testing.assert_close(total_mass(simulator.states), expected, rtol=0, atol=1e-9)
        until += num_rounds / 20
    # At the end nothing is under way: every share was merged and acknowledged.
    assert not any(state.unacknowledged for state in simulator.states)
    assert sum(state.weight for state in simulator.states) == pytest.approx(8)
    estimates = torch.stack([*simulator.estimates().values()])
    start = consensus_distance(TARGETS)
    assert consensus_distance(estimates) < 0.2 * start
    assert (estimates.mean(0) - TARGETS.mean(0)).norm() < 0.2 * start


def test_taking_back_instead_of_sending_again_would_double_mass() -> None:
    sending_again: Any = SparsePush

    class TakingBack(sending_again):  # type: ignore[misc]
        def handle(self, state: Any, event: Event, now: Seconds) -> Any:  # noqa: ANN401
            if not isinstance(event, TimerFired):
                return super().handle(state, event, now)
            for message in state.unacknowledged.values():
                self.merge(state, message)
            state.unacknowledged.clear()
            return self.finish_if_done(state)

    simulator = mixing_world(sparse_push(TakingBack, 60), Drop(probability=0.3))
    assert simulator.run()
    assert sum(state.weight for state in simulator.states) > 100


def test_sparse_push_outlives_the_crash_of_a_worker_that_comes_back() -> None:
    # To all neighbors in every round, so that each number of its former life comes again.
    num_rounds = 40
    simulator = simulate(
        sparse_push(SparsePush, num_rounds, directed_exponential(8)),
        [1.0] * 8,
        (Drop(probability=0.2), Crash(at=10.5, rank=2), Recover(at=20.5, rank=2)),
        lambda rank: QuadraticTrainer(TARGETS[rank], lr=0.02),
    )
    assert not simulator.run(until=15.0)
    # What was for worker 2 has been taken back.
    others = [state for state in simulator.states if state.rank != 2]
    assert 2 not in {receiver for state in others for receiver, _ in state.unacknowledged}
    assert not simulator.run(until=25.0)
    weight = total_mass(simulator.states)[-1]
    assert simulator.run()
    assert [state.round for state in simulator.states] == [num_rounds] * 8
    assert sum(state.weight for state in simulator.states) == pytest.approx(float(weight))
    errors = torch.stack([*simulator.estimates().values()]) - TARGETS.mean(0)
    assert errors.norm(dim=1).max() < 0.5 * TARGETS.mean(0).norm()


def test_sparse_push_finishes_when_the_last_receiver_is_lost() -> None:
    # All that is sent to worker 3 is lost, and in the end so is worker 3.
    script = (Drop(probability=1.0, receiver=3), Crash(at=60.0, rank=3))
    simulator = mixing_world(sparse_push(SparsePush, 10), *script)
    assert not simulator.run(until=59.0)
    assert simulator.run()
    assert simulator.now == pytest.approx(61.0)  # noticed after a second
    others = [state for state in simulator.states if state.rank != 3]
    assert not any(state.unacknowledged for state in others)


# 3. EdgeGossip.

NUM_EPOCHS = 8
SHARD_SIZES = (1000, 1000, 800, 600)
THROUGHPUTS = [platform.throughput for platform in uneven(4, throughput=100.0)]
# The fastest takes 10 s for its data, the slowest 24 s.
EPOCH_WISE: dict[str, RoundBased[Any]] = {
    "epoch-gossip": EpochGossip(topology=complete(4), num_rounds=NUM_EPOCHS, timeout=60.0),
    "all-reduce": EpochAllReduce(topology=complete(4), num_rounds=NUM_EPOCHS, timeout=60.0),
}
each_inner = pytest.mark.parametrize("inner", EPOCH_WISE.values(), ids=EPOCH_WISE)


def make_sharded(rank: Rank) -> ShardTrainer:
    return ShardTrainer(TARGETS[rank], SHARD_SIZES[rank])


def run_epochs(algorithm: Algorithm[Any], *script: Fault) -> tuple[Simulator[Any], Recorder]:
    recorder = Recorder()
    simulator = simulate(
        algorithm,
        THROUGHPUTS,
        script,
        make_sharded,
        observer=recorder,
    )
    assert simulator.run()
    return simulator, recorder


@each_inner
def test_edge_gossip_lets_epochs_end_together_and_is_faster(inner: RoundBased[Any]) -> None:
    simulator, recorder = run_epochs(EdgeGossip(inner=inner, num_workers=4, timeout=5.0))
    alone, _ = run_epochs(inner)
    assert simulator.now < 0.5 * alone.now
    ends = [end for _, _, end in recorder.trained_at]
    assert len(ends) == 4 * NUM_EPOCHS
    for k in range(0, len(ends), 4):
        assert max(ends[k : k + 4]) - min(ends[k : k + 4]) < 0.1  # a batch takes up to 0.2 s
    # The inner algorithm does its own work: it averages exactly.
    assert consensus_distance(torch.stack([*simulator.estimates().values()])) < 1e-9


@each_inner
def test_edge_gossip_gets_over_lost_forecasts_and_a_lost_worker(inner: RoundBased[Any]) -> None:
    simulator, recorder = run_epochs(
        EdgeGossip(inner=inner, num_workers=4, timeout=5.0),
        Drop(probability=0.1),
        Crash(at=25.0, rank=3),
        Recover(at=50.0, rank=3),
    )
    rounds = [state.round for state in simulator.states]
    assert rounds == [NUM_EPOCHS] * 4
    # Once the returned worker has heard of the fastest, nobody trains longer than that.
    later = [(rank, end - start) for rank, start, end in recorder.trained_at if start > 60.0]
    assert {rank for rank, _ in later} == {0, 1, 2, 3}
    assert max(seconds for _, seconds in later) < 10.2


def test_edge_gossip_sends_what_its_schema_says() -> None:
    algorithm = EdgeGossip(inner=EPOCH_WISE["all-reduce"], num_workers=4, timeout=5.0)
    script = (Crash(at=25.0, rank=3), Recover(at=50.0, rank=3))
    # Without an observer of its own, a world checks what is sent.
    assert simulate(algorithm, THROUGHPUTS, script, make_sharded).run()


# 4. Stages.

NUM_BATCHES = 80


def run_stages(*script: Fault) -> tuple[Simulator[Any], list[float]]:
    """A run, and the last stage's loss after each batch."""
    losses: list[float] = []
    trainers = [StageTrainer(rank, losses) for rank in range(3)]
    algorithm = Stages(num_stages=3, num_rounds=NUM_BATCHES, depth=4, timeout=5.0)
    simulator = simulate(
        algorithm,
        (100.0, 70.0, 200.0),
        script,
        trainers.__getitem__,
        initial_params=lambda rank: trainers[rank].params,
    )
    assert simulator.run()
    assert not any(state.jobs or state.job for state in simulator.states)
    return simulator, losses


@thorough
def test_stages_learn_from_gradients_that_they_guess() -> None:
    simulator, losses = run_stages()
    assert [state.round for state in simulator.states] == [NUM_BATCHES] * 3
    # Where no gradient comes down, guesses stay at zero, and only the last stage learns.
    only_up = [Drop(probability=1.0, sender=1, receiver=0), Drop(probability=1.0, sender=2)]
    _, losses_of_last = run_stages(*only_up)
    assert sum(losses[-20:]) < 0.5 * sum(losses_of_last[-20:])


def test_stages_get_over_lost_messages() -> None:
    simulator, losses = run_stages(Drop(probability=0.1))
    rounds = [state.round for state in simulator.states]
    assert rounds[0] == NUM_BATCHES > rounds[1] > rounds[2] == len(losses)
    assert sum(losses[-20:]) < 0.3 * sum(losses[:20])
