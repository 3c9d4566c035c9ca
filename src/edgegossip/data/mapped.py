"""Arrays mapped from files: their places in the files, and reads of only the needed parts."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray


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
