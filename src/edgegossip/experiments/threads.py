"""Intra-op threads of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def one_intra_op_thread() -> AbstractContextManager[None]:
    """Workers run in parallel instead; several intra-op threads would slow them down."""
    return intra_op_threads(1)


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Set the intra-op threads of this thread and of those that it starts."""
    earlier = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(earlier)
