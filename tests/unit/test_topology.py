"""Whom a worker sends to and hears from, and which graphs are refused."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch

from edgegossip.contract.base_graph import base_graph
from edgegossip.contract.mixing import EdgeWeights, mixing_matrix
from edgegossip.contract.topology import (
    Topology,
    complete,
    directed_exponential,
    directed_ring,
    from_edges,
    from_edges_by_round,
    intermittent,
    one_peer_exponential,
    random_matching,
    random_one_peer,
    random_receivers,
    random_regular,
    ring,
    star,
    torus,
)

UNDIRECTED = [
    *(make(n) for make in (ring, star, complete) for n in (1, 2, 3, 8)),
    *(torus(rows, columns) for rows, columns in [(1, 1), (1, 5), (2, 2), (2, 3), (3, 4)]),
    *(random_regular(n, degree, seed=1) for n, degree in [(1, 0), (2, 1), (7, 4), (8, 7)]),
    from_edges(4, [(2, 0), (0, 1), (3, 2)]),
    from_edges_by_round(4, [[(0, 1), (2, 3)], [(1, 2)], []]),
]
DIRECTED = [
    *(
        make(n)
        for make in (directed_ring, directed_exponential, one_peer_exponential)
        for n in (1, 2, 3, 8, 11)
    ),
    from_edges(3, [(0, 2), (2, 1), (1, 0), (0, 1)], directed=True),
    from_edges_by_round(3, [[(0, 2)], [(2, 1), (1, 0)]], directed=True),
]
ALL = [*UNDIRECTED, *DIRECTED]


@pytest.mark.parametrize("topology", ALL, ids=repr)
def test_a_worker_hears_from_exactly_those_who_send_to_it(topology: Topology) -> None:
    ranks = range(topology.num_workers)
    for round, i, j in itertools.product(range(topology.period), ranks, ranks):
        sends = j in topology.out_neighbors(i, round)
        assert sends == (i in topology.in_neighbors(j, round))


@pytest.mark.parametrize("topology", ALL, ids=repr)
def test_neighbors_are_ascending_other_workers(topology: Topology) -> None:
    for round, rank in itertools.product(range(topology.period), range(topology.num_workers)):
        for neighbors in (topology.out_neighbors, topology.in_neighbors):
            assert list(neighbors(rank, round)) == sorted(set(neighbors(rank, round)))
            assert set(neighbors(rank, round)) <= set(range(topology.num_workers)) - {rank}
        assert topology.out_degree(rank, round) == len(topology.out_neighbors(rank, round))


@pytest.mark.parametrize("topology", UNDIRECTED, ids=repr)
def test_undirected_edges_lead_both_ways(topology: Topology) -> None:
    assert not topology.is_directed
    for round, rank in itertools.product(range(topology.period), range(topology.num_workers)):
        assert topology.in_neighbors(rank, round) == topology.out_neighbors(rank, round)


@pytest.mark.parametrize("topology", ALL, ids=repr)
def test_the_graph_repeats_after_its_period(topology: Topology) -> None:
    for round, rank in itertools.product(range(topology.period), range(topology.num_workers)):
        later = round + 3 * topology.period
        assert topology.out_neighbors(rank, round) == topology.out_neighbors(rank, later)
        assert topology.in_neighbors(rank, round) == topology.in_neighbors(rank, later)


@pytest.mark.parametrize("topology", ALL, ids=repr)
def test_every_worker_reaches_every_other_one(topology: Topology) -> None:
    topology.require_connected()


@pytest.mark.parametrize(
    "make",
    [ring, star, complete, directed_ring, directed_exponential, one_peer_exponential],
)
def test_a_worker_alone_has_no_neighbors(make: Callable[[int], Topology]) -> None:
    assert make(1).out_neighbors(0, round=5) == ()
    assert make(1).in_neighbors(0, round=5) == ()


@pytest.mark.parametrize("make", [ring, star, complete, directed_ring, one_peer_exponential])
def test_two_workers_are_joined_by_one_edge(make: Callable[[int], Topology]) -> None:
    assert make(2).out_neighbors(0, round=0) == (1,)
    assert make(2).out_neighbors(1, round=0) == (0,)


def test_torus_of_two_rows_has_single_edges() -> None:
    assert torus(2, 4).out_neighbors(0, round=0) == (1, 3, 4)


@pytest.mark.parametrize(
    ("num_workers", "period"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)]
)
def test_one_peer_exponential_repeats_after_log2_rounds(num_workers: int, period: int) -> None:
    assert one_peer_exponential(num_workers).period == period


def test_one_peer_exponential_visits_the_edges_of_the_exponential_graph() -> None:
    visited = [one_peer_exponential(11).out_neighbors(7, round)[0] for round in range(4)]
    assert tuple(sorted(visited)) == directed_exponential(11).out_neighbors(7, round=0)


@pytest.mark.parametrize("degree", range(2, 12))
def test_random_regular_gives_everybody_the_same_degree(degree: int) -> None:
    topology = random_regular(12, degree, seed=degree)
    assert {topology.out_degree(rank, 0) for rank in range(12)} == {degree}


def test_random_regular_of_degree_two_is_one_cycle() -> None:
    for seed in range(20):
        random_regular(9, 2, seed).require_connected()


def test_equal_seeds_draw_equal_graphs_and_others_do_not() -> None:
    def neighbors(seed: int) -> list[tuple[int, ...]]:
        topology = random_regular(20, 3, seed)
        return [topology.out_neighbors(rank, 0) for rank in range(20)]

    assert neighbors(seed=4) == neighbors(seed=4)
    assert neighbors(seed=4) != neighbors(seed=5)


@pytest.mark.parametrize(("num_workers", "degree"), [(5, 3), (4, 4), (4, 1), (4, 0), (4, -2)])
def test_infeasible_degree_is_refused(num_workers: int, degree: int) -> None:
    with pytest.raises(ValueError, match=rf"degree {degree}: degree must be in 2\.\..* even"):
        random_regular(num_workers, degree, seed=0)


@pytest.mark.parametrize("edge", [(0, 3), (-1, 0), (1, 1)])
@pytest.mark.parametrize("directed", [False, True])
def test_edge_that_loops_or_leaves_the_graph_is_refused(
    edge: tuple[int, int], directed: bool
) -> None:
    message = r"must join two different ranks in 0\.\.2; correct the edge or raise num_workers$"
    with pytest.raises(ValueError, match=message):
        from_edges(3, [(0, 1), (1, 2), edge], directed)


def test_undirected_edge_listed_at_both_ends_is_refused() -> None:
    with pytest.raises(ValueError, match=r"edge \(1, 0\) comes twice.*directed=True"):
        from_edges(2, [(0, 1), (1, 0)])
    assert from_edges(2, [(0, 1), (1, 0)], directed=True).is_directed


def test_directed_edge_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"edge \(0, 1\) comes twice"):
        from_edges(2, [(0, 1), (1, 0), (0, 1)], directed=True)


def test_graph_in_two_parts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"worker 0 cannot reach worker 2 .* add edges"):
        from_edges(4, [(0, 1), (2, 3)])


def test_worker_that_only_sends_is_refused() -> None:
    with pytest.raises(ValueError, match="worker 0 cannot be reached by worker 1"):
        from_edges(2, [(0, 1)], directed=True)


def test_rounds_need_to_be_connected_only_together() -> None:
    halves: list[list[tuple[int, int]]] = [[(0, 1), (2, 3)], [(1, 2)]]
    assert from_edges_by_round(4, halves).period == 2
    with pytest.raises(ValueError, match="cannot reach"):
        from_edges_by_round(4, halves[:1])


def test_topology_without_a_round_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        from_edges_by_round(3, [])


@pytest.mark.parametrize(
    "make",
    [ring, star, complete, directed_ring, directed_exponential, one_peer_exponential],
)
@pytest.mark.parametrize("num_workers", [0, -3])
def test_topology_without_workers_is_refused(
    make: Callable[[int], Topology], num_workers: int
) -> None:
    with pytest.raises(ValueError, match=f"num_workers must be at least 1, got {num_workers}"):
        make(num_workers)


def test_torus_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got -2 and -3"):
        torus(-2, -3)


def test_topologies_are_equal_if_made_alike() -> None:
    assert ring(8) == ring(8)
    assert hash(ring(8)) == hash(ring(8))
    assert ring(8) != ring(9)
    assert ring(8) != directed_ring(8)
    assert from_edges(3, [(1, 0), (2, 1)]) == from_edges(3, [(1, 2), (0, 1)])
    assert from_edges(2, [(0, 1), (1, 0)], directed=True) != from_edges(2, [(0, 1)])


@pytest.mark.parametrize("topology", [torus(2, 3), one_peer_exponential(5), complete(4)])
def test_copies_and_pickles_are_equal(topology: Topology) -> None:
    for twin in (copy.deepcopy(topology), pickle.loads(pickle.dumps(topology))):
        assert twin == topology
        assert twin.out_neighbors(1, round=1) == topology.out_neighbors(1, round=1)


def test_topology_shows_the_call_that_makes_it_but_not_a_page_of_edges() -> None:
    assert repr(torus(2, 3)) == "torus(2, 3)"
    assert repr(random_regular(6, 3, seed=2)) == "random_regular(6, degree=3, seed=2)"
    path = from_edges(100, [(rank, rank + 1) for rank in range(99)])
    assert len(repr(path)) == 80


def test_ten_thousand_workers_in_a_complete_graph_take_no_memory_until_asked() -> None:
    topology = complete(10_000)
    topology.require_connected()
    assert topology.out_degree(17, round=0) == 9_999
    assert topology.out_neighbors(9_999, round=0)[:2] == (0, 1)


@pytest.mark.parametrize("topology", ALL, ids=repr)
def test_without_a_worker_all_other_edges_remain(topology: Topology) -> None:
    absent = {topology.num_workers - 1}
    smaller = topology.without(absent)
    assert smaller != topology
    for round, rank in itertools.product(range(topology.period), range(topology.num_workers)):
        for before, after in (
            (topology.out_neighbors, smaller.out_neighbors),
            (topology.in_neighbors, smaller.in_neighbors),
        ):
            gone = absent if rank not in absent else {*range(topology.num_workers)}
            assert {*after(rank, round)} == {*before(rank, round)} - gone
        assert smaller.out_degree(rank, round) == len(smaller.out_neighbors(rank, round))


# Among some of the workers.

REMADE = [
    ring(8),
    star(8),
    torus(2, 4),
    complete(8),
    random_regular(8, degree=3, seed=1),
    directed_ring(8),
    directed_exponential(8),
    one_peer_exponential(8),
    base_graph(8, max_degree=1),
    random_one_peer(8, period=6, seed=1),
    random_receivers(8, num_receivers=3, period=6, seed=1),
    random_matching(8, period=6, seed=1),
    intermittent(directed_exponential(8), availability=0.7, period=6, seed=1),
]
SOME = [(0, 1, 2, 3, 4, 5, 7), (1, 3, 4, 6), (2, 5, 7), (3, 6), (5,)]


@pytest.mark.parametrize("topology", REMADE, ids=repr)
@pytest.mark.parametrize("members", SOME, ids=str)
def test_a_graph_among_members_is_of_its_kind_and_connects_them(
    topology: Topology, members: tuple[int, ...]
) -> None:
    among = topology.among(members)
    assert among.is_directed == topology.is_directed
    reached, frontier = {members[0]}, [members[0]]
    while frontier:
        fresh = set(among.all_out_neighbors(frontier.pop())) - reached
        reached |= fresh
        frontier += fresh
    assert reached == set(members)
    for rank, round in itertools.product(range(8), range(among.period)):
        for j in among.out_neighbors(rank, round):
            assert rank in members
            assert rank in among.in_neighbors(j, round)
    # In fewer edges than a complete graph has: at most those of the smaller graph.
    smaller = topology.remake(len(members)) if topology.remake else complete(len(members))
    for place, rank in enumerate(members):
        degrees = [smaller.out_degree(place, k) for k in range(smaller.period)]
        assert [among.out_degree(rank, k) for k in range(among.period)] == degrees


def test_a_ring_of_sixteen_ranks_is_a_ring_of_the_four_that_are_there() -> None:
    among = ring(16).among([15, 3, 4, 9])
    assert [among.out_neighbors(rank, 0) for rank in (3, 4, 9, 15)] == [
        (4, 15),
        (3, 9),
        (4, 15),
        (3, 9),
    ]
    assert ring(16).without({*range(16)} - {3, 4, 9, 15}).out_neighbors(9, 0) == ()


def test_all_members_leave_a_graph_as_it_is_and_listed_edges_stay_where_they_are() -> None:
    assert ring(4).among(range(4)) == ring(4)
    path = from_edges(3, [(0, 1), (1, 2)]).among([0, 2])
    assert path.out_neighbors(0, 0) == path.out_neighbors(2, 0) == ()
    assert ring(4).among([]).out_neighbors(0, 0) == ()
    with pytest.raises(ValueError, match=r"members must be in 0\.\.3, got 4"):
        ring(4).among([1, 4])


def test_weights_of_a_base_graph_give_its_members_their_mean() -> None:
    members = (1, 4, 5)
    among = base_graph(8, max_degree=1).among(members)
    total = torch.eye(8, dtype=torch.float64)
    for round in range(among.period):
        total = mixing_matrix(among, EdgeWeights(), round) @ total
    for i, j in itertools.product(members, members):
        assert total[i, j].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("topology", REMADE, ids=repr)
def test_a_graph_among_members_can_be_sent_to_another_process(topology: Topology) -> None:
    copied = pickle.loads(pickle.dumps(topology)).among([1, 3, 4, 6])
    again = topology.among([1, 3, 4, 6])
    assert [copied.out_neighbors(3, k) for k in range(copied.period)] == [
        again.out_neighbors(3, k) for k in range(again.period)
    ]
