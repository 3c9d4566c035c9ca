"""Division: cut the points of one class into subsets of similar points.

A division is called with features, float32 [num_points, num_features], with
1 < num_subsets < num_points, and with a seed. It returns the subset of each point, int64
[num_points] in 0 .. num_subsets - 1, without empty subsets.
"""

from __future__ import annotations

import heapq
import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from edgegossip.contract.randomness import generator
from edgegossip.contract.ranges import check_ranges
from edgegossip.training.sampling.cancellation import check_cancellation
from edgegossip.training.sampling.reduction import MAX_SEED


class Division(Protocol):
    """Implementations are frozen dataclasses of hyperparameters."""

    def __call__(self, features: Tensor, num_subsets: int, seed: int) -> Tensor:
        """The subset of each point, int64 [num_points]."""

    def num_flops(self, num_points: float, num_subsets: float) -> float:
        """Cost of a call, in training FLOPs: see `Aggregator.num_flops`."""


@dataclass(frozen=True)
class KMeans:
    """Lloyd's k-means from k-means++ centroids; an empty cluster takes half of the largest.

    scikit-learn's k-means is not used: its sums depend on the number of threads, it warns about
    duplicates, and with one thread it is not faster.

    Args:
        num_iterations: Number of iterations.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 2021, doi:10.1109/TPDS.2020.3046440: 20 iterations.
        Arthur and Vassilvitskii, "k-means++: The Advantages of Careful Seeding", SODA 2007.
    """

    num_iterations: int = 20
    chunk_size: ClassVar[int] = 1024
    flops_per_operation: ClassVar[float] = 100

    def __post_init__(self) -> None:
        check_ranges(self, num_iterations="at least 1")

    def __call__(self, features: Tensor, num_subsets: int, seed: int) -> Tensor:
        from sklearn.cluster import kmeans_plusplus  # slow: see `AccuracyAware`

        features = features - features.mean(dim=0)  # small numbers lose less in distances
        initial, _ = kmeans_plusplus(
            features.numpy(), num_subsets, random_state=_AskingDraws(seed % MAX_SEED)
        )
        centroids = torch.from_numpy(initial)
        for _ in range(self.num_iterations):
            nearest = self._nearest(features, centroids)
            sizes = nearest.bincount(minlength=num_subsets)[:, None]
            sums = torch.zeros_like(centroids).index_add_(0, nearest, features)
            centroids = torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)
        return split_largest(self._nearest(features, centroids), features, num_subsets)

    def _nearest(self, features: Tensor, centroids: Tensor) -> Tensor:
        """The centroid nearest to each point, by ``|c|^2 - 2 c x``."""
        squares = centroids.square().sum(dim=1)
        nearest = []
        for chunk in torch.split(features, self.chunk_size):
            check_cancellation()
            nearest.append(torch.addmm(squares, chunk, centroids.T, alpha=-2).argmin(dim=1))
        return torch.cat(nearest)

    def num_flops(self, num_points: float, num_subsets: float) -> float:
        # k-means++ tries 2 + log(num_subsets) candidates for each centroid; each centroid and
        # each iteration has a fixed cost of 30,000 distances.
        num_passes = self.num_iterations + 2 + math.log(num_subsets)
        operations = num_points * num_subsets * num_passes
        operations += 30_000 * (num_subsets + self.num_iterations)
        return self.flops_per_operation * operations


@dataclass(frozen=True)
class MedianSplit:
    """Locality-sensitive hashing into buckets of equal size, by recursive halving.

    Points are sorted by the first feature and cut in two, each part by the second feature, and
    so on, cyclically. A part with an odd number of buckets is cut in proportion, so any number
    of buckets is met exactly and bucket sizes differ by at most one.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 2021, doi:10.1109/TPDS.2020.3046440, technique 2,
        interpreted as in the same group's SlimML (ZFHashLayer.scala), which supports only
        powers of two.

    >>> MedianSplit()(torch.tensor([[3.0], [1.0], [2.0], [4.0], [9.0]]), num_subsets=2, seed=0)
    tensor([1, 0, 0, 1, 1])
    """

    flops_per_operation: ClassVar[float] = 6.1e5

    def __call__(self, features: Tensor, num_subsets: int, seed: int) -> Tensor:
        subset_of = torch.empty(len(features), dtype=torch.int64)
        # (points, first bucket, number of buckets, level)
        parts = [(torch.arange(len(features)), 0, num_subsets, 0)]
        while parts:
            check_cancellation()
            points, first, num_buckets, level = parts.pop()
            if num_buckets == 1:
                subset_of[points] = first
                continue
            keys = features[points, level % features.shape[1]]
            points = points[keys.argsort(stable=True)]
            half = num_buckets // 2
            cut = len(points) * half // num_buckets
            parts.append((points[:cut], first, half, level + 1))
            parts.append((points[cut:], first + half, num_buckets - half, level + 1))
        return subset_of

    def num_flops(self, num_points: float, num_subsets: float) -> float:
        # A cut itself costs more than handling its points.
        return self.flops_per_operation * (num_subsets + num_points / 100)


@dataclass(frozen=True)
class RandomHyperplanes:
    """Locality-sensitive hashing by sides of random hyperplanes through the mean point.

    It uses as many planes as the number of buckets allows, and then halves the largest bucket
    until the number is right.

    References:
        Charikar, "Similarity Estimation Techniques from Rounding Algorithms", STOC 2002.
    """

    flops_per_operation: ClassVar[float] = 5.2e5

    def __call__(self, features: Tensor, num_subsets: int, seed: int) -> Tensor:
        num_planes = num_subsets.bit_length() - 1
        random = generator(seed, "hyperplanes")
        normals = torch.randn(features.shape[1], num_planes, generator=random)
        sides = (features - features.mean(dim=0)) @ normals > 0
        buckets = (sides * 2 ** torch.arange(num_planes)).sum(dim=1)
        return split_largest(buckets, features, num_subsets)

    def num_flops(self, num_points: float, num_subsets: float) -> float:
        return self.flops_per_operation * (num_subsets + num_points / 100)


@dataclass(frozen=True)
class GaussianMixture:
    """Most likely component of a mixture of Gaussians with diagonal covariance.

    Args:
        num_iterations: Maximum number of steps of expectation maximization.

    References:
        Dempster, Laird and Rubin, "Maximum Likelihood from Incomplete Data via the EM
        Algorithm", Journal of the Royal Statistical Society B 1977, as in scikit-learn.
    """

    num_iterations: int = 20
    flops_per_operation: ClassVar[float] = 840

    def __post_init__(self) -> None:
        check_ranges(self, num_iterations="at least 1")

    def __call__(self, features: Tensor, num_subsets: int, seed: int) -> Tensor:
        from sklearn.exceptions import ConvergenceWarning

        mixture = _cancellable_mixture(
            num_subsets,
            covariance_type="diag",
            max_iter=self.num_iterations,
            init_params="k-means++",
            random_state=_AskingDraws(seed % MAX_SEED),
        )
        scale = features.std()
        standardized = (features - features.mean(dim=0)) / scale.where(scale > 0, 1)
        with warnings.catch_warnings():
            # Stopping early is what was asked for.
            warnings.simplefilter("ignore", ConvergenceWarning)
            components = mixture.fit_predict(standardized.double().numpy())
        return split_largest(torch.from_numpy(components), features, num_subsets)

    def num_flops(self, num_points: float, num_subsets: float) -> float:
        operations = num_points * num_subsets * self.num_iterations
        operations += 5000 * (num_subsets + self.num_iterations)
        return self.flops_per_operation * operations


def split_largest(subset_of: Tensor, features: Tensor, num_subsets: int) -> Tensor:
    """Halve the largest subset until there are `num_subsets`, and number them without gaps.

    A subset is cut at the median of its most variable feature.

    Args:
        subset_of: The subset of each point, int64 [num_points]; at most num_subsets subsets.
        features: [num_points, num_features].
        num_subsets: Number of subsets, at most num_points.

    >>> split_largest(torch.tensor([7, 7, 7, 2]), torch.tensor([[5.0], [1.0], [4.0], [9.0]]), 3)
    tensor([2, 1, 1, 0])
    """
    _, subset_of = torch.unique(subset_of, return_inverse=True)
    order, sizes = subset_of.argsort(stable=True), subset_of.bincount()
    num_found = len(sizes)
    # The numbers, all different, settle ties.
    heap = [
        (-len(points), number, points)
        for number, points in enumerate(torch.split(order, sizes.tolist()))
    ]
    heapq.heapify(heap)
    for number in range(num_found, num_subsets):
        check_cancellation()
        _, kept, points = heapq.heappop(heap)
        widest = features[points].var(dim=0, correction=0).argmax()
        points = points[features[points, widest].argsort(stable=True)]
        low, high = points.tensor_split(2)
        subset_of[high] = number
        heapq.heappush(heap, (-len(low), kept, low))
        heapq.heappush(heap, (-len(high), number, high))
    return subset_of


# scikit-learn cannot be stopped, but calls these between two steps. If a version does not,
# results are the same, and a canceled computation stops only after the current class.


class _AskingDraws(np.random.RandomState):
    """NumPy's random numbers, with a check before each draw; k-means++ draws per centroid."""

    def uniform(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        check_cancellation()
        return super().uniform(*arguments, **named)


def _cancellable_mixture(num_components: int, **settings: Any) -> Any:  # noqa: ANN401
    """scikit-learn's mixture, with a check in each step of expectation maximization."""
    from sklearn.mixture import GaussianMixture as SklearnMixture

    class AskingMixture(SklearnMixture):  # type: ignore[misc]
        def _m_step(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            check_cancellation()
            return super()._m_step(*arguments, **named)

    return AskingMixture(num_components, **settings)
