"""Mixing matrices against theory: stochasticity, closed-form spectral gaps, convergence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from edgegossip.contract.mixing import (
    ColumnStochastic,
    MetropolisHastings,
    MixingRule,
    Uniform,
    is_column_stochastic,
    is_doubly_stochastic,
    is_row_stochastic,
    mixing_matrix,
    spectral_gap,
)
from edgegossip.contract.randomness import generator
from edgegossip.contract.topology import (
    Topology,
    complete,
    directed_exponential,
    directed_ring,
    from_edges_by_round,
    one_peer_exponential,
    random_regular,
    ring,
    star,
    torus,
)

RULES: list[MixingRule] = [MetropolisHastings(), Uniform(), ColumnStochastic()]


@st.composite
def topologies(draw: st.DrawFn, directed: bool) -> Topology:
    """Random edges in one or two rounds, and a ring that connects them."""
    n = draw(st.integers(2, 6))
    pairs = [
        (i, j)
        for i, j in itertools.product(range(n), repeat=2)
        if (i != j if directed else i < j)
    ]
    cycle = {(i, (i + 1) % n) for i in range(n)}
    base = cycle if directed else {(min(i, j), max(i, j)) for i, j in cycle}
    more = draw(st.lists(st.sets(st.sampled_from(pairs), max_size=6), min_size=1, max_size=2))
    return from_edges_by_round(n, [base | more[0], *more[1:]], directed)


def matrices(topology: Topology, rule: MixingRule) -> list[Tensor]:
    return [mixing_matrix(topology, rule, round) for round in range(topology.period)]


@given(topologies(directed=False))
def test_metropolis_hastings_is_symmetric_and_doubly_stochastic(topology: Topology) -> None:
    for matrix in matrices(topology, MetropolisHastings()):
        assert torch.equal(matrix, matrix.T)
        assert is_doubly_stochastic(matrix)


@given(topologies(directed=True))
def test_uniform_is_row_stochastic(topology: Topology) -> None:
    assert all(map(is_row_stochastic, matrices(topology, Uniform())))


@given(topologies(directed=True))
def test_column_stochastic_is_column_stochastic(topology: Topology) -> None:
    assert all(map(is_column_stochastic, matrices(topology, ColumnStochastic())))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(topology=topologies(directed=False))
def test_weights_are_positive_on_neighbors_and_oneself_in_rank_order(
    rule: MixingRule, topology: Topology
) -> None:
    for round, rank in itertools.product(range(topology.period), range(topology.num_workers)):
        row = rule.weights(topology, rank, round)
        assert list(row) == sorted([*topology.in_neighbors(rank, round), rank])
        assert min(row.values()) > 0


@settings(max_examples=settings().max_examples // 3)  # eigenvalues are slow
@given(topologies(directed=True))
def test_gap_is_positive_on_connected_graphs_and_at_most_one(topology: Topology) -> None:
    # Self weights are positive, so a strongly connected period makes a primitive product.
    assert 0 < spectral_gap(*matrices(topology, Uniform())) <= 1


@pytest.mark.parametrize(
    "topology",
    [ring(7), torus(3, 4), complete(6), random_regular(10, 3, seed=0), ring(1), ring(2)],
    ids=repr,
)
def test_all_rules_agree_where_all_degrees_are_equal(topology: Topology) -> None:
    expected = mixing_matrix(topology, RULES[0])
    for rule in RULES[1:]:
        torch.testing.assert_close(mixing_matrix(topology, rule), expected)


@pytest.mark.parametrize(
    "topology", [directed_ring(5), directed_exponential(6), one_peer_exponential(5)], ids=repr
)
@pytest.mark.parametrize("rule", [Uniform(), ColumnStochastic()], ids=repr)
def test_directed_factories_mix_doubly_stochastically(
    topology: Topology, rule: MixingRule
) -> None:
    assert all(map(is_doubly_stochastic, matrices(topology, rule)))


def test_row_belongs_to_the_receiver() -> None:
    # Worker 0 hears from 2 and sends to 1.
    matrix = mixing_matrix(directed_ring(3), Uniform())
    assert matrix[0].tolist() == [0.5, 0.0, 0.5]


def test_share_a_worker_keeps_is_the_share_it_sends() -> None:
    matrix = mixing_matrix(star(5), ColumnStochastic())
    assert matrix[:, 0].tolist() == [0.2] * 5
    assert matrix[1, 1] == matrix[0, 1] == 0.5


def test_star_separates_the_three_rules() -> None:
    rows = [dict(rule.weights(star(4), rank=3, round=0)) for rule in RULES]
    assert rows == [{0: 0.25, 3: 0.75}, {0: 0.5, 3: 0.5}, {0: 0.25, 3: 0.5}]
    assert not is_column_stochastic(mixing_matrix(star(4), Uniform()))
    assert not is_row_stochastic(mixing_matrix(star(4), ColumnStochastic()))


def test_negative_weights_are_not_stochastic() -> None:
    assert not is_row_stochastic(torch.tensor([[1.5, -0.5], [0.0, 1.0]]))


@pytest.mark.parametrize("n", [3, 4, 5, 8, 21])
def test_gap_of_a_ring_in_closed_form(n: int) -> None:
    expected = 1 - (1 + 2 * math.cos(2 * math.pi / n)) / 3
    assert spectral_gap(mixing_matrix(ring(n), MetropolisHastings())) == pytest.approx(expected)


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (3, 5), (4, 6)])
def test_gap_of_a_torus_in_closed_form(rows: int, columns: int) -> None:
    moduli = sorted(
        abs(1 + 2 * math.cos(2 * math.pi * a / rows) + 2 * math.cos(2 * math.pi * b / columns))
        for a, b in itertools.product(range(rows), range(columns))
    )
    gap = spectral_gap(mixing_matrix(torus(rows, columns), MetropolisHastings()))
    assert gap == pytest.approx(1 - moduli[-2] / 5)


@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_complete_graph_averages_at_once(n: int) -> None:
    matrix = mixing_matrix(complete(n), MetropolisHastings())
    torch.testing.assert_close(matrix, torch.full_like(matrix, 1 / n))
    assert spectral_gap(matrix) == pytest.approx(1)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_gap_of_a_star_is_one_over_its_workers(n: int) -> None:
    expected = 1 / n if n > 2 else 1
    assert spectral_gap(mixing_matrix(star(n), MetropolisHastings())) == pytest.approx(expected)


@pytest.mark.parametrize("n", [3, 4, 9])
def test_gap_of_a_directed_ring_in_closed_form(n: int) -> None:
    # Eigenvalues (1 + w) / 2 for the n-th roots of unity w.
    gap = spectral_gap(mixing_matrix(directed_ring(n), Uniform()))
    assert gap == pytest.approx(1 - math.cos(math.pi / n))


@pytest.mark.parametrize("n", [4, 6, 8, 12, 16])
def test_gap_of_the_exponential_graph_is_that_of_ying_et_al(n: int) -> None:
    # Ying et al. 2021: 2 / (1 + ceil(log2 n)) for even n.
    gap = spectral_gap(mixing_matrix(directed_exponential(n), Uniform()))
    assert gap == pytest.approx(2 / (1 + math.ceil(math.log2(n))))


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("log_n", [0, 1, 2, 3, 4])
def test_one_peer_exponential_averages_exactly_within_a_period(log_n: int, start: int) -> None:
    topology = one_peer_exponential(2**log_n)
    product = torch.eye(2**log_n, dtype=torch.float64)
    for round in range(start, start + log_n):
        product = mixing_matrix(topology, Uniform(), round) @ product
    assert torch.equal(product, torch.full_like(product, 1 / 2**log_n))


def test_one_peer_exponential_does_not_average_exactly_for_other_sizes() -> None:
    assert spectral_gap(*matrices(one_peer_exponential(6), Uniform())) < 0.9


def test_gap_counts_per_round_of_the_period() -> None:
    matrix = mixing_matrix(ring(6), MetropolisHastings())
    assert spectral_gap(matrix, matrix, matrix) == pytest.approx(spectral_gap(matrix))


def test_disconnected_workers_have_gap_zero() -> None:
    assert spectral_gap(torch.eye(3)) == 0.0


@pytest.mark.parametrize("topology", [ring(9), star(7), torus(3, 4)], ids=repr)
def test_mixing_contracts_no_slower_than_the_gap_says(topology: Topology) -> None:
    # Xiao & Boyd 2004: for symmetric W the distance to the mean shrinks by |lambda_2| or more.
    matrix = mixing_matrix(topology, MetropolisHastings())
    x = torch.randn(
        topology.num_workers, generator=generator(0, repr(topology)), dtype=torch.float64
    )
    before, after = x - x.mean(), matrix @ x - x.mean()
    assert after.norm() <= (1 - spectral_gap(matrix)) * before.norm() * (1 + 1e-12)


@pytest.mark.parametrize("make", [directed_ring, one_peer_exponential])
def test_metropolis_hastings_on_a_directed_topology_is_refused_with_a_way_out(
    make: Callable[[int], Topology],
) -> None:
    with pytest.raises(ValueError, match=r"undirected topology, got .*\(4\); .*push-sum"):
        MetropolisHastings().weights(make(4), rank=0, round=0)


def test_rows_are_kept_and_cannot_be_written_to() -> None:
    row = Uniform().weights(one_peer_exponential(8), rank=2, round=1)
    assert Uniform().weights(one_peer_exponential(8), rank=2, round=4) is row
    assert Uniform().weights(one_peer_exponential(8), rank=2, round=2) is not row
    with pytest.raises(TypeError):
        row[2] = 1.0  # type: ignore[index]
