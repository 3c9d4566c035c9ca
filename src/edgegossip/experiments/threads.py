"""How many threads PyTorch computes one operation with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def one_intra_op_thread() -> AbstractContextManager[None]:
    """Workers run side by side instead; several intra-op threads would get in their way."""
    return intra_op_threads(1)


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Let this thread, and those that it starts, compute with so many at once."""
    earlier = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(earlier)
