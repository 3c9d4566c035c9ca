"""Dimensionality reduction: a few features for each point, for cheap division.

A reduction is called with the points of one class, float32 [num_points, *sample_shape] within
[-1, 1] (one scale for all classes), the number of subsets, and a seed. It returns
features, float32 [num_points, num_features], similar for similar points.

Some reductions need matrices: a picture [channels, height, width] is made gray, a sensor window
[channels, time] is already a matrix, and flat features fill a square, padded with zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from edgegossip.contract.ranges import check_choices, check_ranges
from edgegossip.training.sampling.cancellation import check_cancellation

Shape: TypeAlias = tuple[int, ...]
MAX_SEED = 2**32
"""Upper limit of scikit-learn's seeds."""


class Reduction(Protocol):
    """Implementations are frozen dataclasses of hyperparameters."""

    def __call__(self, points: Tensor, num_subsets: int, seed: int) -> Tensor:
        """Features, float32 [num_points, num_features], of the points of one class."""

    def num_flops(self, num_points: float, sample_shape: Shape, num_subsets: float) -> float:
        """Cost of a call, in training FLOPs: see `Aggregator.num_flops`."""


@dataclass(frozen=True)
class SingularValues:
    """The largest singular values of each point, viewed as a matrix.

    Args:
        num_features: Maximum number of values, further limited by a matrix's shorter side.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 2021, doi:10.1109/TPDS.2020.3046440: "SVD on single
        data points", 10 values, cost of order d^1.5 for a point of d attributes. The paper does
        not specify the treatment of a picture's channels; divisions based on gray pictures are
        as good as those based on stacked channels, and cost less.

    >>> points = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]) / 4
    >>> SingularValues()(points, num_subsets=1, seed=0)
    tensor([[1.0000, 0.7500]])
    """

    num_features: int = 10
    chunk_size: ClassVar[int] = 256
    flops_per_operation: ClassVar[float] = 170

    def __post_init__(self) -> None:
        check_ranges(self, num_features="at least 1")

    def __call__(self, points: Tensor, num_subsets: int, seed: int) -> Tensor:
        values = []
        for chunk in torch.split(points, self.chunk_size):
            check_cancellation()
            values.append(torch.linalg.svdvals(_matrices(chunk))[:, : self.num_features])
        return torch.cat(values)

    def num_flops(self, num_points: float, sample_shape: Shape, num_subsets: float) -> float:
        sides = _matrix_sides(sample_shape)
        # Between the number of multiplications, with min(sides) as a factor, and of entries.
        operations = sides[0] * sides[1] * math.sqrt(min(sides))
        return self.flops_per_operation * num_points * operations


@dataclass(frozen=True)
class IncrementalSVD:
    r"""Regularized factorization of a few attributes by gradient steps, factor by factor.

    Attribute :math:`j` of point :math:`i`, :math:`X_{ij}`, is predicted as
    :math:`\sum_f U_{fi} V_{fj}`, clipped to [-30, 30], with error :math:`e_{ij}`. Each factor
    :math:`f` in turn is fitted to its own share of the attributes, in ``num_passes`` passes
    over all points with the steps

    .. math:: U_{fi} \leftarrow U_{fi} + \eta \sum_j (e_{ij} V_{fj} - \lambda U_{fi}),
        \quad V_{fj} \leftarrow V_{fj} + \eta \sum_i (e_{ij} U_{fi} - \lambda V_{fj})

    The features of point i are :math:`U_{fi}`. The number of factors is the number of halvings
    that yield `num_subsets`, at least one; or, with `factors` "printed", the paper's
    :math:`\log_2(0.1 d / r)` for :math:`d` attributes and :math:`r` points per subset, rounded
    up.

    Args:
        attribute_share: Share of the attributes used for one factor, in (0, 1].
        lr: Step size :math:`\eta`.
        regularization: :math:`\lambda`.
        num_passes: Number of passes over all points, for each factor.
        block_size: Number of points whose steps are summed.
        factors: Rule for the number of factors: "halvings" or "printed".

    References:
        Han et al., "EdgeGossip", IEEE TPDS 2021, doi:10.1109/TPDS.2020.3046440, technique 2,
        with its step size, regularization, passes and share of attributes; the algorithm is
        that of the same group's SlimML (IncreSVD.scala).
        Departures: the number of factors is SlimML's, because the printed one has fewer
        halvings than there are subsets (3 instead of 8 for 150 subsets of MNIST). SlimML takes
        steps one entry (i, j) at a time. Here the steps of all attributes of a block of points
        are summed, which is equal to first order in the step size and about a hundred times as
        fast. In SlimML, a factor's attributes are in the blank border of MNIST; here they are
        spread over the whole point.
    """

    attribute_share: float = 0.01
    lr: float = 0.001
    regularization: float = 0.015
    num_passes: int = 20
    block_size: int = 64
    factors: Literal["halvings", "printed"] = "halvings"
    initial_value: ClassVar[float] = 0.1
    max_prediction: ClassVar[float] = 30.0
    flops_per_operation: ClassVar[float] = 93

    def __post_init__(self) -> None:
        check_ranges(self, num_passes="at least 1", block_size="at least 1")
        check_ranges(
            self,
            attribute_share="in (0, 1]",
            lr="above 0 and finite",
            regularization="at least 0 and finite",
        )
        check_choices(self, factors=("halvings", "printed"))

    def __call__(self, points: Tensor, num_subsets: int, seed: int) -> Tensor:
        attributes = points.flatten(1).numpy()
        num_points, num_attributes = attributes.shape
        num_factors = self._num_factors(num_points, num_attributes, num_subsets)
        u = np.full((num_factors, num_points), self.initial_value)
        v = np.full((num_factors, num_attributes), self.initial_value)
        for factor in range(num_factors):
            columns = self._columns(factor, num_attributes)
            others = np.delete(u, factor, axis=0).T @ np.delete(v, factor, axis=0)[:, columns]
            v[factor, columns] = self._fit_factor(
                u[factor], v[factor, columns], others, attributes[:, columns].astype(np.float64)
            )
        return torch.from_numpy(u.T.astype(np.float32))

    def _fit_factor(
        self,
        u: NDArray[np.float64],
        v: NDArray[np.float64],
        others: NDArray[np.float64],
        targets: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Change `u` [num_points] in place and return the new `v` [num_columns].

        `others` is the other factors' prediction of `targets`, [num_points, num_columns].
        """
        blocks = [
            slice(start, start + self.block_size) for start in range(0, len(u), self.block_size)
        ]
        for _ in range(self.num_passes):
            check_cancellation()
            for block in blocks:
                part = u[block]
                predicted = others[block] + np.outer(part, v)
                errors = targets[block] - predicted.clip(
                    -self.max_prediction, self.max_prediction
                )
                step = errors @ v - self.regularization * len(v) * part
                v = v + self.lr * (part @ errors - self.regularization * len(part) * v)
                u[block] = part + self.lr * step
        return v

    def num_flops(self, num_points: float, sample_shape: Shape, num_subsets: float) -> float:
        num_attributes = math.prod(sample_shape)
        num_columns = len(self._columns(0, num_attributes))
        num_blocks = math.ceil(num_points / self.block_size)
        # Each block has a fixed cost of 3,000 entries.
        operations = num_points * num_columns + 3000 * num_blocks
        num_factors = self._num_factors(num_points, num_attributes, math.ceil(num_subsets))
        return self.flops_per_operation * num_factors * self.num_passes * operations

    def _num_factors(self, num_points: float, num_attributes: int, num_subsets: int) -> int:
        number: float = num_subsets
        if self.factors == "printed":
            number = max(1.0, 0.1 * num_attributes * num_subsets / num_points)
        return max(1, math.ceil(math.log2(number)))

    def _columns(self, factor: int, num_attributes: int) -> NDArray[np.int64]:
        num_columns = max(1, round(self.attribute_share * num_attributes))
        spread = np.arange(num_columns) * num_attributes // num_columns
        return (factor + spread) % num_attributes


@dataclass(frozen=True)
class Fingerprint:
    """A real-valued hash: each point, viewed as a matrix, is averaged in 2 x 5 blocks.

    This is the block mean hash of pictures without the final reduction to bits, because ten
    bits have only 1024 values. The cost per point is proportional to its number of attributes.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 2021, doi:10.1109/TPDS.2020.3046440, technique 3,
        requires fingerprints of length 10 without naming the kind. Yang, Gu and Niu, "Block
        Mean Value Based Image Perceptual Hashing", IIH-MSP 2006.

    >>> picture = (torch.arange(40) % 2 / 2).view(1, 1, 4, 10)
    >>> Fingerprint()(picture, num_subsets=1, seed=0)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 0.2500, 0.2500,
             0.2500]])
    """

    blocks: ClassVar[tuple[int, int]] = (2, 5)
    flops_per_operation: ClassVar[float] = 20

    def __call__(self, points: Tensor, num_subsets: int, seed: int) -> Tensor:
        return F.adaptive_avg_pool2d(_matrices(points)[:, None], self.blocks).flatten(1)

    def num_flops(self, num_points: float, sample_shape: Shape, num_subsets: float) -> float:
        return self.flops_per_operation * num_points * math.prod(sample_shape)


@dataclass(frozen=True)
class Histogram:
    """Histogram of a point's attributes, in bins of equal width over the range of the class.

    >>> Histogram(num_features=2)(torch.tensor([[0.0, 0.1, 1.0]]), num_subsets=1, seed=0)
    tensor([[2., 1.]])
    """

    num_features: int = 10
    flops_per_operation: ClassVar[float] = 135

    def __post_init__(self) -> None:
        check_ranges(self, num_features="at least 1")

    def __call__(self, points: Tensor, num_subsets: int, seed: int) -> Tensor:
        attributes = points.flatten(1)
        low, high = attributes.aminmax()
        width = (high - low) / self.num_features
        bins = ((attributes - low) / width.where(width > 0, 1)).long()
        bins = bins.clamp_(max=self.num_features - 1)  # the largest value has no bin of its own
        counts = torch.zeros(len(points), self.num_features)
        return counts.scatter_add_(1, bins, torch.ones_like(attributes))

    def num_flops(self, num_points: float, sample_shape: Shape, num_subsets: float) -> float:
        return self.flops_per_operation * num_points * math.prod(sample_shape)


@dataclass(frozen=True)
class WholeDataSVD:
    """Coordinates along the first singular vectors of the matrix of all points of a class.

    Args:
        num_features: Maximum number, further limited by the numbers of points and attributes.

    References:
        Halko, Martinsson and Tropp, "Finding Structure with Randomness", SIAM Review 2011,
        arXiv:0909.4061, as in scikit-learn's `randomized_svd`.
    """

    num_features: int = 10
    is_centered: ClassVar[bool] = False
    flops_per_operation: ClassVar[float] = 40

    def __post_init__(self) -> None:
        check_ranges(self, num_features="at least 1")

    def __call__(self, points: Tensor, num_subsets: int, seed: int) -> Tensor:
        from sklearn.utils.extmath import randomized_svd  # slow: see `AccuracyAware`

        attributes = points.flatten(1)
        if self.is_centered:
            attributes = attributes - attributes.mean(dim=0)
        u, values, _ = randomized_svd(
            attributes.numpy(),
            n_components=min(self.num_features, *attributes.shape),
            random_state=seed % MAX_SEED,
        )
        return torch.from_numpy((u * values).astype(np.float32))

    def num_flops(self, num_points: float, sample_shape: Shape, num_subsets: float) -> float:
        # Each call has a fixed cost of 800,000 products.
        operations = num_points * math.prod(sample_shape) * self.num_features + 800_000
        return self.flops_per_operation * operations


@dataclass(frozen=True)
class PCA(WholeDataSVD):
    """Principal components: coordinates with the largest variance in a class.

    >>> line = torch.tensor([[0.0, 0.0], [0.3, 0.4], [0.6, 0.8]])
    >>> PCA(num_features=1)(line, num_subsets=1, seed=0).abs()
    tensor([[0.5000],
            [0.0000],
            [0.5000]])
    """

    is_centered = True


def _matrices(points: Tensor) -> Tensor:
    """Each point as a matrix, [num_points, *_matrix_sides(sample_shape)]."""
    if points.ndim > 2:
        return points.mean(dim=tuple(range(1, points.ndim - 2))) if points.ndim > 3 else points
    side, _ = _matrix_sides(tuple(points.shape[1:]))
    return F.pad(points, (0, side**2 - points.shape[1])).view(-1, side, side)


def _matrix_sides(sample_shape: Shape) -> tuple[int, int]:
    if len(sample_shape) > 1:
        return sample_shape[-2], sample_shape[-1]
    side = math.isqrt(sample_shape[0] - 1) + 1
    return side, side
