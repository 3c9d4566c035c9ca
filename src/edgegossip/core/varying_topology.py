"""Varying graphs, drawn at random once.

A drawn sequence repeats after its period, so every worker can compute the graph of each round
by itself. All workers must be able to reach each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from edgegossip.core.randomness import generator
from edgegossip.core.ranges import check_range
from edgegossip.core.topology import Edge, Topology, from_edges_by_round


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

    >>> from edgegossip.core.topology import directed_ring
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
    )


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
) -> Topology:
    try:
        topology = from_edges_by_round(num_workers, rounds, is_directed)
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise ValueError(f"{name} is not connected: {reason}; {advice}") from None
    return replace(topology, name=name)
