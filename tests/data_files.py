"""Pixels for files of data sets, and a limit of the memory that reading such files takes."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

DRAWS = np.random.default_rng(0)


def pixels(*shape: int) -> NDArray[np.uint8]:
    return DRAWS.integers(0, 256, shape, dtype=np.uint8)


@contextlib.contextmanager
def within(num_bytes: int) -> Iterator[None]:
    """Limit the memory that the block allocates at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()
