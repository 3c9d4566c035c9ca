"""Let the allocator keep what training frees, instead of giving it back to the kernel."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_MOST_OF_OLD_GLIBC = 32 << 20


def keep_freed_memory(
    *, block_bytes: int = 1 << 30, total_bytes: int = 1 << 30, is_shared: bool = True
) -> None:
    """Let malloc keep blocks up to `block_bytes` that are freed, `total_bytes` in all.

    A step frees and takes megabytes of activations, an exchange its messages. By default glibc
    maps and unmaps every large block, and the page faults take up to a quarter of the time
    (benchmarks/results/simulator.md). Does nothing where there is no glibc.

    Args:
        block_bytes: Larger blocks go back at once.
        total_bytes: Most bytes kept after they were in use.
        is_shared: Whether threads get memory that others have freed, but wait for each other.
            Applies to threads that begin later.
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
