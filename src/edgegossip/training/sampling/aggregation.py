"""The data aggregator: many samples of a class become one aggregated point."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from edgegossip.contract.errors import DataError, unknown_name
from edgegossip.contract.randomness import derive_seed
from edgegossip.training.sampling.cancellation import check_cancellation
from edgegossip.training.sampling.division import (
    Division,
    GaussianMixture,
    KMeans,
    MedianSplit,
    RandomHyperplanes,
)
from edgegossip.training.sampling.reduction import (
    PCA,
    Fingerprint,
    Histogram,
    IncrementalSVD,
    Reduction,
    SingularValues,
    WholeDataSVD,
)


@dataclass(frozen=True, slots=True, eq=False)
class AggregatedData:
    """Aggregated points, and the samples that each point represents.

    Each sample is in exactly one subset, and each subset has at least one sample, all of one
    class.

    Attributes:
        x: Aggregated points, float32 ``[num_subsets, *sample_shape]``: the mean of a subset's
            original samples, in their units (0 .. 255 for uint8 pictures).
        y: The class of each aggregated point, int64 [num_subsets], ascending.
        subset_of: Index of the aggregated point of each sample, int64 [num_samples].

    >>> points = torch.tensor([[1.0], [8.0]])
    >>> aggregated = AggregatedData(points, torch.tensor([0, 1]), torch.tensor([0, 1, 0]))
    >>> aggregated.sizes, aggregated.ratio
    (tensor([2, 1]), 1.5)
    """

    x: Tensor
    y: Tensor
    subset_of: Tensor

    @property
    def num_samples(self) -> int:
        """Number of represented samples."""
        return len(self.subset_of)

    @property
    def ratio(self) -> float:
        """Aggregation ratio: mean number of samples per aggregated point."""
        return self.num_samples / len(self.x)

    def means(self, values: Tensor) -> Tensor:
        """Mean of the samples' values in each subset, float32 [num_subsets, ...].

        Args:
            values: Value of each sample, [num_samples, ...].
        """
        return _means(values, self.subset_of, len(self.x))

    def extended(self, part: Tensor, labels: Tensor) -> AggregatedData:
        """Let these points represent further samples: those of a class, in turn.

        Args:
            part: [num_samples] positions of the samples that were aggregated.
            labels: [n] class of each sample, aggregated or not; in a regression all equal.

        >>> x, y = torch.zeros(2, 1), torch.tensor([0, 0])
        >>> points = AggregatedData(x, y, subset_of=torch.tensor([0, 1]))
        >>> points.extended(torch.tensor([1, 3]), torch.zeros(5)).subset_of.tolist()
        [0, 0, 0, 1, 0]
        """
        subset_of = torch.full((len(labels),), -1)
        for label in labels[part].unique():  # type: ignore[no-untyped-call]
            own = self.subset_of[labels[part] == label].unique()  # type: ignore[no-untyped-call]
            members = (labels == label).nonzero()[:, 0]
            subset_of[members] = own[torch.arange(len(members)) % len(own)]
        subset_of[part] = self.subset_of
        # A class that none of the aggregated samples has is represented by any point.
        return replace(self, subset_of=subset_of.clamp(min=0))

    @property
    def sizes(self) -> Tensor:
        """Number of samples of each aggregated point, int64 [num_subsets]."""
        return self.subset_of.bincount(minlength=len(self.x))


@dataclass(frozen=True, kw_only=True)
class Aggregator:
    r"""Divide each class into subsets of similar samples, and take the mean of each subset.

    The aggregated point of subset :math:`X_i` is

    .. math:: a_i = \frac{1}{|X_i|} \sum_{x \in X_i} x

    over the original samples x; only the division uses reduced samples. The same samples and
    seed always give the same aggregated points.

    Args:
        reduction: Reduces many features to few.
        division: Divides the points of a class by their features.
        ratio: Samples per aggregated point, at least 1 (one point per sample). Classes with
            fewer samples have one point; otherwise the total number of subsets is
            num_samples / ratio, rounded.
        seed: Seeds the random draws in reduction and division.

    Raises:
        ValueError: If `ratio` is below 1 or not finite.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 2021, doi:10.1109/TPDS.2020.3046440, equation 1 and
        figure 4. `aggregator` gives the techniques tested there by name.

    >>> x = torch.tensor([[0, 0], [9, 9], [0, 1], [9, 8], [0, 2], [9, 7],
    ...                   [5, 5], [5, 0], [6, 5], [6, 0], [7, 5], [7, 0]]).float()
    >>> y = torch.tensor([0] * 6 + [1] * 6)
    >>> aggregated = aggregator("hash-kmeans", ratio=3).fit(x, y)
    >>> for point, label, size in zip(aggregated.x, aggregated.y, aggregated.sizes):
    ...     print(point.tolist(), int(label), int(size))
    [0.0, 1.0] 0 3
    [9.0, 8.0] 0 3
    [6.0, 5.0] 1 3
    [6.0, 0.0] 1 3
    """

    reduction: Reduction
    division: Division
    ratio: float = 10.0
    seed: int = 0
    flops_per_value: ClassVar[float] = 140

    def __post_init__(self) -> None:
        if not 1 <= self.ratio < math.inf:
            raise ValueError(
                f"ratio must be at least 1 and finite, got {self.ratio!r}; it counts the "
                "samples for each aggregated point, e.g. 10"
            )

    def fit(self, x: Tensor, y: Tensor) -> AggregatedData:
        """Aggregate the samples of one shard.

        Args:
            x: Pictures, uint8 [num_samples, channels, height, width], sensor windows, floats
                [num_samples, channels, time], or any other floats [num_samples, ...].
            y: Class of each sample, whole numbers [num_samples].

        Raises:
            ValueError: If types, shapes or lengths do not match, or there are no samples.
            DataError: If a value of `x` is not finite.
        """
        _validate(x, y)
        x, y = x.detach().cpu(), y.detach().cpu()
        labels, class_of, class_sizes = torch.unique(
            y.long(), return_inverse=True, return_counts=True
        )
        classes = torch.split(class_of.argsort(stable=True), class_sizes.tolist())
        num_subsets = self._subsets_of(class_sizes)
        largest = max(abs(float(bound)) for bound in x.aminmax())
        firsts = num_subsets.cumsum(0) - num_subsets
        subset_of = torch.empty(len(x), dtype=torch.int64)
        for samples, label, first, number in zip(
            classes, labels.tolist(), firsts.tolist(), num_subsets.tolist(), strict=True
        ):
            check_cancellation()
            points = (x[samples] / (largest or 1.0)).float()
            subset_of[samples] = first + self._divide(points, number, label)
        means = _means(x, subset_of, int(num_subsets.sum()))
        return AggregatedData(means, labels.repeat_interleave(num_subsets), subset_of)

    def num_flops(
        self, num_samples: int, sample_shape: tuple[int, ...], num_classes: int = 10
    ) -> float:
        """Cost of `fit`, as the FLOPs of training that takes the same time.

        The simulator divides this cost by a platform's FLOP/s in training to get the time of
        `fit`. The formulas count operations. Their constants were measured on one core that
        trains LeNet-5 on CIFAR-10 with batches of 64 at 2.1e10 FLOP/s. For 1,000 to 15,000
        samples of MNIST, CIFAR-10 and HAR, the cost is accurate to within a factor of 1.5
        (`benchmarks/aggregation.py`).

        Args:
            num_samples: Samples in the shard.
            sample_shape: Shape of one sample.
            num_classes: Classes in the shard, assumed to be of equal size.
        """
        num_points = num_samples / num_classes
        num_subsets = max(1.0, num_points / self.ratio)
        num_flops = self.flops_per_value * num_samples * math.prod(sample_shape)
        if 1 < num_subsets < num_points:
            num_flops += num_classes * (
                self.reduction.num_flops(num_points, sample_shape, num_subsets)
                + self.division.num_flops(num_points, num_subsets)
            )
        return num_flops

    def num_subsets(self, y: Tensor) -> int:
        """Number of subsets that `fit` makes of samples with classes `y`, [num_samples]."""
        return int(self._subsets_of(torch.unique(y, return_counts=True)[1]).sum())

    def _subsets_of(self, class_sizes: Tensor) -> Tensor:
        """Number of subsets of each class, without accumulated rounding errors."""
        ends = (class_sizes.cumsum(0).double() / self.ratio).round().long()
        return ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).clamp(min=1)

    def _divide(self, points: Tensor, num_subsets: int, label: int) -> Tensor:
        """The subset of each point of one class, int64 [num_points]."""
        if num_subsets == len(points):
            return torch.arange(len(points))
        if num_subsets == 1:
            return torch.zeros(len(points), dtype=torch.int64)
        seed = derive_seed(self.seed, "reduction", label)
        features = self.reduction(points, num_subsets, seed)
        return self.division(features, num_subsets, derive_seed(self.seed, "division", label))


@dataclass(frozen=True)
class Combination:
    """A reduction and a division.

    Args:
        reduction: Reduces many features to few.
        division: Divides the points of a class by their features.
        is_selected: Whether this is one of the three combinations that the paper selects.
    """

    reduction: Reduction
    division: Division
    is_selected: bool = False


COMBINATIONS = {
    "svd-kmeans": Combination(SingularValues(), KMeans(), is_selected=True),
    "isvd-lsh": Combination(IncrementalSVD(), MedianSplit(), is_selected=True),
    "hash-kmeans": Combination(Fingerprint(), KMeans(), is_selected=True),
    "svd-gmm": Combination(SingularValues(), GaussianMixture()),
    "pca-kmeans": Combination(PCA(), KMeans()),
    "pca-lsh": Combination(PCA(), MedianSplit()),
    "full-svd-lsh": Combination(WholeDataSVD(), MedianSplit()),
    "histogram-kmeans": Combination(Histogram(), KMeans()),
    "isvd-lsh-printed": Combination(IncrementalSVD(factors="printed"), RandomHyperplanes()),
}
"""Combinations that the EdgeGossip paper compares (its figure 3), by name, and another reading
of "isvd-lsh".
"""


def aggregator(name: str, ratio: float = 10.0, seed: int = 0) -> Aggregator:
    """Make the aggregator for a combination that the EdgeGossip paper compares.

    The paper selects the first three:

    - "svd-kmeans": 10 largest singular values of each picture; k-means with 20 iterations
    - "isvd-lsh": incremental SVD (a regularized factorization); balanced median split
    - "hash-kmeans": fingerprint of 10 cells; k-means
    - "svd-gmm": singular values; Gaussian mixture
    - "pca-kmeans" and "pca-lsh": PCA; k-means or balanced median split
    - "full-svd-lsh": SVD of all data at once; balanced median split
    - "histogram-kmeans": histogram; k-means
    - "isvd-lsh-printed": "isvd-lsh" to the letter, where ours follows the authors' earlier
      code: as many factors as the paper's formula gives; random hyperplanes as the hash

    Classes with fewer samples than `ratio` have one point each; with many samples, the ratio is
    met within 5 %. Other pairs from `edgegossip.training.sampling.reduction` and `division` can
    be combined by hand: ``Aggregator(reduction=Fingerprint(), division=MedianSplit())``.

    Args:
        name: Name of a combination of a reduction and a division.
        ratio: Samples per aggregated point, at least 1.
        seed: Seeds the random draws.

    Raises:
        ValueError: If the name is unknown, or `ratio` is below 1.

    >>> aggregator("svd-kmeans", ratio=5).division
    KMeans(num_iterations=20)
    """
    if name not in COMBINATIONS:
        raise ValueError(unknown_name("aggregator", name, COMBINATIONS))
    chosen = COMBINATIONS[name]
    return Aggregator(
        reduction=chosen.reduction, division=chosen.division, ratio=ratio, seed=seed
    )


def _means(values: Tensor, subset_of: Tensor, num_subsets: int) -> Tensor:
    """The mean of each subset, float32 [num_subsets, ...]."""
    sums = torch.zeros(num_subsets, *values.shape[1:], dtype=torch.float64)
    # In chunks, because doubles take eight times the memory of pictures.
    for some, subsets in zip(
        torch.split(values, 1024), torch.split(subset_of, 1024), strict=True
    ):
        check_cancellation()
        sums.index_add_(0, subsets, some.double())
    sizes = subset_of.bincount(minlength=num_subsets)
    return (sums / sizes.view(-1, *(1 for _ in values.shape[1:]))).float()


def _validate(x: Tensor, y: Tensor) -> None:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise ValueError(
            f"x and y must be tensors, got {type(x).__name__} and {type(y).__name__}; "
            "torch.as_tensor makes them of arrays"
        )
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise ValueError(f"x must be pictures (uint8) or floats, got {x.dtype}; convert it")
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(
            f"x must be [num_samples, ...] with at least one sample and one value in it, got "
            f"shape {list(x.shape)}; leave out workers without samples"
        )
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y must be whole numbers, one class a sample, got {y.dtype}")
    if y.shape != (len(x),):
        raise ValueError(
            f"y must have one class for each of the {len(x)} samples, got shape {list(y.shape)}"
        )
    is_finite = x.isfinite().flatten(1).all(dim=1)
    if not bool(is_finite.all()):
        raise DataError(
            f"sample {int(is_finite.logical_not().nonzero()[0])} of x has a value that is not "
            "finite (NaN or infinite); clean the data first"
        )
