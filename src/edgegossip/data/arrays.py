"""Arrays mapped from files: their places in the files, and reads of only the needed parts."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgegossip.contract.errors import DataError
from edgegossip.contract.ranges import check_range
from edgegossip.data.dataset import Dataset, PooledSplit, Split, without_classes
from edgegossip.data.nested import Nested, map_leaves, num_samples


@dataclass(frozen=True)
class MappedFile:
    """The place of a mapped array in its file.

    Attributes:
        path: The file.
        dtype: Type of the entries.
        offset: Bytes of the file before the array.
        shape: Shape of the array.
    """

    path: Path
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]

    def opened(self) -> NDArray[Any]:
        """Map the array."""
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


def place_of(array: NDArray[Any]) -> MappedFile | None:
    """The place of a mapped array, or of a contiguous part of one; None for any other array."""
    if not isinstance(array, np.memmap) or not array.flags.c_contiguous:
        return None
    whole = _whole(array)
    # Parts keep the file's name and offset, but not their own place.
    offset = whole.offset + array.ctypes.data - whole.ctypes.data
    return MappedFile(Path(str(whole.filename)), array.dtype, offset, array.shape)


class Pages:
    """The memory pages of a mapped array, with advice for the kernel.

    Without advice, the kernel reads 128 KiB around each missing page, one after another,
    although a random sample needs only a few kilobytes.

    Args:
        array: A mapped array in which each sample is contiguous.
    """

    def __init__(self, array: np.memmap[Any, Any]) -> None:
        whole = _whole(array)
        self._map = cast("mmap.mmap", whole.base)  # NumPy's types know nothing of it
        # The mapping begins at a boundary of the file, and the whole array somewhat later.
        begin = whole.ctypes.data - whole.offset % mmap.ALLOCATIONGRANULARITY
        self._first = array.ctypes.data - begin
        self._stride, self._length = array.strides[0], array[0].nbytes
        self._map.madvise(mmap.MADV_RANDOM)

    def request(self, indices: Iterable[int]) -> None:
        """Start reading these samples, all at once, without waiting for them."""
        for index in indices:
            start = self._first + index * self._stride
            page = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, page, start + self._length - page)


def pages_of(array: NDArray[Any]) -> Pages | None:
    """The pages of a mapped array of contiguous samples.

    None for any other array, or if the system accepts no advice.
    """
    if not isinstance(array, np.memmap) or not isinstance(
        cast("object", _whole(array).base), mmap.mmap
    ):
        return None
    if not hasattr(mmap, "MADV_WILLNEED") or not len(array):
        return None
    return Pages(array) if array[0].flags.c_contiguous and array.strides[0] > 0 else None


def _whole(array: np.memmap[Any, Any]) -> np.memmap[Any, Any]:
    while isinstance(array.base, np.memmap):
        array = array.base
    return array


# Samples in NumPy arrays, which may be mapped from files that are larger than memory.


class NumpySplit:
    """Samples in nested NumPy arrays; a batch reads only its own samples.

    Args:
        arrays: Arrays in dicts, tuples and lists, nested in any way. The first dimension of
            every array indexes the samples. Arrays may be mapped from files (`numpy.memmap`).
        has_classes: Whether samples are pairs (x, y) in which y is a class.

    Raises:
        DataError: If `arrays` holds anything but numeric arrays, or arrays differ in length.

    >>> split = NumpySplit((np.arange(6).reshape(3, 2), np.array([0, 1, 1])))
    >>> len(split), split.batch(torch.tensor([2]))
    (3, (tensor([[4, 5]]), tensor([1])))
    """

    def __init__(self, arrays: Nested, *, has_classes: bool = False) -> None:
        if has_classes and not (isinstance(arrays, tuple | list) and len(arrays) == 2):
            raise DataError("samples with classes are a pair (x, y) of arrays")
        self._arrays = arrays
        self._has_classes = has_classes
        self._tensors = map_leaves(_shared, arrays, np.ndarray)
        self._num_samples = num_samples(self._tensors)
        self._pages: list[Pages] = []
        map_leaves(self._advise, arrays, np.ndarray)

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, indices: Tensor) -> Nested:
        """Take the samples at `indices`, int64 [batch]."""
        if self._pages:
            wanted = indices.tolist()
            for pages in self._pages:
                pages.request(wanted)
        # PyTorch releases the interpreter while it waits for a file; NumPy's indexing does not.
        batch = map_leaves(lambda leaf: leaf.index_select(0, indices), self._tensors)
        return (batch[0], batch[1].long()) if self._has_classes else batch

    @property
    def labels(self) -> Tensor:
        """The classes, or zeros if there are none."""
        if not self._has_classes:
            return torch.zeros(len(self), dtype=torch.int64)
        labels: Tensor = self._tensors[1]
        # Fractions are not cut off here but refused by `Dataset`.
        return labels if labels.is_floating_point() else labels.long()

    def _advise(self, array: NDArray[Any]) -> None:
        if (pages := pages_of(array)) is not None:
            self._pages.append(pages)

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that receives this split maps the files itself, instead of getting a copy.
        return _sent, (
            map_leaves(lambda array: place_of(array) or array, self._arrays, np.ndarray),
            self._has_classes,
        )


def _sent(arrays: Nested, has_classes: bool) -> NumpySplit:
    opened = map_leaves(
        lambda leaf: leaf.opened() if isinstance(leaf, MappedFile) else leaf,
        arrays,
        (np.ndarray, MappedFile),
    )
    return NumpySplit(opened, has_classes=has_classes)


def _shared(array: NDArray[Any]) -> Tensor:
    """A tensor that shares the memory of `array`."""
    with warnings.catch_warnings():
        # Nothing writes to this tensor.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise DataError(f"an array of {array.dtype} holds no samples: {error}") from None


def from_numpy(
    name: str,
    train: Nested,
    test: Nested,
    num_classes: int = 0,
    *,
    mean: Tensor | None = None,
    std: Tensor | None = None,
    num_workers: int = 0,
) -> Dataset:
    """Make a data set from NumPy arrays, in memory or mapped from files.

    Mapped arrays, such as ``numpy.load("x.npy", mmap_mode="r")``, may be larger than memory: a
    batch reads only its own samples, all at once. On a slow disk, set `num_workers` to 1 or 2.

    >>> x, y = np.random.default_rng(0).random((8, 3), np.float32), np.arange(8) % 2
    >>> data = from_numpy("rows", train=(x[:6], y[:6]), test=(x[6:], y[6:]), num_classes=2)
    >>> len(data.train), data.input_shape
    (6, (3,))

    Args:
        name: Name for reports and messages.
        train: Training samples: arrays in dicts, tuples and lists, nested in any way, whose
            first dimension indexes the samples; with classes, a pair (x, y).
        test: Test samples of the same structure, only for reports.
        num_classes: Labels are 0 .. num_classes - 1; 0 for samples without classes.
        mean: See `Dataset`.
        std: See `Dataset`.
        num_workers: Number of threads that read training batches ahead, shared by all workers
            that one process trains. 0 reads in the training thread.

    Raises:
        DataError: See `Dataset` and `NumpySplit`. Only the first sample is checked for
            non-finite numbers; training stops at a non-finite loss.
        ValueError: If `num_workers` is negative; see also `Dataset`.
    """
    check_range("num_workers", num_workers, "at least 0")
    own: Split
    try:
        own, tested = (NumpySplit(each, has_classes=num_classes > 0) for each in (train, test))
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    if num_workers:
        own = PooledSplit(own, num_workers)
    if not num_classes:
        return without_classes(name, own, tested)
    x, _ = tested.batch(torch.zeros(min(1, len(tested)), dtype=torch.int64))
    return Dataset(name, own, tested, num_classes, tuple(x.shape[1:]), mean, std)
