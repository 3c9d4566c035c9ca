"""Packing of whole numbers into few bits, with whole-array operations.

Every reader here accepts any bytes: missing bytes count as zeros.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Integers: TypeAlias = NDArray[np.integer[Any]]
Positions: TypeAlias = NDArray[np.int64]

MAX_WIDTH = 32
"""Maximum number of bits in a packed number."""

BLOCK = 16
"""Number of gaps that share a width; 32 and 64 compress real models less."""

NUM_WIDTHS = 16
"""Number of widths to choose from; the choice takes 4 bits per block."""

_LANES = np.arange(8, dtype=np.uint64)[:, None]


def padded(data: Bytes, num_bytes: int) -> Bytes:
    """The first `num_bytes` of `data`, padded with zeros.

    >>> padded(np.array([1, 2], np.uint8), 3).tolist()
    [1, 2, 0]
    """
    missing = num_bytes - len(data)
    if missing <= 0:
        return data[:num_bytes]
    return np.concatenate([data, np.zeros(missing, np.uint8)])


def packed_num_bytes(count: int, width: int) -> int:
    """Number of bytes that `count` numbers of `width` bits take.

    >>> packed_num_bytes(16, 3)
    6
    """
    return count * (width // 8) + -(-count * (width % 8) // 8)


def pack(numbers: Integers, width: int) -> Bytes:
    """Write numbers in [0, 2**width) with `width` bits each, in groups of eight.

    Whole bytes come first: the lowest byte of every number, then the next byte. The remaining
    bits of a group fill a whole number of bytes, and are combined in one 64-bit word.

    Args:
        numbers: Numbers to write, [count].
        width: Bits per number, at most `MAX_WIDTH`.

    >>> pack(np.arange(8), 3).tolist()
    [136, 198, 250]
    """
    whole, rest = divmod(width, 8)
    sections = [(numbers >> 8 * k).astype(np.uint8) for k in range(whole)]
    groups = np.zeros((-(-len(numbers) // 8), 8), np.uint8)
    groups.reshape(-1)[: len(numbers)] = numbers >> 8 * whole
    words = np.zeros(len(groups), "<u8")
    for lane in range(8):
        words |= groups[:, lane].astype(np.uint64) << np.uint64(rest * lane)
    bits = words.view(np.uint8).reshape(-1, 8)[:, :rest].reshape(-1)
    return np.concatenate([*sections, bits])[: packed_num_bytes(len(numbers), width)]


def unpack(data: Bytes, width: int, count: int) -> Positions:
    """Read numbers, [count], of `width` bits each from the bytes of `pack`.

    >>> unpack(pack(np.arange(8), 3), 3, 8).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    whole, rest = divmod(width, 8)
    groups = np.zeros((-(-count // 8), 8), np.uint8)
    data = padded(data, count * whole + len(groups) * rest)
    groups[:, :rest] = data[count * whole :].reshape(len(groups), rest)
    lanes = groups.view("<u8").T >> (rest * _LANES)
    lanes &= np.uint64(2**rest - 1)
    numbers = lanes.view(np.int64).T.reshape(-1)[:count] << 8 * whole
    for k in range(whole):
        numbers |= data[k * count : (k + 1) * count].astype(np.int64) << 8 * k
    return numbers


def pack_positions(positions: Positions, numel: int) -> Bytes:
    """Write positions in a vector with the Golomb-Rice code of their gaps.

    A gap of g omitted entries is written as g >> width zeros, a one, and the lowest `width`
    bits of g. Important entries are often close together (in a layer, a filter, the inputs of a
    neuron), so each `BLOCK` of gaps has its own width. The widths come first, then all lowest
    bits by width, then the ones and zeros, so that items of equal width are read together.

    Args:
        positions: Ascending, each less than `numel`; [count].
        numel: Number of entries in the vector.

    References:
        R. F. Rice, "Some practical universal noiseless coding techniques", JPL 79-22, 1979.

    >>> pack_positions(np.array([3, 4, 11]), 12).tolist()  # width 1; 1, 0, 0; 0110001
    [1, 1, 70]
    """
    gaps = np.diff(positions, prepend=-1) - 1
    base = _base_width(numel, len(gaps))
    choices = _best_choices(gaps, base)
    widths = base + np.repeat(choices, BLOCK)[: len(gaps)]
    quotients = gaps >> widths
    unary = np.zeros(len(gaps) + int(quotients.sum()), np.uint8)
    unary[np.cumsum(quotients + 1) - 1] = 1
    lowest = [
        pack(gaps[widths == width] & (2**width - 1), width) for width in _taken(choices, base)
    ]
    return np.concatenate([pack(choices, 4), *lowest, np.packbits(unary, bitorder="little")])


def unpack_positions(data: Bytes, count: int, numel: int) -> Positions:
    """Read the bytes of `pack_positions` as ascending positions, [count].

    If `data` is not from `pack_positions`, there may be fewer positions, and some may not be
    below `numel`.

    >>> unpack_positions(pack_positions(np.array([3, 4, 11]), 12), 3, 12).tolist()
    [3, 4, 11]
    """
    base = _base_width(numel, count)
    num_blocks = -(-count // BLOCK)
    choices = unpack(data, 4, num_blocks)
    widths = base + np.repeat(choices, BLOCK)[:count]
    data = data[packed_num_bytes(num_blocks, 4) :]
    gaps = np.empty(count, np.int64)
    for width in _taken(choices, base):
        has_width = widths == width
        num_gaps = int(np.count_nonzero(has_width))
        gaps[has_width] = unpack(data, width, num_gaps)
        data = data[packed_num_bytes(num_gaps, width) :]
    ends = np.flatnonzero(np.unpackbits(data, bitorder="little"))[:count]
    quotients = np.diff(ends, prepend=-1) - 1
    gaps = gaps[: len(ends)] + (quotients << widths[: len(ends)])
    return np.cumsum(gaps + 1) - 1


def max_positions_num_bytes(count: int, numel: int) -> int:
    """Maximum number of bytes from `pack_positions` for `count` positions.

    This is the size with the usual width in all blocks, plus a partial byte.

    >>> max_positions_num_bytes(3, 12)
    4
    """
    width = _usual_width(numel, count)
    num_bits = count * (width + 1) + ((numel - count) >> width)
    return packed_num_bytes(-(-count // BLOCK), 4) + -(-num_bits // 8) + 1


def _usual_width(numel: int, count: int) -> int:
    """The best width if all entries are equally likely to be kept."""
    mean_gap = numel / max(1, count)
    return math.floor(math.log2(max(1, mean_gap * math.log(2))))


def _base_width(numel: int, count: int) -> int:
    """Smallest candidate width; unusual blocks mostly need less than the usual width."""
    return max(0, _usual_width(numel, count) - NUM_WIDTHS + 4)


def _taken(choices: Integers, base: int) -> list[int]:
    """The distinct widths of the blocks, ascending."""
    widths: list[int] = (np.flatnonzero(np.bincount(choices)) + base).tolist()
    return widths


def _best_choices(gaps: Positions, base: int) -> Bytes:
    """Best width of each block, relative to `base`; [num_blocks]."""
    starts = np.arange(0, len(gaps), BLOCK)
    num_gaps = np.diff(starts, append=len(gaps))
    num_bits = [
        num_gaps * width + np.add.reduceat(gaps >> width, starts)
        for width in range(base, base + NUM_WIDTHS)
    ]
    choices: Bytes = np.argmin(num_bits, axis=0).astype(np.uint8)
    return choices
