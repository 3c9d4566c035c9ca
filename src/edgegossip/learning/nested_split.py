"""Splits whose samples are nested tensors and have no class."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset, IterableDataset, default_collate

from edgegossip.core.errors import DataError
from edgegossip.learning.nested import Nested, map_leaves, num_samples

Collate: TypeAlias = Callable[[list[Any]], Nested]
"""Makes a batch of nested tensors from a list of samples."""


class NestedSplit:
    """Samples in memory: nested tensors whose first dimension indexes the samples.

    Args:
        samples: Tensors in dicts, tuples and lists, nested in any way, e.g. a pair (x, y), or
            the fields that a tokenizer returns.

    Raises:
        DataError: If `samples` holds anything but tensors, or tensors differ in length.

    >>> split = NestedSplit({"ids": torch.arange(6).view(3, 2), "mask": torch.ones(3, 2)})
    >>> len(split), split.batch(torch.tensor([2]))["ids"]
    (3, tensor([[4, 5]]))
    """

    def __init__(self, samples: Nested) -> None:
        self._num_samples = num_samples(samples)
        self.samples = map_leaves(lambda leaf: leaf, samples)

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, indices: Tensor) -> Nested:
        """Take the samples at `indices`, int64 [batch]."""
        return map_leaves(lambda leaf: leaf.index_select(0, indices), self.samples)

    @property
    def labels(self) -> Tensor:
        """Zeros, as if all samples were of one class."""
        return torch.zeros(len(self), dtype=torch.int64)


class CollatedSplit:
    """Samples of any map-style `torch.utils.data.Dataset`, collated into nested batches.

    The data set's transforms run whenever a sample is read.

    Args:
        dataset: Yields samples of one structure, e.g. dicts of tensors.
        collate: Makes a batch from a list of samples; by default PyTorch's.
    """

    def __init__(self, dataset: TorchDataset[Any], collate: Collate = default_collate) -> None:
        self._dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return len(cast("Sized", self._dataset))

    def batch(self, indices: Tensor) -> Nested:
        """Read and collate the samples at `indices`, int64 [batch].

        Raises:
            DataError: If the samples do not form a batch.
        """
        samples = fetch(self._dataset, indices)
        try:
            batch = self._collate(samples)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"samples {_shown(indices)} do not make a batch ({reason:.200}); give all of "
                "them one structure and shape, or from_torch a collate function that pads them"
            ) from error
        if (found := num_samples(batch)) != len(indices):
            raise DataError(
                f"collate made a batch of {found} out of {len(indices)} samples; it must keep "
                "them all"
            )
        return batch

    @property
    def labels(self) -> Tensor:
        """Zeros, as if all samples were of one class."""
        return torch.zeros(len(self), dtype=torch.int64)


def require_map_style(name: str, dataset: object) -> None:
    """Check that samples can be counted, and read by number.

    Args:
        name: Name for messages.
        dataset: Any object.

    Raises:
        DataError: If `dataset` is not a map-style data set, such as an iterable one.
    """
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        raise DataError(
            f"{name}: {type(dataset).__name__} is not a map-style data set, with __len__ and "
            "__getitem__; give from_torch such a data set (not its loader), or from_tensors "
            "all samples"
        )


def fetch(dataset: TorchDataset[Any], indices: Tensor) -> list[Any]:
    """Read samples, all at once if the data set supports it (``__getitems__``)."""
    all_at_once = getattr(dataset, "__getitems__", None)
    if all_at_once is not None:
        return list(all_at_once(indices.tolist()))
    return [dataset[index] for index in indices.tolist()]


def _shown(indices: Tensor) -> Sequence[int]:
    return indices[:4].tolist()
