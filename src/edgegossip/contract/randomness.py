"""A random stream for each (seed, rank, purpose), without a global generator."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *key: int | str) -> int:
    """Mix `seed` and `key` into a 63-bit seed; streams of different keys are independent.

    >>> derive_seed(0, 3, "batches") == derive_seed(0, 3, "batches")
    True
    >>> derive_seed(0, 3, "batches") == derive_seed(0, 4, "batches")
    False
    """
    text = "/".join(map(str, (seed, *key)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *key: int | str) -> torch.Generator:
    """Make the CPU generator of a stream, e.g. ``generator(seed, rank, "batches")``.

    >>> a, b = generator(0, 3, "batches"), generator(0, 3, "batches")
    >>> bool(torch.rand(1, generator=a) == torch.rand(1, generator=b))
    True
    """
    return torch.Generator().manual_seed(derive_seed(seed, *key))


def uniform(seed: int, *key: int | str) -> float:
    """Draw the one number in [0, 1) that belongs to ``(seed, *key)``.

    It needs no generator object, so an algorithm's state stays plain data: ``uniform(seed,
    rank, "exchange", step)``.

    >>> 0 <= uniform(0, 3, "exchange", 17) < 1
    True
    """
    # 53 bits fill a float's mantissa.
    return (derive_seed(seed, *key) >> 10) / (1 << 53)
