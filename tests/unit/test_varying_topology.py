"""Graphs that change at random: what each round holds, and that all can be reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from edgegossip.contract.mixing import (
    ColumnStochastic,
    is_column_stochastic,
    is_doubly_stochastic,
    mixing_matrix,
    spectral_gap,
)
from edgegossip.contract.topology import (
    Topology,
    directed_ring,
    intermittent,
    one_peer_exponential,
    random_matching,
    random_one_peer,
    random_receivers,
    ring,
    torus,
)

ONE_PEER = [random_one_peer(n, period=6, seed=1) for n in (1, 2, 3, 8, 11)]
MATCHINGS = [random_matching(n, 16, 1, k) for n in (1, 2, 3, 8, 11) for k in (1, 2)]
BASES = [directed_ring(8), ring(5), torus(3, 4), one_peer_exponential(8), ring(1)]
INTERMITTENT = [intermittent(base, availability=0.5, period=12, seed=1) for base in BASES]


@pytest.mark.parametrize("topology", ONE_PEER, ids=repr)
def test_everybody_sends_to_one_other_and_hears_from_one(topology: Topology) -> None:
    expected = min(1, topology.num_workers - 1)
    for round in range(topology.period):
        for rank in range(topology.num_workers):
            for neighbors in (topology.out_neighbors, topology.in_neighbors):
                assert len(neighbors(rank, round)) == expected
                assert rank not in neighbors(rank, round)


def test_every_peer_is_as_likely() -> None:
    topology = random_one_peer(4, period=3000, seed=0)
    counts = Counter(topology.out_neighbors(0, round) for round in range(3000))
    assert len(counts) == 3
    assert all(900 < count < 1100 for count in counts.values())


@pytest.mark.parametrize("topology", MATCHINGS, ids=repr)
def test_everybody_is_matched_with_one_or_two_others(topology: Topology) -> None:
    n, num_peers = topology.num_workers, 2 - ("num_peers=1" in topology.name)
    for round in range(topology.period):
        degrees = sorted(topology.out_degree(rank, round) for rank in range(n))
        left_out = [0] if num_peers == 1 and n % 2 else []
        assert degrees == [*left_out, *[min(num_peers, n - 1)] * (n - len(left_out))]
        for rank in range(n):
            peers = topology.out_neighbors(rank, round)
            assert peers == topology.in_neighbors(rank, round)
            assert all(rank in topology.out_neighbors(peer, round) for peer in peers)


def test_every_match_is_as_likely() -> None:
    topology = random_matching(4, period=3000, seed=0)
    counts = Counter(topology.out_neighbors(0, round) for round in range(3000))
    assert len(counts) == 3
    assert all(900 < count < 1100 for count in counts.values())


@pytest.mark.parametrize("topology", [*ONE_PEER, *INTERMITTENT, *MATCHINGS], ids=repr)
def test_all_reach_all_within_the_period(topology: Topology) -> None:
    topology.require_connected()


@pytest.mark.parametrize("topology", [*ONE_PEER, *INTERMITTENT], ids=repr)
def test_who_sends_is_heard(topology: Topology) -> None:
    for round in range(topology.period):
        matrix = mixing_matrix(topology, ColumnStochastic(), round)
        assert is_column_stochastic(matrix)
        for rank in range(topology.num_workers):
            heard = [j for j in range(topology.num_workers) if matrix[rank, j] and j != rank]
            assert list(topology.in_neighbors(rank, round)) == heard


@pytest.mark.parametrize(("num_workers", "num_receivers"), [(1, 1), (2, 1), (8, 3), (5, 4)])
def test_each_sends_to_so_many_others(num_workers: int, num_receivers: int) -> None:
    topology = random_receivers(num_workers, num_receivers, period=20, seed=0)
    for round in range(topology.period):
        for rank in range(num_workers):
            receivers = topology.out_neighbors(rank, round)
            assert len(set(receivers) - {rank}) == min(num_receivers, num_workers - 1)


@pytest.mark.parametrize("num_receivers", [0, 4])
def test_more_receivers_than_others_are_refused(num_receivers: int) -> None:
    with pytest.raises(ValueError, match=r"num_receivers must be in 1\.\.3 for 4 workers, got"):
        random_receivers(4, num_receivers, period=2, seed=0)


def test_random_peers_average_faster_than_a_ring_and_keep_the_mean() -> None:
    topology = random_one_peer(8, period=8, seed=0)
    rule = ColumnStochastic()
    matrices = [mixing_matrix(topology, rule, round) for round in range(8)]
    assert all(is_doubly_stochastic(matrix) for matrix in matrices)
    assert spectral_gap(*matrices) > 2 * spectral_gap(mixing_matrix(directed_ring(8), rule))


@pytest.mark.parametrize(
    ("base", "topology"), list(zip(BASES, INTERMITTENT, strict=True)), ids=repr
)
def test_links_come_and_go_but_no_new_ones_appear(base: Topology, topology: Topology) -> None:
    assert topology.is_directed == base.is_directed
    there = total = 0
    for round in range(topology.period):
        for rank in range(topology.num_workers):
            own = set(topology.out_neighbors(rank, round))
            assert own <= set(base.out_neighbors(rank, round))
            there, total = there + len(own), total + base.out_degree(rank, round)
    if total:
        assert 0.3 < there / total < 0.7


def test_links_that_are_always_available_are_always_there() -> None:
    topology = intermittent(directed_ring(5), availability=1.0, period=3, seed=0)
    for round in range(3):
        assert topology.out_neighbors(4, round) == (0,)


def test_equal_seeds_draw_equal_graphs_and_others_do_not() -> None:
    makes: list[Callable[[int], Topology]] = [
        lambda seed: random_matching(8, period=4, seed=seed),
        lambda seed: random_one_peer(8, period=4, seed=seed),
        lambda seed: random_receivers(8, num_receivers=2, period=4, seed=seed),
        lambda seed: intermittent(ring(8), availability=0.5, period=8, seed=seed),
    ]
    for make in makes:
        first, again, other = make(3), make(3), make(4)
        assert first == again
        assert first != other
        edges = [
            [t.out_neighbors(rank, k) for k in range(t.period) for rank in range(8)]
            for t in (first, again, other)
        ]
        assert edges[0] == edges[1] != edges[2]


def test_a_topology_shows_the_call_that_makes_it() -> None:
    assert repr(ONE_PEER[3]) == "random_one_peer(8, period=6, seed=1)"
    assert repr(intermittent(ring(4), availability=0.75, period=9, seed=2)) == (
        "intermittent(ring(4), availability=0.75, period=9, seed=2)"
    )


def test_a_graph_in_parts_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"not connected: worker 0 cannot .* choose a longer period"
    ):
        intermittent(directed_ring(8), availability=0.1, period=2, seed=0)
    # Three of the nine permutations without fixed points are two pairs.
    with pytest.raises(ValueError, match=r"choose a longer period or another seed"):
        [random_one_peer(4, period=1, seed=seed) for seed in range(20)]
    with pytest.raises(ValueError, match=r"random_matching.*choose a longer period"):
        random_matching(4, period=1, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": 0}, "num_workers must be at least 1, got 0"),
        ({"period": 0}, "period must be at least 1, got 0"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_one_peer(**{"num_workers": 4, "period": 2, "seed": 0} | changes)
    with pytest.raises(ValueError, match=message):
        random_matching(**{"num_workers": 4, "period": 2, "seed": 0} | changes)


def test_matchings_have_one_or_two_peers() -> None:
    with pytest.raises(ValueError, match="num_peers must be 1 or 2, got 3"):
        random_matching(8, period=4, seed=0, num_peers=3)


@pytest.mark.parametrize("availability", [0.0, 1.5, float("nan")])
def test_an_availability_that_is_no_chance_is_refused(availability: float) -> None:
    with pytest.raises(ValueError, match=r"availability must be in \(0, 1\], got"):
        intermittent(ring(4), availability, period=2, seed=0)


def test_a_period_that_does_not_fit_that_of_the_base_is_refused() -> None:
    with pytest.raises(ValueError, match="period must be a multiple of that of one_peer_exp"):
        intermittent(one_peer_exponential(8), availability=1.0, period=4, seed=0)
