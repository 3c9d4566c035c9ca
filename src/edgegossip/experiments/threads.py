"""Intra-op threads of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def one_intra_op_thread() -> AbstractContextManager[None]:
    """Set one intra-op thread; more would slow down workers, which run in parallel."""
    return intra_op_threads(1)


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Set the number of intra-op threads for this thread and for threads that it starts."""
    earlier = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(earlier)
