"""The Base-(k+1) graph: few neighbors per round, and the exact mean after finitely many rounds.

Each round is a dictionary of weights by edge (i, j), i < j. Three constructions build on each
other: hyper-hypercubes, the simple Base-(k+1) graph and the Base-(k+1) graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import combinations, pairwise, zip_longest

from edgegossip.contract.ranges import check_range
from edgegossip.contract.topology import Edge, Topology, weighted

Weights = dict[Edge, float]


def base_graph(num_workers: int, max_degree: int) -> Topology:
    r"""Graphs after which all workers have the exact mean, for any number of workers.

    Use it with the rule `EdgeWeights`: exactness needs the weights of the construction. With
    `MetropolisHastings`, the mean is kept, but workers only come close to it, unless
    `num_workers` is a product of factors of at most ``max_degree + 1``.

    The period is at most :math:`2 \log_{k+1} n + 2` rounds for :math:`n` workers and
    `max_degree` :math:`k`; if :math:`n` is a power of :math:`k + 1`, it is
    :math:`\log_{k+1} n`. The mean is exact at the end of each period, but not always after as
    many rounds from another start.

    Args:
        num_workers: Number of workers, :math:`n`; a single worker has no neighbors.
        max_degree: Maximum number of neighbors in a round, :math:`k`, at least 1.

    Raises:
        ValueError: If a number is below 1.

    References:
        Takezawa et al., "Beyond Exponential Graph: Communication-Efficient Topologies for
        Decentralized Learning via Finite-time Convergence", NeurIPS 2023, arXiv:2305.11420.
        The paper's hyper-hypercube, simple Base-(k+1) graph and Base-(k+1) graph are built as
        there; where two decompositions have equally few factors, the order may differ.

    >>> graph = base_graph(3, max_degree=1)
    >>> [graph.out_neighbors(2, round) for round in range(graph.period)]
    [(), (0,), ()]
    """
    check_range("num_workers", num_workers, "at least 1")
    check_range("max_degree", max_degree, "at least 1")
    base = max_degree + 1
    ranks = range(num_workers)
    smooth = _smooth_part(num_workers, base)
    rest = num_workers // smooth
    # Simple graphs within `smooth` groups, then hyper-hypercubes with a member of each group.
    within = _side_by_side(_simple(ranks[i : i + rest], base) for i in ranks[::rest])
    across = _side_by_side(_cube(ranks[j::rest], base) for j in range(rest))
    rounds = min(_simple(ranks, base), [*within, *across], key=len)
    name = f"base_graph({num_workers}, max_degree={max_degree})"
    remake = partial(base_graph, max_degree=max_degree)
    return weighted(name, num_workers, rounds or [{}], remake)


def _simple(members: Sequence[int], base: int) -> list[Weights]:
    """The simple Base-(k+1) graph of `members`, with `base` = k + 1."""
    if _factors(len(members), base) is not None:
        return _cube(members, base)
    # The number of members in digits of `base`: a part for each digit that is not 0, which
    # consists of so many blocks of equal size, a power of `base`.
    parts: list[list[Sequence[int]]] = []
    placed, block = 0, base ** _largest_power(len(members), base)
    while placed < len(members):
        blocks = (len(members) - placed) // block
        ends = [placed + i * block for i in range(blocks + 1)]
        if blocks:
            parts.append([members[i:j] for i, j in pairwise(ends)])
        placed, block = ends[-1], block // base
    wholes = [[rank for block in part for rank in block] for part in parts]
    # 1. Every part averages within itself.
    own = [_cube(whole, base) for whole in wholes]
    rounds = [_merged(_turn(cube, k) for cube in own) for k in range(len(own[0]))]
    # 2. Part after part passes its mean on to all later parts. From then on, each of its blocks
    #    has the mean of all, but its members differ: 3. they average within their block.
    within = [
        _side_by_side(_cube(block, base) for block in part) if len(part[0]) > 1 else cube
        for part, cube in zip(parts, own, strict=True)
    ]
    for step in range(1 + len(within[0])):
        pieces = []
        is_passing = step < len(parts) - 1
        if is_passing:
            pieces.append(_passing_on(parts[step], wholes[step:], base))
        # A part that is ready early repeats its rounds: this changes no mean, and brings
        # together what its members have learnt since.
        ready = range(step if is_passing else len(parts))
        pieces += [_turn(within[place], step - place - 1) for place in ready]
        rounds.append(_merged(pieces))
    return rounds


def _passing_on(
    blocks: Sequence[Sequence[int]], wholes: Sequence[Sequence[int]], base: int
) -> Weights:
    """Each member of a later part exchanges with one member of each block of the first part.

    All members of a part are equal. These weights give the later parts the mean that they would
    have together with the first part, and each block of the first part the same mean.
    """
    later = [rank for whole in wholes[1:] for rank in whole]
    share = len(wholes[0]) / (len(wholes[0]) + len(later)) / len(blocks)
    weights = {(block[i], rank): share for block in blocks for i, rank in enumerate(later)}
    # The other members of the first part have nothing to do: groups of them average.
    idle = [rank for block in blocks for rank in block[len(later) :]]
    for place in range(0, len(idle), base):
        weights |= _average(idle[place : place + base])
    return weights


def _cube(members: Sequence[int], base: int) -> list[Weights]:
    """The hyper-hypercube: groups of members that differ in one mixed-radix digit average."""
    rounds, stride = [], 1
    factors = _factors(len(members), base)
    assert factors is not None, "the number of members has a prime factor above the base"
    for size in factors:
        starts = [i for i in range(len(members)) if i // stride % size == 0]
        groups = (members[i : i + stride * size : stride] for i in starts)
        rounds.append(_merged(_average(group) for group in groups))
        stride *= size
    return rounds


def _average(group: Sequence[int]) -> Weights:
    return dict.fromkeys(combinations(group, 2), 1 / len(group))


def _turn(rounds: Sequence[Weights], k: int) -> Weights:
    return rounds[k % len(rounds)] if rounds else {}


def _side_by_side(graphs: Iterable[list[Weights]]) -> list[Weights]:
    """One sequence of graphs over separate workers, from several."""
    return [_merged(pieces) for pieces in zip_longest(*graphs, fillvalue={})]


def _merged(pieces: Iterable[Weights]) -> Weights:
    return {edge: weight for piece in pieces for edge, weight in piece.items()}


def _largest_power(number: int, base: int) -> int:
    """The largest p with ``base ** p <= number``; a logarithm might be rounded down."""
    power = 0
    while base ** (power + 1) <= number:
        power += 1
    return power


def _smooth_part(number: int, base: int) -> int:
    """The largest divisor of `number` without a prime factor above `base`."""
    part = 1
    while (common := math.gcd(number // part, math.factorial(base))) > 1:
        part *= common
    return part


@cache
def _factors(number: int, largest: int) -> tuple[int, ...] | None:
    """The fewest factors of `number` in 2 .. `largest`, descending; None if there are none."""
    if number == 1:
        return ()
    found = [
        (factor, *rest)
        for factor in range(min(number, largest), 1, -1)
        if number % factor == 0 and (rest := _factors(number // factor, factor)) is not None
    ]
    return min(found, key=len, default=None)
