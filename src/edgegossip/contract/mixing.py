"""Mixing: the weights that a worker gives to itself and to its neighbors.

Convention: ``W[i, j]`` is the weight that worker i gives to the parameters of j, so a row
belongs to a receiver. A rule computes one row at a time, from what a worker and its neighbors
know; only analysis builds the whole matrix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from edgegossip.contract.topology import RemainingTopology, Topology, WeightedTopology


class MixingRule(ABC):
    """Rule for weights of a worker and its neighbors; implementations are frozen dataclasses.

    Attributes:
        has_averaging_rows: Whether each row adds up to 1, so that mixing does not change
            workers that agree.
    """

    has_averaging_rows: ClassVar[bool] = True

    def weights(
        self, topology: Topology, rank: int, round: int, absent: Collection[int] = ()
    ) -> Mapping[int, float]:
        """Row `rank` of the mixing matrix in `round`: ranks, ascending, and their weights.

        The row holds `rank` and its in-neighbors. Rows are read-only, and cached unless workers
        are absent.

        Args:
            topology: The communication graph.
            rank: The receiver.
            round: Number of the round.
            absent: Workers that do not take part; the row is that of the graph without them.

        Raises:
            ValueError: If the rule does not fit the topology.
        """
        round %= topology.period
        if absent:  # too many sets of workers may be absent in a long run
            return dict(sorted(self._row(topology.without(absent), rank, round).items()))
        return _kept_row(self, topology, rank, round)

    @abstractmethod
    def _row(self, topology: Topology, rank: int, round: int) -> dict[int, float]:
        """Compute the weights, in any order of ranks."""


# Holds every row of 10,000 workers on a one-peer exponential graph (period 14). The cache is
# here so that topology and rule stay plain values to copy, compare and pickle.
@lru_cache(maxsize=2**18)
def _kept_row(
    rule: MixingRule, topology: Topology, rank: int, round: int
) -> Mapping[int, float]:
    return MappingProxyType(dict(sorted(rule._row(topology, rank, round).items())))


@dataclass(frozen=True)
class MetropolisHastings(MixingRule):
    """Weights for undirected topologies: ``W[i, j] = 1 / (1 + max(degree_i, degree_j))``.

    A worker keeps the remaining weight itself. W is symmetric and doubly stochastic, so mixing
    never changes the workers' mean.

    References:
        Xiao, Boyd & Kim, "Distributed average consensus with least-mean-square deviation",
        Journal of Parallel and Distributed Computing 2007, doi:10.1016/j.jpdc.2006.08.010.

    >>> from edgegossip.contract.topology import star
    >>> dict(MetropolisHastings().weights(star(4), rank=3, round=0))
    {0: 0.25, 3: 0.75}
    """

    def _row(self, topology: Topology, rank: int, round: int) -> dict[int, float]:
        if topology.is_directed:
            raise ValueError(
                f"MetropolisHastings needs an undirected topology, got {topology!r}; choose an "
                "undirected one, or ColumnStochastic() with a push-sum algorithm"
            )
        degree = topology.out_degree(rank, round)
        row = {
            neighbor: 1 / (1 + max(degree, topology.out_degree(neighbor, round)))
            for neighbor in topology.in_neighbors(rank, round)
        }
        row[rank] = 1 - math.fsum(row.values())
        return row


@dataclass(frozen=True)
class Uniform(MixingRule):
    """Equal weights for a worker and its in-neighbors: ``W[i, j] = 1 / (1 + in_degree_i)``.

    W is row stochastic: mixing does not change workers that agree. If all degrees are equal, W
    is also doubly stochastic; otherwise workers with many out-neighbors pull the mean toward
    them.

    >>> from edgegossip.contract.topology import star
    >>> dict(Uniform().weights(star(4), rank=3, round=0))
    {0: 0.5, 3: 0.5}
    """

    def _row(self, topology: Topology, rank: int, round: int) -> dict[int, float]:
        ranks = [*topology.in_neighbors(rank, round), rank]
        return dict.fromkeys(ranks, 1 / len(ranks))


@dataclass(frozen=True)
class EdgeWeights(MixingRule):
    """The weights that the topology itself has for its edges, as `base_graph` does.

    A worker keeps the remaining weight itself. W is symmetric and doubly stochastic, so mixing
    never changes the workers' mean. A worker also keeps the weight of an absent neighbor: the
    mean of those present is kept, but no longer reached within a period.

    >>> from edgegossip.contract.base_graph import base_graph
    >>> graph = base_graph(5, max_degree=1)
    >>> dict(EdgeWeights().weights(graph, rank=4, round=2))
    {0: 0.8, 4: 0.19999999999999996}
    """

    def _row(self, topology: Topology, rank: int, round: int) -> dict[int, float]:
        whole = topology
        while isinstance(whole, RemainingTopology):
            whole = whole.whole
        if not isinstance(whole, WeightedTopology):
            raise ValueError(
                f"EdgeWeights needs a topology with weights, such as base_graph(8, 1), got "
                f"{topology!r}; choose MetropolisHastings() for one without"
            )
        weights = whole.edge_weights[round % whole.period]
        row = {
            neighbor: weights[min(rank, neighbor), max(rank, neighbor)]
            for neighbor in topology.in_neighbors(rank, round)
        }
        row[rank] = 1 - math.fsum(row.values())
        return row


@dataclass(frozen=True)
class ColumnStochastic(MixingRule):
    """A sender splits its mass evenly over its out-neighbors and itself: push-sum.

    ``W[i, j] = 1 / (1 + out_degree_j)``. W is column stochastic, so mixing keeps the sum over
    all workers on any directed topology. Worker j keeps the same share that it sends to each
    out-neighbor, ``weights(topology, j, round)[j]``.

    References:
        Kempe, Dobra & Gehrke, "Gossip-Based Computation of Aggregate Information", FOCS 2003;
        Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
        arXiv:1811.10792.

    >>> from edgegossip.contract.topology import star
    >>> dict(ColumnStochastic().weights(star(4), rank=3, round=0))
    {0: 0.25, 3: 0.5}
    """

    has_averaging_rows = False

    def _row(self, topology: Topology, rank: int, round: int) -> dict[int, float]:
        ranks = [*topology.in_neighbors(rank, round), rank]
        return {sender: 1 / (1 + topology.out_degree(sender, round)) for sender in ranks}


def mixing_matrix(topology: Topology, rule: MixingRule, round: int = 0) -> Tensor:
    """The matrix W of `round`, [num_workers, num_workers], float64; for analysis and tests.

    Raises:
        ValueError: If the rule does not fit the topology.

    >>> from edgegossip.contract.topology import directed_ring
    >>> mixing_matrix(directed_ring(3), Uniform())
    tensor([[0.5000, 0.0000, 0.5000],
            [0.5000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.5000]], dtype=torch.float64)
    """
    matrix = torch.zeros(topology.num_workers, topology.num_workers, dtype=torch.float64)
    for rank in range(topology.num_workers):
        row = rule.weights(topology, rank, round)
        matrix[rank, list(row)] = torch.tensor(list(row.values()), dtype=torch.float64)
    return matrix


def spectral_gap(*matrices: Tensor) -> float:
    r"""Speed of agreement per round of mixing, in [0, 1]; 1 means agreement within a period.

    For one matrix this is :math:`1 - |\lambda_2|`, where :math:`\lambda_2` is the eigenvalue
    with the second-largest modulus. For matrices used in sequence, the gap is computed from
    their product over the period: :math:`1 - |\lambda_2(W_p \cdots W_1)|^{1/p}`. A single
    worker has gap 1.

    Args:
        matrices: One mixing matrix for each round of a period, [num_workers, num_workers].

    >>> from edgegossip.contract.topology import ring
    >>> f"{spectral_gap(mixing_matrix(ring(4), MetropolisHastings())):.3f}"
    '0.667'
    """
    product = matrices[0]
    for matrix in matrices[1:]:
        product = matrix @ product
    if len(product) == 1:
        return 1.0
    is_symmetric = torch.equal(product, product.T)
    eigenvalues = (
        torch.linalg.eigvalsh(product) if is_symmetric else torch.linalg.eigvals(product)
    )
    second = float(eigenvalues.abs().sort(descending=True).values[1])
    return max(0.0, 1 - math.pow(second, 1 / len(matrices)))  # rounding may exceed modulus 1


def is_row_stochastic(matrix: Tensor) -> bool:
    """Whether no entry is negative and each row sums to 1; mixing then keeps agreement.

    >>> is_row_stochastic(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
    True
    """
    sums = matrix.sum(dim=1)
    return bool((matrix >= 0).all()) and torch.allclose(sums, torch.ones_like(sums))


def is_column_stochastic(matrix: Tensor) -> bool:
    """Whether no entry is negative and each column sums to 1; mixing then keeps the sum.

    >>> is_column_stochastic(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
    False
    """
    return is_row_stochastic(matrix.T)


def is_doubly_stochastic(matrix: Tensor) -> bool:
    """Whether no entry is negative and rows and columns sum to 1; mixing then keeps the mean.

    >>> is_doubly_stochastic(torch.tensor([[0.75, 0.25], [0.25, 0.75]]))
    True
    """
    return is_row_stochastic(matrix) and is_column_stochastic(matrix)
