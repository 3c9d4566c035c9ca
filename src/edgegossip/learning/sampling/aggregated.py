"""Aggregated data: a few points that represent many samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
        sums = torch.zeros(len(self.x), *values.shape[1:], dtype=torch.float64)
        sums.index_add_(0, self.subset_of, values.double())
        return (sums / self.sizes.view(-1, *(1 for _ in values.shape[1:]))).float()

    @property
    def sizes(self) -> Tensor:
        """Number of samples of each aggregated point, int64 [num_subsets]."""
        return self.subset_of.bincount(minlength=len(self.x))
