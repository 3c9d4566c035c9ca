"""CHOCO: replicas are equal at both ends, the mean stays, and compression loses nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.round_worker import sends, trained
from tests.tiers import thorough
from tests.worlds import INITIAL, TARGETS, UNEVEN, final_params, make_world, mix_only
from torch import Tensor

from edgegossip.algorithms.gossip.choco_gossip import ChocoGossip, ChocoState
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.compression.compressor import Compressor, Identity
from edgegossip.compression.sparse import RandomK, TopK
from edgegossip.compression.values import Quantize, Sign
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.mixing import MetropolisHastings, mixing_matrix
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Message,
    Received,
    Started,
    TimerFired,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.randomness import generator
from edgegossip.contract.topology import (
    Topology,
    complete,
    directed_ring,
    from_edges_by_round,
    ring,
    star,
)
from edgegossip.sim.fault import Crash, Delay, Drop, Faults, Partition, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.simulator import Simulator

START = INITIAL[:NUM_WORKERS]
COMPRESSORS: dict[str, tuple[Compressor, float | None]] = {
    "identity": (Identity(), None),
    "top-k": (TopK(keep_ratio=0.3), None),
    "random-k": (RandomK(keep_ratio=0.3), None),
    "quantize": (Quantize(bits=4), 0.5),
    "sign": (Sign(), 0.4),
}
each_compressor = pytest.mark.parametrize(
    ("compressor", "step"), COMPRESSORS.values(), ids=COMPRESSORS
)


def choco(topology: Topology | None = None, **arguments: Any) -> ChocoGossip:  # noqa: ANN401
    defaults: dict[str, Any] = {"num_rounds": 6, "compressor": TopK(keep_ratio=0.3)}
    return ChocoGossip(topology=topology or ring(NUM_WORKERS), **defaults | arguments)


# Theory.


@pytest.mark.parametrize("topology", [ring(5), star(5), complete(5)], ids=repr)
def test_with_identity_and_step_1_it_is_gossip(topology: Topology) -> None:
    arguments: dict[str, Any] = {"topology": topology, "num_rounds": 8, "local_steps": 2}
    algorithm = ChocoGossip(compressor=Identity(), **arguments)
    assert algorithm.step(num_params=7) == 1
    one = final_params(make_world(algorithm, initial=START, platforms=UNEVEN))
    other = final_params(make_world(Gossip(**arguments), initial=START, platforms=UNEVEN))
    torch.testing.assert_close(one, other)


def by_the_paper(algorithm: ChocoGossip, initial: Tensor, lr: float = 0.0) -> Tensor:
    """Algorithm 2, all workers at once: x, hat x and q are [num_workers, num_params]."""
    matrix = mixing_matrix(algorithm.topology, MetropolisHastings()).float()
    x, x_hat = initial.clone(), torch.zeros_like(initial)
    num_params = x.shape[1]
    for round in range(algorithm.num_rounds):
        if lr:
            x = x - lr * (x - TARGETS[: len(x)])
        for rank in range(len(x)):
            key = (algorithm.seed, rank, "increment", round)
            q = algorithm.compressor.compress(x[rank] - x_hat[rank], *key)
            x_hat[rank] += algorithm.compressor.decompress(q, num_params)
        x = x + algorithm.step(num_params) * (matrix @ x_hat - x_hat)
    return x


@each_compressor
def test_rounds_are_those_of_the_paper(compressor: Compressor, step: float | None) -> None:
    algorithm = choco(star(5), compressor=compressor, consensus_step=step, seed=3)
    after = final_params(make_world(algorithm, initial=START, lr=0.2, platforms=UNEVEN))
    torch.testing.assert_close(after, by_the_paper(algorithm, START, lr=0.2))


@each_compressor
def test_mixing_keeps_the_mean_however_it_compresses(
    compressor: Compressor, step: float | None
) -> None:
    algorithm = choco(star(5), compressor=compressor, consensus_step=step, num_rounds=20)
    after = mix_only(algorithm, START)
    torch.testing.assert_close(after.mean(0), START.mean(0))
    assert not torch.allclose(after, START)


@each_compressor
def test_mixing_alone_leads_to_agreement(compressor: Compressor, step: float | None) -> None:
    algorithm = choco(complete(5), compressor=compressor, consensus_step=step, num_rounds=40)
    after = mix_only(algorithm, START)
    assert consensus_distance(after) < 0.1 * consensus_distance(START)


@thorough
@pytest.mark.parametrize("topology", [ring(5), complete(5)], ids=repr)
def test_step_is_the_contraction_and_larger_ones_diverge(topology: Topology) -> None:
    initial = torch.randn(5, 50, generator=generator(0, "start"))
    algorithm = choco(topology, compressor=RandomK(keep_ratio=0.1), num_rounds=200)
    assert algorithm.step(50) == pytest.approx(0.1)
    before = consensus_distance(initial)
    assert consensus_distance(by_the_paper(algorithm, initial)) < 0.4 * before
    too_large = replace(algorithm, consensus_step=0.4)
    assert consensus_distance(by_the_paper(too_large, initial)) > before


def test_step_that_will_diverge_is_warned_of_once() -> None:
    algorithm = choco(compressor=TopK(keep_ratio=0.01), consensus_step=0.3)
    with pytest.warns(UserWarning, match=r"consensus_step=0.3 is 30 times what suits"):
        algorithm.init(0, torch.zeros(1000))
    algorithm.init(1, torch.zeros(1000))


@thorough
def test_training_brings_the_mean_to_the_optimum_of_all() -> None:
    algorithm = choco(num_rounds=60, local_steps=2)
    after = final_params(make_world(algorithm, lr=0.1))
    optimum = TARGETS[:NUM_WORKERS].mean(0)
    torch.testing.assert_close(after.mean(0), optimum, atol=1e-4, rtol=1e-4)


# Replicas.


def require_equal_replicas(simulator: Simulator[Any], num_rounds: int) -> int:
    """Fail if a replica that is up to date is not what the neighbor has; count those."""
    states: list[ChocoState] = simulator.states
    count = 0
    for state in states:
        for j, replica in state.replicas.items():
            if replica.round == num_rounds:
                assert torch.equal(replica.params, states[j].replica)
                count += 1
    return count


FAULTS: dict[str, Faults] = {
    "none": Faults(),
    "late": Faults(script=(Delay(seconds=4.0),)),
    "crash": Faults(script=(Crash(at=3.5, rank=1), Recover(at=7.25, rank=1))),
    "short-crash": Faults(script=(Crash(at=3.5, rank=1), Recover(at=3.5, rank=1))),
    "common-crash": Faults(
        script=tuple(
            fault
            for rank in range(NUM_WORKERS)
            for fault in (Crash(at=3.5, rank=rank), Recover(at=5.0 + rank, rank=rank))
        )
    ),
    "partition": Faults(script=(Partition(start=4.2, end=9.0, group=(1, 2)),)),
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_both_ends_of_an_edge_have_the_same_replica_bit_by_bit(faults: Faults) -> None:
    algorithm = choco(num_rounds=25)
    links = Links(default=Link(latency=0.2, bandwidth=1e3))
    simulator = make_world(algorithm, platforms=UNEVEN, links=links, faults=faults)
    simulator.run()
    assert require_equal_replicas(simulator, 25) == 2 * NUM_WORKERS


@thorough
@pytest.mark.parametrize("probability", [0.05, 0.3])
def test_lost_messages_are_made_good(probability: float) -> None:
    faults = Faults(script=(Drop(probability=probability),), seed=2)
    algorithm = choco(num_rounds=60, timeout=0.5)
    simulator = make_world(algorithm, faults=faults)
    after = final_params(simulator)
    # Of the last round's messages some are missing, and nobody asks for them.
    assert require_equal_replicas(simulator, 60) >= NUM_WORKERS
    for state in simulator.states:
        assert min(replica.round for replica in state.replicas.values()) > 50
    assert consensus_distance(after) < consensus_distance(TARGETS[:NUM_WORKERS])


# One worker, by hand. Worker 0 of a ring of 4 hears from 1 and 3.

HAND = ChocoGossip(
    topology=ring(4), num_rounds=9, compressor=Identity(), consensus_step=0.3, timeout=10.0
)


class Worker:
    """Worker 0, and what it answers."""

    def __init__(self) -> None:
        self.state = HAND.init(0, torch.zeros(2))

    def on(self, event: Event) -> list[Effect]:
        return HAND.handle(self.state, event, now=0.0)

    def trains_to(self, value: float) -> list[Effect]:
        return self.on(trained(value, self.state.params))

    def hears(self, sender: int, round: int, value: float) -> list[Effect]:
        payload = {"values": torch.full((2,), value)}
        return self.on(Received(sender, Message("params", round, payload)))

    def catches_up(self, sender: int, round: int, value: float) -> list[Effect]:
        payload = {"params": torch.full((2,), value)}
        return self.on(Received(sender, Message("catch-up", round, payload)))

    def missed_by(self, sender: int, round: int) -> list[Effect]:
        return self.on(Received(sender, Message("missed", round)))

    @property
    def value(self) -> float:
        return float(self.state.params[0])

    def knows_of(self, rank: int) -> float:
        return float(self.state.replicas[rank].params[0])


def start() -> Worker:
    worker = Worker()
    worker.on(Started())
    return worker


def test_increments_add_up_and_pull_by_weight_and_step() -> None:
    worker = start()
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=9.0)
    worker.hears(3, round=0, value=6.0)
    assert worker.value == pytest.approx(3 + 0.3 * (6 + 3) / 3)
    assert (worker.knows_of(1), worker.knows_of(3)) == (9.0, 6.0)
    worker.hears(1, round=1, value=-2.0)
    assert worker.knows_of(1) == 9.0  # that is for the next round
    worker.trains_to(3.0)
    worker.hears(3, round=1, value=0.0)
    assert worker.knows_of(1) == 7.0


def test_one_who_is_no_neighbor_is_ignored() -> None:
    worker = start()
    worker.trains_to(3.0)
    assert worker.hears(2, round=0, value=1000.0) == []
    assert worker.catches_up(2, round=5, value=1000.0) == []
    assert worker.missed_by(2, round=0) == []
    worker.hears(1, round=0, value=3.0)
    worker.hears(3, round=0, value=3.0)
    assert worker.value == 3.0


def test_what_did_not_arrive_is_asked_for_and_does_not_count() -> None:
    worker = start()
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=9.0)
    effects = worker.on(TimerFired("round"))
    assert worker.value == pytest.approx(3 + 0.3 * 6 / 3)
    assert sends(effects) == [(3, "missed", 0)]


def test_whole_replica_closes_the_gap() -> None:
    worker = start()
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=9.0)
    worker.on(TimerFired("round"))
    worker.hears(3, round=1, value=1.0)
    worker.catches_up(3, round=1, value=6.0)
    worker.trains_to(3.0)
    worker.hears(1, round=1, value=0.0)
    assert worker.knows_of(3) == 7.0
    assert worker.value == pytest.approx(3 + 0.3 * (6 + 4) / 3)


def test_late_increment_closes_the_gap_too() -> None:
    worker = start()
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=9.0)
    worker.on(TimerFired("round"))
    worker.hears(3, round=0, value=6.0)
    worker.hears(3, round=1, value=1.0)
    worker.trains_to(3.0)
    worker.hears(1, round=1, value=0.0)
    assert worker.knows_of(3) == 7.0
    # The replica that it had asked for tells nothing new.
    worker.catches_up(3, round=1, value=6.0)
    assert worker.knows_of(3) == 7.0


def test_gap_that_stays_is_asked_for_again() -> None:
    worker = start()
    worker.trains_to(3.0)
    worker.hears(1, round=0, value=9.0)
    worker.on(TimerFired("round"))
    worker.hears(3, round=1, value=1.0)
    worker.trains_to(3.0)
    assert (3, "missed", 1) in sends(worker.hears(1, round=1, value=0.0))


def test_worker_that_has_not_sent_it_yet_does_not_answer() -> None:
    worker = start()
    assert worker.missed_by(3, round=0) == []
    worker.trains_to(3.0)
    [answer] = worker.missed_by(3, round=0)
    assert sends([answer]) == [(3, "catch-up", 1)]


def test_lost_neighbor_does_not_count_until_it_says_where_it_begins() -> None:
    worker = start()
    for round in range(2):
        worker.trains_to(3.0)
        worker.hears(1, round, value=3.0 * (1 - round))
        worker.hears(3, round, value=6.0 * (1 - round))
    worker.on(WorkerLost(3))
    worker.on(WorkerJoined(3, has_restarted=True))
    worker.trains_to(3.0)
    worker.hears(1, round=2, value=0.0)
    assert worker.state.round == 3
    assert worker.value == 3.0
    # It begins with a replica of its own, in an earlier round than it was in when it was lost.
    worker.catches_up(3, round=1, value=-4.0)
    for round in range(1, 4):
        worker.hears(3, round, value=1.0)
    worker.trains_to(3.0)
    worker.hears(1, round=3, value=0.0)
    assert worker.knows_of(3) == -1.0
    assert worker.value == pytest.approx(3 - 0.3 * 4 / 3)


def test_worker_that_comes_back_takes_over_a_replica_as_its_own() -> None:
    worker = Worker()
    worker.on(Started(has_rejoined=True))
    worker.catches_up(3, round=5, value=50.0)
    effects = worker.catches_up(1, round=4, value=40.0)
    assert worker.value == 50.0
    assert sends(effects)[:2] == [(1, "catch-up", 5), (3, "catch-up", 5)]
    assert torch.equal(worker.state.replica, worker.state.params)
    # The neighbor that is behind says all that it has yet to say.
    worker.trains_to(50.0)
    worker.hears(1, round=4, value=5.0)
    worker.hears(3, round=5, value=0.0)
    worker.hears(1, round=5, value=2.0)
    assert worker.knows_of(1) == 47.0
    assert worker.value == pytest.approx(50 - 0.3 * 3 / 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"topology": from_edges_by_round(4, [[(0, 1), (2, 3)], [(1, 2)]])},
            "ChocoGossip needs a topology that never changes, got .* of period 2",
        ),
        ({"topology": directed_ring(4)}, "ChocoGossip needs an undirected topology"),
        ({"consensus_step": 0.0}, r"consensus_step must be in \(0, 1\] or None, got 0.0"),
        ({"consensus_step": 1.5}, r"consensus_step must be in \(0, 1\] or None, got 1.5"),
        ({"local_steps": 0}, "local_steps must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChocoGossip(**{"topology": ring(4), "num_rounds": 1, **arguments})
