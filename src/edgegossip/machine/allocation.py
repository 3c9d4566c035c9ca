"""Allocation: keep freed memory instead of returning it to the kernel."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_MOST_OF_OLD_GLIBC = 32 << 20


def keep_freed_memory(
    *, block_bytes: int = 1 << 30, total_bytes: int = 1 << 30, is_shared: bool = True
) -> None:
    """Let malloc keep freed blocks of up to `block_bytes` each and `total_bytes` in total.

    A training step allocates and frees megabytes of activations, and an exchange does so with
    messages. By default glibc maps and unmaps every large block, and the page faults take up to
    a quarter of the time (benchmarks/results/simulator.md). Without glibc this has no effect.

    Args:
        block_bytes: Largest block to keep; larger blocks are returned at once.
        total_bytes: Maximum number of bytes to keep.
        is_shared: Whether threads share freed memory, which makes them wait for each other. It
            applies to threads that start later.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    if not libc.mallopt(_M_MMAP_THRESHOLD, block_bytes):
        libc.mallopt(_M_MMAP_THRESHOLD, min(block_bytes, _MOST_OF_OLD_GLIBC))
    libc.mallopt(_M_TRIM_THRESHOLD, total_bytes)
    if is_shared:
        libc.mallopt(_M_ARENA_MAX, 1)
