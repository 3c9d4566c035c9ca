"""Topologies: the workers that a worker sends to and receives from, in each round.

Each topology comes from one of the functions below, such as `ring(8)`. Undirected and directed,
static and varying graphs all have the same two methods, `out_neighbors(rank, round)` and
`in_neighbors(rank, round)`. `edgegossip.contract.mixing` computes the mixing weights.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TypeAlias

import torch

from edgegossip.contract.randomness import generator
from edgegossip.contract.ranges import check_range, check_ranges

Edge: TypeAlias = tuple[int, int]
"""(i, j): an edge from worker i to worker j; in an undirected topology, also from j to i."""

NeighborLists: TypeAlias = tuple[tuple[int, ...], ...]
"""The neighbors of each rank, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Topology(ABC):
    """A communication graph over workers ``0 .. num_workers - 1``; it repeats after `period`
    rounds.

    Attributes:
        name: Call that makes the topology, such as ``ring(8)``; equal names mean equal graphs.
            Only the name is compared and hashed, so a topology is a cheap dictionary key.
        num_workers: Number of workers, at least 1. A single worker has no neighbors.
        is_directed: Whether an edge may lack its reverse. An undirected topology has
            ``in_neighbors == out_neighbors`` in every round.
        period: Rounds after which the graph repeats; 1 if it never changes.
        remake: Makes the same kind of graph for another number of workers, for `among`; None if
            the edges are given one by one.

    Raises:
        ValueError: If `num_workers` is below 1.
    """

    name: str
    num_workers: int = field(compare=False)
    is_directed: bool = field(compare=False)
    period: int = field(compare=False)
    remake: Callable[[int], Topology] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_ranges(self, num_workers="at least 1")

    @abstractmethod
    def out_neighbors(self, rank: int, round: int) -> tuple[int, ...]:
        """Workers that `rank` sends to in `round`: ascending, never itself."""

    @abstractmethod
    def in_neighbors(self, rank: int, round: int) -> tuple[int, ...]:
        """Workers that `rank` receives from in `round`: ascending, never itself."""

    def out_degree(self, rank: int, round: int) -> int:
        """Number of workers that `rank` sends to in `round`."""
        return len(self.out_neighbors(rank, round))

    def all_out_neighbors(self, rank: int) -> tuple[int, ...]:
        """Workers that `rank` sends to in any round of the period."""
        rounds = range(self.period)
        return tuple(sorted({j for k in rounds for j in self.out_neighbors(rank, k)}))

    def all_in_neighbors(self, rank: int) -> tuple[int, ...]:
        """Workers that `rank` receives from in any round of the period."""
        rounds = range(self.period)
        return tuple(sorted({j for k in rounds for j in self.in_neighbors(rank, k)}))

    def without(self, absent: Collection[int]) -> Topology:
        """The same graph without the edges of some workers, which keep their ranks.

        >>> complete(4).without([3]).out_neighbors(0, round=0)
        (1, 2)
        """
        return RemainingTopology(
            name=_name_without(self, absent),
            num_workers=self.num_workers,
            is_directed=self.is_directed,
            period=self.period,
            whole=self,
            absent=frozenset(absent),
        )

    def among(self, members: Collection[int]) -> Topology:
        """The same kind of graph over `members` alone, which keep their ranks.

        A ring whose members are gone would fall into islands (see `without`); a ring among the
        rest is a ring again. The member of lowest rank takes the place of worker 0, and so on.
        Its period may differ. A graph that was given by its edges only loses those of the
        others, because nothing says how to connect its rest.

        >>> ring(8).among([1, 4, 6]).out_neighbors(6, round=0)
        (1, 4)

        Args:
            members: The ranks that are present.

        Raises:
            ValueError: If a rank is out of range.
        """
        return _among(self, tuple(sorted(set(members))))

    @property
    def follows_members(self) -> bool:
        """Whether the graph depends on who is present (`OpenTopology`)."""
        return False

    def present(self, lost: Collection[int]) -> Topology:
        """The graph of an open run without the workers `lost`; of any other run, this one.

        In a graph that does not follow its members, workers leave out neighbors that are lost.
        """
        return self

    def open(self) -> Topology:
        """The graph of an open run: in each exchange, that among the workers that are present.

        >>> ring(16).open().present(lost={*range(16)} - {3, 9, 12}).out_neighbors(9, round=0)
        (3, 12)
        """
        return OpenTopology(
            name=f"{self.name}.open()",
            num_workers=self.num_workers,
            is_directed=self.is_directed,
            period=self.period,
            whole=self,
        )

    def require_connected(self) -> None:
        """Raise ValueError unless all workers can reach each other; separate parts never agree.

        >>> ring(4).require_connected()
        """
        for neighbors, cannot in (
            (self.out_neighbors, "cannot reach"),
            (self.in_neighbors, "cannot be reached by"),
        ):
            if missing := set(range(self.num_workers)) - _reached(self, neighbors):
                raise ValueError(
                    f"worker 0 {cannot} worker {min(missing)} in any number of rounds; "
                    "add edges until every worker can reach every other one"
                )

    @property
    def longest_lead(self) -> int:
        """Maximum number of rounds that a worker can be ahead of a present neighbor, if all
        wait for their in-neighbors.

        >>> ring(8).longest_lead, directed_ring(8).longest_lead
        (1, 7)
        """
        return _longest_lead(self)

    @property
    def flooding_time(self) -> int:
        """Rounds until all workers know everything, from any initial round; at least 1.

        In each round every worker sends everything that it knows to its out-neighbors. The
        graph must be connected (see `require_connected`); otherwise this would never end.

        >>> [make(8).flooding_time for make in (complete, directed_ring, one_peer_exponential)]
        [1, 7, 3]
        """
        return _flooding_time(self)

    def __repr__(self) -> str:
        return self.name if len(self.name) <= 80 else self.name[:77] + "..."


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ListedTopology(Topology):
    """Stored neighbors: `outgoing[round % period][rank]`, ascending."""

    outgoing: tuple[NeighborLists, ...] = field(compare=False)
    incoming: tuple[NeighborLists, ...] = field(compare=False)

    def out_neighbors(self, rank: int, round: int) -> tuple[int, ...]:
        return self.outgoing[round % self.period][rank]

    def in_neighbors(self, rank: int, round: int) -> tuple[int, ...]:
        return self.incoming[round % self.period][rank]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WeightedTopology(ListedTopology):
    """An undirected graph that has a weight for each edge (i, j), i < j, in each round.

    `EdgeWeights` mixes by these weights.
    """

    edge_weights: tuple[Mapping[Edge, float], ...] = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RemainingTopology(Topology):
    """The graph `whole` without the edges of the workers `absent`; see `Topology.without`."""

    whole: Topology = field(compare=False)
    absent: frozenset[int] = field(compare=False)

    def out_neighbors(self, rank: int, round: int) -> tuple[int, ...]:
        return self._present(rank, self.whole.out_neighbors(rank, round))

    def in_neighbors(self, rank: int, round: int) -> tuple[int, ...]:
        return self._present(rank, self.whole.in_neighbors(rank, round))

    def _present(self, rank: int, neighbors: tuple[int, ...]) -> tuple[int, ...]:
        if rank in self.absent:
            return ()
        return tuple(j for j in neighbors if j not in self.absent)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OpenTopology(Topology):
    """The graph `whole` among the workers that are present; see `Topology.open`.

    Its own edges are those while all are there, but a worker may become the neighbor of any
    other one.
    """

    whole: Topology = field(compare=False)

    @property
    def follows_members(self) -> bool:
        return True

    def out_neighbors(self, rank: int, round: int) -> tuple[int, ...]:
        return self.whole.out_neighbors(rank, round)

    def in_neighbors(self, rank: int, round: int) -> tuple[int, ...]:
        return self.whole.in_neighbors(rank, round)

    def all_out_neighbors(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in range(self.num_workers) if other != rank)

    def all_in_neighbors(self, rank: int) -> tuple[int, ...]:
        return self.all_out_neighbors(rank)

    def among(self, members: Collection[int]) -> Topology:
        return self.whole.among(members)

    def present(self, lost: Collection[int]) -> Topology:
        return self.whole.among([rank for rank in range(self.num_workers) if rank not in lost])

    def open(self) -> Topology:
        return self


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CompleteTopology(Topology):
    """The neighbors of each of `ranks` are all others of them, computed on request.

    Storing the edges of 10,000 workers would take 800 MB.
    """

    ranks: tuple[int, ...] = field(compare=False)

    def out_neighbors(self, rank: int, round: int) -> tuple[int, ...]:
        place = bisect_left(self.ranks, rank)
        is_present = self.ranks[place : place + 1] == (rank,)
        return self.ranks[:place] + self.ranks[place + 1 :] if is_present else ()

    def in_neighbors(self, rank: int, round: int) -> tuple[int, ...]:
        return self.out_neighbors(rank, round)

    def out_degree(self, rank: int, round: int) -> int:
        place = bisect_left(self.ranks, rank)
        return len(self.ranks) - 1 if self.ranks[place : place + 1] == (rank,) else 0

    def open(self) -> Topology:
        # Without those that are lost it is the complete graph of the rest.
        return self

    def without(self, absent: Collection[int]) -> Topology:
        # Degrees still take no listing of neighbors.
        return replace(
            self,
            name=_name_without(self, absent),
            ranks=tuple(rank for rank in self.ranks if rank not in absent),
        )


def ring(num_workers: int) -> Topology:
    """Each worker exchanges messages with its predecessor and its successor.

    Two workers share one edge; a single worker has none.

    >>> ring(5).out_neighbors(0, round=0)
    (1, 4)
    """
    pairs = ((rank, (rank + 1) % num_workers) for rank in range(num_workers))
    return _undirected(f"ring({num_workers})", num_workers, pairs, ring)


def torus(rows: int, columns: int) -> Topology:
    """A grid with wraparound in both directions; rank = row * columns + column.

    A side of length two has single edges, and a side of length one has none: ``torus(1, n)`` is
    a ring. Among other numbers of workers, the rows and columns are as equal as they can be.

    Raises:
        ValueError: If `rows` or `columns` is below 1.

    >>> torus(3, 4).out_neighbors(0, round=0)
    (1, 3, 4, 8)
    """
    if min(rows, columns) < 1:
        raise ValueError(f"rows and columns must be at least 1, got {rows} and {columns}")
    pairs = []
    for row, column in itertools.product(range(rows), range(columns)):
        rank = row * columns + column
        pairs.append((rank, row * columns + (column + 1) % columns))
        pairs.append((rank, (row + 1) % rows * columns + column))
    name = f"torus({rows}, {columns})"
    return _undirected(name, rows * columns, pairs, _squarest_torus)


def star(num_workers: int) -> Topology:
    """Worker 0 exchanges messages with all other workers, which have no other neighbor.

    >>> star(4).out_neighbors(0, round=0), star(4).out_neighbors(3, round=0)
    ((1, 2, 3), (0,))
    """
    pairs = [(0, rank) for rank in range(1, num_workers)]
    return _undirected(f"star({num_workers})", num_workers, pairs, star)


def complete(num_workers: int) -> Topology:
    """Every worker exchanges messages with every other worker.

    Neighbors are listed on request, in time proportional to their number.

    >>> complete(4).out_neighbors(1, round=0)
    (0, 2, 3)
    """
    return CompleteTopology(
        name=f"complete({num_workers})",
        num_workers=num_workers,
        is_directed=False,
        period=1,
        ranks=tuple(range(num_workers)),
    )


def random_regular(num_workers: int, degree: int, seed: int) -> Topology:
    """A random connected graph in which every worker has `degree` neighbors.

    The pairing model gives every worker `degree` stubs, and joins stubs in random pairs. Pairs
    that would make a loop or a double edge are drawn again among the remaining stubs. A draw
    that gets stuck or is not connected is discarded. For degrees much smaller than
    `num_workers`, all such graphs are about equally likely.

    Args:
        num_workers: Number of workers; ``num_workers * degree`` must be even.
        degree: Neighbors of each worker, in ``2 .. num_workers - 1``; with one or two
            workers, ``num_workers - 1``.
        seed: Equal seeds produce equal graphs.

    Raises:
        ValueError: If no such graph exists.

    References:
        Steger & Wormald, "Generating random regular graphs quickly", Combinatorics, Probability
        and Computing 1999. Here stubs are joined in batches, as in NetworkX. If the graph has
        more than half of all possible edges, the missing edges are drawn instead.

    >>> random_regular(6, degree=3, seed=0).out_neighbors(0, round=0)
    (1, 4, 5)
    """
    smallest = min(2, num_workers - 1)
    if not smallest <= degree < num_workers or num_workers * degree % 2:
        raise ValueError(
            f"no connected graph of {num_workers} workers has degree {degree}: degree must be "
            f"in {smallest}..{num_workers - 1} and num_workers * degree even"
        )
    name = f"random_regular({num_workers}, degree={degree}, seed={seed})"
    draws = generator(seed, "random_regular")
    remake = partial(_nearly_regular, degree, seed)
    while True:
        pairs = _draw_regular(num_workers, degree, draws)
        topology = _undirected(name, num_workers, pairs, remake)
        if len(_reached(topology)) == num_workers:
            return topology


def directed_ring(num_workers: int) -> Topology:
    """Each worker sends to its successor.

    >>> directed_ring(4).out_neighbors(3, round=0), directed_ring(4).in_neighbors(3, round=0)
    ((0,), (2,))
    """
    hops = [_powers(num_workers)[:1]]
    return _hopping(f"directed_ring({num_workers})", num_workers, hops, directed_ring)


def directed_exponential(num_workers: int) -> Topology:
    """Each worker sends to the workers 1, 2, 4, ... ranks ahead: few edges, short paths.

    References:
        Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep
        Training", NeurIPS 2021, arXiv:2110.13363 (the static exponential graph).

    >>> directed_exponential(8).out_neighbors(0, round=0)
    (1, 2, 4)
    """
    name, hops = f"directed_exponential({num_workers})", [_powers(num_workers)]
    return _hopping(name, num_workers, hops, directed_exponential)


def one_peer_exponential(num_workers: int) -> Topology:
    """In round k, each worker sends to the worker ``2 ** (k % period)`` ranks ahead.

    The period is ``ceil(log2(num_workers))``. If `num_workers` is a power of two, weights of
    1/2 average exactly within one period, at the cost of one message per worker and round.

    References:
        Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
        arXiv:1811.10792; Ying et al., NeurIPS 2021, arXiv:2110.13363.

    >>> [one_peer_exponential(8).out_neighbors(0, round) for round in range(4)]
    [(1,), (2,), (4,), (1,)]
    """
    phases = [[hop] for hop in _powers(num_workers)] or [[]]
    name = f"one_peer_exponential({num_workers})"
    return _hopping(name, num_workers, phases, one_peer_exponential)


def from_edges(num_workers: int, edges: Iterable[Edge], directed: bool = False) -> Topology:
    """Make the topology with these edges, each given once.

    Args:
        num_workers: Number of workers.
        edges: Pairs (i, j). Undirected edges also lead back from j to i.
        directed: Whether an edge leads from i to j only.

    Raises:
        ValueError: If an edge names a rank out of range, is a loop or a duplicate, or if some
            worker cannot reach all other workers.

    >>> path = from_edges(3, [(0, 1), (1, 2)])
    >>> path.out_neighbors(1, round=0)
    (0, 2)
    """
    return from_edges_by_round(num_workers, [edges], directed)


def from_edges_by_round(
    num_workers: int, edges_by_round: Iterable[Iterable[Edge]], directed: bool = False
) -> Topology:
    """Make the topology with edges ``edges_by_round[k % period]`` in round k.

    Arguments and errors are those of `from_edges`; the edges of all rounds together must
    connect every worker to every other one, but those of a single round need not.

    Raises:
        ValueError: If there is no round, or in the cases that `from_edges` names.

    >>> pairs = from_edges_by_round(4, [[(0, 1), (2, 3)], [(1, 2), (0, 3)]])
    >>> pairs.out_neighbors(0, round=0), pairs.out_neighbors(0, round=1)
    ((1,), (3,))
    """
    phases = [_checked(num_workers, edges, directed) for edges in edges_by_round]
    if not phases:
        raise ValueError("edges_by_round must have at least one round, got none")
    name = f"from_edges_by_round({num_workers}, {phases}, directed={directed})"
    if not directed:
        phases = [phase + [(j, i) for i, j in phase] for phase in phases]
    topology = _listed(name, num_workers, phases, directed)
    topology.require_connected()
    return topology


# Building and checking.


def weighted(
    name: str,
    num_workers: int,
    rounds: Sequence[Mapping[Edge, float]],
    remake: Callable[[int], Topology] | None = None,
) -> WeightedTopology:
    """Make an undirected topology from the weights of each round's edges (i, j), i < j."""
    phases = [[edge for i, j in weights for edge in ((i, j), (j, i))] for weights in rounds]
    listed = _listed(name, num_workers, phases, is_directed=False)
    return WeightedTopology(
        name=name,
        num_workers=num_workers,
        is_directed=False,
        period=len(rounds),
        outgoing=listed.outgoing,
        incoming=listed.incoming,
        edge_weights=tuple(rounds),
        remake=remake,
    )


def _name_without(topology: Topology, absent: Collection[int]) -> str:
    return f"{topology.name}.without({sorted(absent)})"


def _undirected(
    name: str, num_workers: int, pairs: Iterable[Edge], remake: Callable[[int], Topology]
) -> Topology:
    """Make edges both ways for each pair, without the duplicates and loops of small graphs."""
    edges = {edge for i, j in pairs if i != j for edge in ((i, j), (j, i))}
    return _listed(name, num_workers, [edges], is_directed=False, remake=remake)


def _hopping(
    name: str,
    num_workers: int,
    hops_by_round: Iterable[Sequence[int]],
    remake: Callable[[int], Topology],
) -> Topology:
    """Let every worker send to the workers `hops` ranks ahead."""
    phases = [
        [(rank, (rank + hop) % num_workers) for rank in range(num_workers) for hop in hops]
        for hops in hops_by_round
    ]
    return _listed(name, num_workers, phases, is_directed=True, remake=remake)


def _listed(
    name: str,
    num_workers: int,
    phases: Sequence[Collection[Edge]],
    is_directed: bool,
    remake: Callable[[int], Topology] | None = None,
) -> ListedTopology:
    """The topology of the edges i -> j in `phases[round % period]`."""

    def by_first(edges: Iterable[Edge]) -> NeighborLists:
        neighbors: list[list[int]] = [[] for _ in range(num_workers)]
        for i, j in edges:
            neighbors[i].append(j)
        return tuple(tuple(sorted(ranks)) for ranks in neighbors)

    outgoing = incoming = tuple(by_first(edges) for edges in phases)
    if is_directed:
        incoming = tuple(by_first((j, i) for i, j in edges) for edges in phases)
    return ListedTopology(
        name=name,
        num_workers=num_workers,
        is_directed=is_directed,
        period=len(phases),
        outgoing=outgoing,
        incoming=incoming,
        remake=remake,
    )


# The same kind of graph for another number of workers.


@lru_cache(maxsize=256)  # workers ask for each exchange, and each driver for many workers
def _among(topology: Topology, members: tuple[int, ...]) -> Topology:
    ranks = range(topology.num_workers)
    if strangers := set(members).difference(ranks):
        raise ValueError(f"members must be in 0..{ranks[-1]}, got {min(strangers)}")
    if len(members) == topology.num_workers:
        return topology
    if topology.remake is None or not members:
        return topology.without(set(ranks).difference(members))
    smaller = topology.remake(len(members))
    name = f"{topology.name}.among({list(members)})"
    if isinstance(smaller, WeightedTopology):
        rounds = [
            {(members[i], members[j]): weight for (i, j), weight in weights.items()}
            for weights in smaller.edge_weights
        ]
        return weighted(name, topology.num_workers, rounds)
    phases = [
        [
            (rank, members[j])
            for i, rank in enumerate(members)
            for j in smaller.out_neighbors(i, k)
        ]
        for k in range(smaller.period)
    ]
    return _listed(name, topology.num_workers, phases, is_directed=topology.is_directed)


def _squarest_torus(num_workers: int) -> Topology:
    rows = next(r for r in range(math.isqrt(num_workers), 0, -1) if num_workers % r == 0)
    return torus(rows, num_workers // rows)


def _nearly_regular(degree: int, seed: int, num_workers: int) -> Topology:
    """A random regular graph with the nearest possible degree."""
    degree = min(degree, num_workers - 1)
    return random_regular(num_workers, degree + num_workers * degree % 2, seed)


def _joined_among(make: Callable[..., Topology], period: int, num_workers: int) -> Topology:
    """Draw a graph of at least `period` rounds that connects `num_workers`."""
    while True:
        try:
            return make(num_workers, period=period)
        except ValueError:  # not connected; more rounds have more edges
            period *= 2


def _powers(num_workers: int) -> list[int]:
    """1, 2, 4, ... below `num_workers`: ``ceil(log2(num_workers))`` of them."""
    return [2**k for k in range((num_workers - 1).bit_length())]


def _draw_regular(num_workers: int, degree: int, draws: torch.Generator) -> set[Edge]:
    """Draw pairs (i, j), i < j, with every worker in `degree` of them."""
    if degree > num_workers / 2:  # sampling the few missing edges is faster
        left_out = _draw_regular(num_workers, num_workers - 1 - degree, draws)
        return set(itertools.combinations(range(num_workers), 2)) - left_out
    while (pairs := _join_stubs(num_workers, degree, draws)) is None:
        pass
    return pairs


def _join_stubs(num_workers: int, degree: int, draws: torch.Generator) -> set[Edge] | None:
    """Join stubs in random pairs; None if the remaining stubs cannot be joined."""
    pairs: set[Edge] = set()
    stubs = [rank for rank in range(num_workers) for _ in range(degree)]
    while stubs:
        order = torch.randperm(len(stubs), generator=draws).tolist()
        shuffled = [stubs[place] for place in order]
        stubs = []
        for i, j in zip(shuffled[::2], shuffled[1::2], strict=True):
            pair = (min(i, j), max(i, j))
            if i == j or pair in pairs:
                stubs += pair
            else:
                pairs.add(pair)
        if stubs and pairs.issuperset(itertools.combinations(sorted(set(stubs)), 2)):
            return None
    return pairs


def _checked(num_workers: int, edges: Iterable[Edge], directed: bool) -> list[Edge]:
    """The edges in ascending order, undirected ones as (smaller, larger)."""
    seen: set[Edge] = set()
    for i, j in edges:
        if not (0 <= i < num_workers and 0 <= j < num_workers and i != j):
            raise ValueError(
                f"edge ({i}, {j}) must join two different ranks in 0..{num_workers - 1}; "
                "correct the edge or raise num_workers"
            )
        edge = (i, j) if directed else (min(i, j), max(i, j))
        if edge in seen:
            raise ValueError(
                f"edge ({i}, {j}) comes twice; list each edge once, and where i -> j and "
                "j -> i are two edges, pass directed=True"
            )
        seen.add(edge)
    return sorted(seen)


# Connectivity: whether all workers reach each other, and in how many rounds.


def _reached(
    topology: Topology, neighbors: Callable[[int, int], tuple[int, ...]] | None = None
) -> set[int]:
    """Worker 0 and all workers that it reaches through `neighbors`, directly or indirectly."""
    neighbors = neighbors or topology.out_neighbors
    reached, frontier = {0}, [0]
    while frontier and len(reached) < topology.num_workers:
        rank = frontier.pop()
        for round in range(topology.period):
            fresh = set(neighbors(rank, round)) - reached
            reached |= fresh
            frontier += fresh
    return reached


# Cached by name, because drivers and algorithms ask again and again.


@lru_cache(maxsize=64)
def _longest_lead(topology: Topology) -> int:
    if not topology.is_directed and topology.period == 1:
        return 1
    if len(_reached(topology)) < topology.num_workers:
        return (topology.num_workers - 1) * topology.period
    # All workers wait for the messages of their in-neighbors in each round. After that many
    # rounds, every worker has waited for a worker's message, directly or indirectly.
    return topology.flooding_time


@lru_cache(maxsize=64)
def _flooding_time(topology: Topology) -> int:
    return max(_flooding_time_from(topology, first) for first in range(topology.period))


def _flooding_time_from(topology: Topology, first: int) -> int:
    ranks = range(topology.num_workers)
    known, everything = [1 << rank for rank in ranks], (1 << len(ranks)) - 1  # sets, as bits
    num_rounds = 0
    while num_rounds == 0 or any(each != everything for each in known):
        told = known.copy()
        for rank in ranks:
            for receiver in topology.out_neighbors(rank, first + num_rounds):
                told[receiver] |= known[rank]
        known, num_rounds = told, num_rounds + 1
    return num_rounds


# Varying graphs, drawn at random once.
#
# A drawn sequence repeats after its period, so every worker can compute the graph of each round
# by itself. All workers must be able to reach each other.


def random_one_peer(num_workers: int, period: int, seed: int) -> Topology:
    """In each round every worker sends to one random other worker and receives from one.

    A round's edges are a permutation without fixed points; all such permutations are equally
    likely.

    Args:
        num_workers: Number of workers; a single worker has no neighbors.
        period: Number of rounds drawn, at least 1; few rounds may not connect the graph.
        seed: Equal seeds produce equal graphs.

    Raises:
        ValueError: If a number is out of range, or the drawn graph is not connected.

    References:
        Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
        arXiv:1811.10792, have one peer per round; de Vos et al., "Epidemic Learning", NeurIPS
        2023, arXiv:2310.01972, draw graphs in which all degrees are equal (EL-Oracle).

    >>> rounds = random_one_peer(4, period=3, seed=0)
    >>> [rounds.out_neighbors(0, round) for round in range(4)]
    [(3,), (1,), (3,), (3,)]
    """
    check_range("num_workers", num_workers, "at least 1")
    check_range("period", period, "at least 1")
    draws = generator(seed, "random_one_peer")
    rounds = [_draw_receivers(num_workers, draws) for _ in range(period)]
    return _joined(
        f"random_one_peer({num_workers}, period={period}, seed={seed})",
        num_workers,
        rounds,
        "choose a longer period or another seed",
        remake=partial(_joined_among, partial(random_one_peer, seed=seed), period),
    )


def random_receivers(num_workers: int, num_receivers: int, period: int, seed: int) -> Topology:
    """In each round every worker sends to so many random others, each drawing on its own.

    The number of workers that it receives from varies, with `num_receivers` as its mean.

    Args:
        num_workers: Number of workers; a single worker has no neighbors.
        num_receivers: Receivers of each worker in a round, in ``1 .. num_workers - 1``; with a
            single worker, any number.
        period: Number of rounds drawn, at least 1; few rounds may not connect the graph.
        seed: Equal seeds produce equal graphs.

    Raises:
        ValueError: If a number is out of range, or the drawn graph is not connected.

    References:
        de Vos et al., "Epidemic Learning", NeurIPS 2023, arXiv:2310.01972 (EL-Local).

    >>> rounds = random_receivers(5, num_receivers=2, period=3, seed=0)
    >>> [rounds.out_neighbors(0, round) for round in range(4)]
    [(3, 4), (1, 3), (1, 3), (3, 4)]
    """
    check_range("num_workers", num_workers, "at least 1")
    check_range("period", period, "at least 1")
    if num_workers > 1 and not 1 <= num_receivers < num_workers:
        raise ValueError(
            f"num_receivers must be in 1..{num_workers - 1} for {num_workers} workers, got "
            f"{num_receivers}"
        )
    draws = generator(seed, "random_receivers")
    rounds = []
    for _ in range(period):
        edges = []
        for rank in range(num_workers):
            others = [other for other in range(num_workers) if other != rank]
            order = torch.randperm(len(others), generator=draws)[:num_receivers].tolist()
            edges += [(rank, others[place]) for place in order]
        rounds.append(edges)
    return _joined(
        f"random_receivers({num_workers}, num_receivers={num_receivers}, period={period}, "
        f"seed={seed})",
        num_workers,
        rounds,
        "choose a longer period, more receivers or another seed",
        remake=partial(_receivers_among, num_receivers, period, seed),
    )


def random_matching(num_workers: int, period: int, seed: int, num_peers: int = 1) -> Topology:
    """In each round every worker exchanges messages with one or two random other workers.

    A round's workers are put into a random order and, for one peer, paired along it; if their
    number is odd, the last one has no peer. For two peers, they form a ring in this order.

    Args:
        num_workers: Number of workers; a single worker has no neighbors.
        period: Number of rounds drawn, at least 1; few rounds may not connect the graph.
        seed: Equal seeds produce equal graphs.
        num_peers: 1 or 2.

    Raises:
        ValueError: If a number is out of range, or the drawn graph is not connected.

    References:
        Boyd et al., "Randomized Gossip Algorithms", IEEE Transactions on Information Theory
        2006, doi:10.1109/TIT.2006.874516, average random pairs.

    >>> pairs = random_matching(4, period=3, seed=0)
    >>> [pairs.out_neighbors(0, round) for round in range(3)]
    [(1,), (1,), (3,)]
    """
    check_range("num_workers", num_workers, "at least 1")
    check_range("period", period, "at least 1")
    if num_peers not in (1, 2):
        raise ValueError(f"num_peers must be 1 or 2, got {num_peers!r}")
    draws = generator(seed, "random_matching")
    rounds = []
    for _ in range(period):
        order = torch.randperm(num_workers, generator=draws).tolist()
        following = order[1:] + order[:1]
        pairs = list(zip(order, following, strict=True))
        if num_peers == 1:
            pairs = pairs[: num_workers - 1 : 2]
        # Two workers in a ring are each other's only peer, and one is its own.
        rounds.append({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})
    return _joined(
        f"random_matching({num_workers}, period={period}, seed={seed}, num_peers={num_peers})",
        num_workers,
        [sorted(edges) for edges in rounds],
        "choose a longer period or another seed",
        is_directed=False,
        remake=partial(
            _joined_among, partial(random_matching, seed=seed, num_peers=num_peers), period
        ),
    )


def intermittent(base: Topology, availability: float, period: int, seed: int) -> Topology:
    """A graph with random links: chance decides in each round whether a link is present.

    Both directions of an undirected link appear together.

    Args:
        base: Graph with all links; it may itself vary.
        availability: Probability of each link in a round, in (0, 1].
        period: Number of rounds drawn, at least 1; a multiple of the base's period.
        seed: Equal seeds produce equal graphs.

    Raises:
        ValueError: If a number is out of range, or the drawn graph is not connected.

    >>> from edgegossip.contract.topology import directed_ring
    >>> ring = intermittent(directed_ring(3), availability=0.5, period=4, seed=0)
    >>> [ring.out_neighbors(0, round) for round in range(4)]
    [(1,), (1,), (1,), ()]
    """
    check_range("period", period, "at least 1")
    check_range("availability", availability, "in (0, 1]")
    if period % base.period:
        raise ValueError(
            f"period must be a multiple of that of {base.name}, {base.period}, got {period}"
        )
    draws = generator(seed, "intermittent")
    rounds = []
    for round in range(period):
        edges = [
            (rank, neighbor)
            for rank in range(base.num_workers)
            for neighbor in base.out_neighbors(rank, round)
            if base.is_directed or rank < neighbor
        ]
        is_there = torch.rand(len(edges), generator=draws) < availability
        rounds.append([edges[place] for place in is_there.nonzero().flatten().tolist()])
    return _joined(
        f"intermittent({base.name}, availability={availability}, period={period}, seed={seed})",
        base.num_workers,
        rounds,
        "choose a longer period, a higher availability or another seed",
        is_directed=base.is_directed,
        remake=base.remake and partial(_intermittent_among, base, availability, period, seed),
    )


def _receivers_among(num_receivers: int, period: int, seed: int, num_workers: int) -> Topology:
    number = min(num_receivers, num_workers - 1)
    make = partial(random_receivers, num_receivers=number, seed=seed)
    return _joined_among(make, period, num_workers)


def _intermittent_among(
    base: Topology, availability: float, period: int, seed: int, num_workers: int
) -> Topology:
    assert base.remake is not None
    smaller = base.remake(num_workers)
    period = math.lcm(period, smaller.period)

    def make(_: int, period: int) -> Topology:
        return intermittent(smaller, availability, period, seed)

    return _joined_among(make, period, num_workers)


def _draw_receivers(num_workers: int, draws: torch.Generator) -> list[Edge]:
    """Draw a permutation without fixed points; about a third of all permutations have none."""
    if num_workers == 1:
        return []
    ranks = torch.arange(num_workers)
    receivers = ranks
    while bool((receivers == ranks).any()):
        receivers = torch.randperm(num_workers, generator=draws)
    return list(enumerate(receivers.tolist()))


def _joined(
    name: str,
    num_workers: int,
    rounds: Sequence[Sequence[Edge]],
    advice: str,
    *,
    is_directed: bool = True,
    remake: Callable[[int], Topology] | None = None,
) -> Topology:
    try:
        topology = from_edges_by_round(num_workers, rounds, is_directed)
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise ValueError(f"{name} is not connected: {reason}; {advice}") from None
    return replace(topology, name=name, remake=remake)
