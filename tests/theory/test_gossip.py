"""Gossip against its theory: the mean stays, consensus comes at the spectral gap's rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.algorithms import MATCHINGS, NUM_ROUNDS, NUM_WORKERS, each_synchronous
from tests.worlds import INITIAL, TARGETS, final_params, make_world, mix_only

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.mixing import MetropolisHastings, Uniform, mixing_matrix, spectral_gap
from edgegossip.contract.protocol import Rank
from edgegossip.contract.rounds import RoundBased
from edgegossip.contract.topology import Topology, complete, random_regular, ring, star, torus
from edgegossip.sim.platform import Platform

GRAPHS = [ring(5), ring(8), star(6), torus(3, 4), random_regular(10, 3, seed=0)]


@each_synchronous
def test_mixing_keeps_the_mean(algorithm: RoundBased[Any]) -> None:
    after = mix_only(algorithm, INITIAL[:NUM_WORKERS])
    torch.testing.assert_close(after.mean(0), INITIAL[:NUM_WORKERS].mean(0))


def test_uniform_weights_on_a_star_do_not_keep_the_mean() -> None:
    # Only doubly stochastic mixing does: the middle pulls all others towards itself.
    algorithm = Gossip(topology=star(6), num_rounds=5, mixing=Uniform())
    after = mix_only(algorithm, INITIAL[:6])
    assert (after.mean(0) - INITIAL[:6].mean(0)).norm() > 0.1


@pytest.mark.parametrize("topology", GRAPHS, ids=repr)
def test_consensus_comes_at_the_rate_of_the_spectral_gap(topology: Topology) -> None:
    # From the second eigenvector of W, each round leaves |lambda_2| of the distance: no
    # other start does worse (Xiao & Boyd, 2004).
    matrix = mixing_matrix(topology, MetropolisHastings())
    eigenvalues, eigenvectors = torch.linalg.eigh(matrix)
    second = int(eigenvalues.abs().argsort()[-2])
    initial = eigenvectors[:, [second]].float()
    after = mix_only(Gossip(topology=topology, num_rounds=4), initial)
    rate = (consensus_distance(after) / consensus_distance(initial)) ** (1 / 4)
    assert rate == pytest.approx(1 - spectral_gap(matrix), rel=1e-4)


@pytest.mark.parametrize("topology", GRAPHS, ids=repr)
def test_no_start_contracts_slower_than_the_spectral_gap(topology: Topology) -> None:
    initial = INITIAL[: topology.num_workers]
    after = mix_only(Gossip(topology=topology, num_rounds=6), initial)
    bound = (1 - spectral_gap(mixing_matrix(topology, MetropolisHastings()))) ** 6
    assert consensus_distance(after) <= bound * consensus_distance(initial) * (1 + 1e-4)


@pytest.mark.parametrize("topology", [*GRAPHS, MATCHINGS], ids=repr)
def test_rounds_multiply_by_the_mixing_matrix_of_the_round(topology: Topology) -> None:
    initial = INITIAL[: topology.num_workers]
    expected = initial.double()
    for round in range(NUM_ROUNDS):
        expected = mixing_matrix(topology, MetropolisHastings(), round) @ expected
    after = mix_only(Gossip(topology=topology, num_rounds=NUM_ROUNDS), initial)
    torch.testing.assert_close(after, expected.float())


def test_complete_graph_agrees_after_one_round() -> None:
    after = mix_only(Gossip(topology=complete(6), num_rounds=1), INITIAL[:6])
    torch.testing.assert_close(after, INITIAL[:6].mean(0).expand(6, -1))


@pytest.mark.parametrize("local_steps", [1, 5])
def test_training_ends_where_the_fixed_point_of_the_round_lies(local_steps: int) -> None:
    # A round is x <- W (b + q (x - b)) with q = (1 - lr)^H, whose fixed point solves
    # (I - q W) x = (1 - q) W b: off the optimum for workers that disagree.
    topology, lr = ring(5), 0.2
    matrix = mixing_matrix(topology, MetropolisHastings())
    left = (1 - lr) ** local_steps
    targets = TARGETS[:5].double()
    expected = torch.linalg.solve(
        torch.eye(5, dtype=torch.float64) - left * matrix, (1 - left) * matrix @ targets
    )
    algorithm = Gossip(
        topology=topology, num_rounds=120 // local_steps, local_steps=local_steps
    )
    after = final_params(make_world(algorithm, lr=lr))
    torch.testing.assert_close(after, expected.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after.mean(0), TARGETS[:5].mean(0), atol=1e-4, rtol=1e-4)


def test_smaller_steps_agree_better() -> None:
    # The distance left at the fixed point is of the order of the step (Lian et al., 2017).
    algorithm = Gossip(topology=ring(5), num_rounds=100)
    distances = [
        consensus_distance(final_params(make_world(replace(algorithm, num_rounds=n), lr=lr)))
        for lr, n in ((0.2, 100), (0.02, 600))
    ]
    assert distances[1] < 0.2 * distances[0]


def test_slowest_worker_sets_the_pace() -> None:
    platforms = [Platform(throughput=1.0)] * 4 + [Platform(throughput=0.1)]
    simulator = make_world(Gossip(topology=complete(5), num_rounds=3), platforms=platforms)
    simulator.run()
    assert simulator.now == pytest.approx(30.0)


@pytest.mark.parametrize(("topology", "each"), [(ring(4), 2), (complete(4), 3)], ids=repr)
@pytest.mark.parametrize("dear", [range(4), [2]], ids=["all", "one"])
def test_a_round_takes_longer_by_what_its_messages_take(
    topology: Topology, each: int, dear: Sequence[Rank]
) -> None:
    # Each sends `each` messages and receives as many before it trains again. All wait for all,
    # so one machine on which messages take time delays everybody as much as four.
    algorithm, num_rounds, seconds = Gossip(topology=topology, num_rounds=6), 6, 0.125
    cheap = [Platform(throughput=1.0)] * 4
    costly = Platform(throughput=1.0, seconds_per_message=seconds)
    mixed = [costly if rank in dear else cheap[rank] for rank in range(4)]
    before, after = (make_world(algorithm, platforms=these) for these in (cheap, mixed))
    torch.testing.assert_close(final_params(after), final_params(before), rtol=0, atol=0)
    # The last round's messages come after the last training.
    assert after.now - before.now == (num_rounds - 1) * 2 * each * seconds
