"""Push-sum against its theory: sums stay, estimates tend to their quotient, on any graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.largest import Largest
from tests.tiers import first, thorough
from tests.worlds import (
    INITIAL,
    NUM_PARAMS,
    TARGETS,
    UNEVEN,
    Watched,
    final_params,
    make_world,
    mix_only as without_training,
)
from torch import Tensor

from edgegossip.algorithms.push_sum.difference_push import DifferencePush
from edgegossip.algorithms.push_sum.push_sum import PushSum
from edgegossip.algorithms.push_sum.skew_compensated_sparse_push import (
    SkewCompensatedSparsePush,
)
from edgegossip.algorithms.push_sum.sparse_push import SparsePush
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.compression.compressor import Identity
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.mixing import ColumnStochastic, mixing_matrix
from edgegossip.contract.protocol import Event, Seconds, WorkerState
from edgegossip.contract.topology import (
    Topology,
    directed_exponential,
    directed_ring,
    from_edges_by_round,
    intermittent,
    one_peer_exponential,
    random_one_peer,
    star,
)
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform

START = INITIAL[:8]
MEAN = START.mean(0)
RING = directed_ring(8)
# Degrees differ, so that weights do, and change from round to round for ever.
IRREGULAR = from_edges_by_round(
    8,
    [[(i, (i + 1) % 8) for i in range(8)] + [(0, 3), (0, 5)], [(7, 2), (3, 1), (1, 6)]],
    directed=True,
)
GRAPHS = [
    RING,
    one_peer_exponential(8),
    directed_exponential(8),
    star(8),
    IRREGULAR,
    random_one_peer(8, period=5, seed=0),
    intermittent(directed_ring(8), availability=0.6, period=4, seed=0),
]
each_graph = pytest.mark.parametrize("topology", GRAPHS, ids=repr)


def push(topology: Topology, num_rounds: int, **changes: Any) -> StochasticGradientPush:  # noqa: ANN401
    return StochasticGradientPush(topology=topology, num_rounds=num_rounds, **changes)


def trained(algorithm: PushSum[Any], **arguments: Any) -> Tensor:  # noqa: ANN401
    """Where quadratic workers of different speeds end, [8, num_params]."""
    platforms = [*UNEVEN, *UNEVEN][:8]
    return final_params(make_world(algorithm, platforms=platforms, **arguments))


# Averaging.


@each_graph
def test_estimates_tend_to_the_mean_of_the_start(topology: Topology) -> None:
    after = without_training(push(topology, 100), START)
    torch.testing.assert_close(after, MEAN.expand(8, -1), atol=1e-2, rtol=1e-2)


@each_graph
def test_rounds_multiply_numerators_and_weights_by_the_mixing_matrix(
    topology: Topology,
) -> None:
    numerators, weights = START.double(), torch.ones(8, 1, dtype=torch.float64)
    for round in range(5):
        matrix = mixing_matrix(topology, ColumnStochastic(), round)
        numerators, weights = matrix @ numerators, matrix @ weights
    after = without_training(push(topology, 5), START)
    torch.testing.assert_close(after, (numerators / weights).float())


def test_one_peer_exponential_averages_exactly_in_a_period() -> None:
    after = without_training(push(one_peer_exponential(8), 3), START)
    torch.testing.assert_close(after, MEAN.expand(8, -1))


def test_consensus_step_mixes_by_so_much() -> None:
    gamma = 0.3
    expected = START.double()
    lazy = (1 - gamma) * torch.eye(8) + gamma * mixing_matrix(RING, ColumnStochastic())
    for _ in range(4):
        expected = lazy @ expected
    algorithm = SparsePush(
        topology=RING, num_rounds=4, compressor=Identity(), consensus_step=gamma
    )
    torch.testing.assert_close(without_training(algorithm, START), expected.float())


# How they hang together.


@each_graph
def test_sparse_push_that_leaves_nothing_out_is_sgp_to_the_last_bit(topology: Topology) -> None:
    sparse = SparsePush(topology=topology, num_rounds=9, compressor=Identity(), local_steps=2)
    assert torch.equal(trained(sparse), trained(push(topology, 9, local_steps=2)))


@each_graph
def test_difference_push_that_leaves_nothing_out_is_sgp(topology: Topology) -> None:
    difference = DifferencePush(topology=topology, num_rounds=9, compressor=Identity())
    expected = trained(push(topology, 9))
    torch.testing.assert_close(trained(difference), expected, atol=1e-5, rtol=1e-5)


def test_final_rounds_are_sgp_without_training() -> None:
    skew = SkewCompensatedSparsePush(
        topology=IRREGULAR, num_rounds=5, compressor=Identity(), compensation_rounds=4
    )
    final = DifferencePush(
        topology=IRREGULAR, num_rounds=5, compressor=Identity(), final_rounds=4
    )
    weights: dict[int, float] = {}

    def note(state: WorkerState, event: Event, now: Seconds) -> None:
        weights[state.rank] = state.weight  # type: ignore[attr-defined]

    expected = trained(push(IRREGULAR, 5))
    _ = trained(Watched(push(IRREGULAR, 5), after=note))  # type: ignore[arg-type]
    numerators = torch.stack([expected[i].double() * weights[i] for i in range(8)])
    sums = torch.tensor([[weights[i]] for i in range(8)], dtype=torch.float64)
    for round in range(5, 9):
        matrix = mixing_matrix(IRREGULAR, ColumnStochastic(), round)
        numerators, sums = matrix @ numerators, matrix @ sums
    for algorithm in (skew, final):
        found = trained(algorithm)
        torch.testing.assert_close(found, (numerators / sums).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("topology", [RING, IRREGULAR], ids=repr)
def test_acknowledging_changes_no_result_where_nothing_is_lost(topology: Topology) -> None:
    links = Links(default=Link(latency=0.2, bandwidth=3e3))
    for algorithm in (
        SparsePush(topology=topology, num_rounds=9, compressor=Largest(2)),
        DifferencePush(topology=topology, num_rounds=9, compressor=Largest(2)),
    ):
        silent = trained(algorithm, links=links)
        assert torch.equal(trained(replace(algorithm, resend_after=0.3), links=links), silent)


# Compression.


@thorough
@pytest.mark.parametrize(
    "topology", first(1, [one_peer_exponential(8), star(8), IRREGULAR]), ids=repr
)
def test_difference_push_reaches_the_mean_though_it_sends_little(topology: Topology) -> None:
    algorithm = DifferencePush(
        topology=topology, num_rounds=200, compressor=Largest(2), consensus_step=0.4
    )
    after = without_training(algorithm, START)
    torch.testing.assert_close(after, MEAN.expand(8, -1), atol=1e-3, rtol=1e-3)


def test_sparse_push_keeps_the_sum_but_leaves_workers_apart() -> None:
    algorithm = SparsePush(topology=RING, num_rounds=150, compressor=Largest(2))
    after = without_training(algorithm, START)
    torch.testing.assert_close(after.mean(0), MEAN, atol=1e-4, rtol=1e-4)
    distance = consensus_distance(after) / consensus_distance(START)
    assert 0.01 < distance < 0.5


@thorough
def test_compensation_brings_them_together() -> None:
    algorithm = SkewCompensatedSparsePush(
        topology=RING, num_rounds=150, compressor=Largest(2), compensation_rounds=50
    )
    none = replace(algorithm, compensation_rounds=0)
    before, after = (without_training(each, START) for each in (none, algorithm))
    torch.testing.assert_close(after.mean(0), MEAN, atol=1e-4, rtol=1e-4)
    # cos(pi / 8) ** 50 = 0.019
    assert consensus_distance(after) <= 0.02 * consensus_distance(before)


def test_compensating_now_and_then_keeps_them_closer_while_they_train() -> None:
    algorithm = SkewCompensatedSparsePush(
        topology=RING, num_rounds=60, compressor=Largest(2), compensation_rounds=0
    )
    often = replace(algorithm, compensate_every=4)
    never, now_and_then = (consensus_distance(trained(each)) for each in (algorithm, often))
    assert now_and_then < 0.9 * never


def test_training_leads_to_the_optimum_of_all() -> None:
    # Local steps of size lr leave workers apart by about lr; their mean is exact on a ring.
    after = trained(push(RING, 200), lr=0.05)
    optimum = TARGETS[:8].mean(0)
    torch.testing.assert_close(after.mean(0), optimum, atol=1e-3, rtol=1e-3)
    assert consensus_distance(after) < 0.2 * consensus_distance(TARGETS[:8])


def test_weights_change_nothing_for_those_who_agree() -> None:
    same = START[:1].expand(8, NUM_PARAMS)
    for algorithm in (
        push(IRREGULAR, 40),
        DifferencePush(topology=IRREGULAR, num_rounds=40, compressor=Identity()),
    ):
        torch.testing.assert_close(without_training(algorithm, same), same)


def test_a_slow_worker_changes_when_and_not_what() -> None:
    slow = [Platform(throughput=v) for v in (1, 1, 1, 1, 1, 1, 1, 0.1)]
    even = final_params(make_world(push(IRREGULAR, 6), platforms=slow[:1] * 8))
    assert torch.equal(final_params(make_world(push(IRREGULAR, 6), platforms=slow)), even)
