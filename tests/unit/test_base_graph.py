"""The Base-(k+1) graph: the exact mean of any number of workers after one period."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from tests.tiers import first

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.base_graph import base_graph
from edgegossip.contract.mixing import (
    EdgeWeights,
    MetropolisHastings,
    MixingRule,
    is_doubly_stochastic,
    mixing_matrix,
)
from edgegossip.contract.topology import Topology, ring

SIZES = range(1, 31)
each_degree = pytest.mark.parametrize("max_degree", first(1, [2, 1, 3]))


def product(topology: Topology, rule: MixingRule) -> torch.Tensor:
    """The effect of one period of mixing, [num_workers, num_workers]."""
    whole = torch.eye(topology.num_workers, dtype=torch.float64)
    for round in range(topology.period):
        whole = matrix(topology, rule, round) @ whole
    return whole


def matrix(topology: Topology, rule: MixingRule, round: int) -> torch.Tensor:
    """`mixing_matrix`, faster for small graphs."""
    ranks = range(topology.num_workers)
    rows = (rule.weights(topology, rank, round) for rank in ranks)
    return torch.tensor([[row.get(j, 0.0) for j in ranks] for row in rows], dtype=torch.float64)


@each_degree
def test_all_workers_have_the_exact_mean_after_one_period(max_degree: int) -> None:
    for num_workers in SIZES:
        whole = product(base_graph(num_workers, max_degree), EdgeWeights())
        expected = torch.full_like(whole, 1 / num_workers)
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-14)


@each_degree
def test_no_worker_has_more_neighbors_than_allowed(max_degree: int) -> None:
    for num_workers in SIZES:
        graph = base_graph(num_workers, max_degree)
        degrees = {
            graph.out_degree(rank, round)
            for rank in range(num_workers)
            for round in range(graph.period)
        }
        assert max(degrees) <= max_degree


@each_degree
def test_every_round_keeps_the_mean(max_degree: int) -> None:
    for num_workers in SIZES:
        graph = base_graph(num_workers, max_degree)
        for round in range(graph.period):
            mixed = matrix(graph, EdgeWeights(), round)
            assert is_doubly_stochastic(mixed)
            assert torch.equal(mixed.triu(1), mixed.T.triu(1))


@each_degree
def test_the_period_is_the_papers_bound_at_most(max_degree: int) -> None:
    base = max_degree + 1
    for num_workers in SIZES[1:]:
        period = base_graph(num_workers, max_degree).period
        assert period <= 2 * math.log(num_workers, base) + 2
    for power in (1, 2, 3):
        assert base_graph(base**power, max_degree).period == power


def test_factors_of_the_number_of_workers_shorten_the_period() -> None:
    """The simple graph of six workers has 5 rounds; two graphs of three and their union, 4."""
    assert base_graph(6, 1).period == 4
    assert base_graph(5, 1).period == 5


def test_degrees_alone_do_not_give_the_weights() -> None:
    graph = base_graph(3, 1)
    whole = product(graph, MetropolisHastings())
    assert is_doubly_stochastic(whole)
    assert float((whole - 1 / 3).abs().max()) > 0.04


def test_those_present_keep_their_mean_without_the_others() -> None:
    graph = base_graph(7, 2)
    for round in range(graph.period):
        mixed = mixing_matrix(graph.without([2]).without([5]), EdgeWeights(), round)
        assert is_doubly_stochastic(mixed)
        assert mixed[2, 2] == mixed[5, 5] == 1


def test_weights_of_a_graph_without_any_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs a topology with weights.*got ring\(4\)"):
        EdgeWeights().weights(ring(4), 0, 0)


@pytest.mark.parametrize(("num_workers", "max_degree"), [(0, 1), (3, 0)])
def test_numbers_out_of_range_are_refused(num_workers: int, max_degree: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        base_graph(num_workers, max_degree)


def test_a_copy_mixes_alike() -> None:
    graph: Any = base_graph(5, 1)
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert other == graph
        assert other.edge_weights == graph.edge_weights
    assert repr(graph) == "base_graph(5, max_degree=1)"


def test_gossip_takes_its_weights() -> None:
    gossip = Gossip(topology=base_graph(3, 1), num_rounds=3, mixing=EdgeWeights())
    states = [
        gossip.init(rank, torch.tensor([value])) for rank, value in enumerate((0, 3, 9.0))
    ]
    for _ in range(3):
        sent = [state.params for state in states]
        for state in states:
            neighbors = gossip.topology.in_neighbors(state.rank, state.round)
            gossip.mix(state, {j: {"params": sent[j]} for j in neighbors})
            state.round = state.exchange = state.exchange + 1
    assert [state.params.item() for state in states] == pytest.approx([4, 4, 4])
