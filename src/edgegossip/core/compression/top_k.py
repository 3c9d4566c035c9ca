"""Choice of the entries to keep."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from edgegossip.core.compression.packing import Positions

Magnitudes: TypeAlias = NDArray[np.int32]

BLOCK = 2**17
"""Entries per block, few enough to fit the processor's cache."""


def largest(vector: NDArray[np.float32], count: int) -> Positions:
    """Positions of the `count` largest magnitudes in `vector`, ascending, [count].

    Ties go to the first entries. The result is exact: sampling only excludes entries that are
    too small.

    >>> largest(np.float32([1, -3, 2, 3, 3]), 2).tolist()
    [1, 3]
    """
    if count >= len(vector):
        return np.arange(len(vector))
    # The bits of floats without their sign have the order of the magnitudes. Infinities and
    # NaNs come last, and all values are comparable.
    bits = vector.view(np.int32)
    candidates = _candidates(bits, count)
    magnitudes = bits[candidates] & 0x7FFFFFFF
    smallest = np.partition(magnitudes, -count)[-count]
    is_kept = magnitudes > smallest
    num_missing = count - np.count_nonzero(is_kept)
    is_kept[np.flatnonzero(magnitudes == smallest)[:num_missing]] = True
    positions: Positions = candidates[is_kept]
    return positions


def _candidates(bits: Magnitudes, count: int) -> Positions:
    """Ascending positions, at least `count`, that include the largest entries."""
    numel = len(bits)
    sample = bits[:: max(1, numel // 2**17)] & 0x7FFFFFFF
    # The expected number of kept entries in the sample, plus six standard deviations.
    expected = count / numel * len(sample)
    rank = int(expected + 6 * expected**0.5 + 6)
    if rank < len(sample) < numel:
        threshold = np.partition(sample, -rank)[-rank]
        blocks = range(0, numel, BLOCK)
        found = [
            np.flatnonzero((bits[start : start + BLOCK] & 0x7FFFFFFF) >= threshold) + start
            for start in blocks
        ]
        candidates = np.concatenate(found)
        if len(candidates) >= count:
            return candidates
    return np.arange(numel)


def at_random(numel: int, count: int, generator: torch.Generator) -> Positions:
    """Draw `count` of `numel` positions, all subsets with equal probability; ascending.

    >>> from edgegossip.core.randomness import generator
    >>> len(set(at_random(100, 10, generator(0)).tolist()))
    10
    """
    if 4 * count >= numel:
        return np.sort(torch.randperm(numel, generator=generator)[:count].numpy())
    # The first distinct draws: less work than shuffling all positions.
    draws = np.empty(0, np.int64)
    while True:
        more = torch.randint(numel, (count + count // 2 + 8,), generator=generator)
        draws = np.concatenate([draws, more.numpy()])
        positions, firsts = np.unique(draws, return_index=True)
        if len(positions) >= count:
            return np.sort(positions[np.argpartition(firsts, count - 1)[:count]])
