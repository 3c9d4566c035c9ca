"""Choice of the entries to keep."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from edgegossip.compression.compressor import (
    Floats,
    Identity,
    PartwiseCompressor,
    Sizes,
    Values,
)
from edgegossip.compression.packing import (
    Bytes,
    Positions,
    max_positions_num_bytes,
    pack_positions,
    padded,
    unpack_positions,
)
from edgegossip.contract.randomness import derive_seed, generator

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

    >>> from edgegossip.contract.randomness import generator
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


# Compressors that keep a share of the entries, exactly or in fewer bits.


@dataclass(frozen=True)
class Sparse(PartwiseCompressor):
    r"""Base of the compressors that keep some entries of each part and encode their positions.

    `values` compresses the kept entries in the same parts. The composition is a contraction,
    too; its :math:`\delta` is the product of the two.

    Args:
        keep_ratio: Share of the entries to keep, in (0, 1]; rounded to whole entries, at least
            one per part.
        values: Compressor of the kept entries.

    Raises:
        ValueError: If `keep_ratio` is not in (0, 1].
    """

    keep_ratio: float
    values: Values = Identity()

    def __post_init__(self) -> None:
        if not 0 < self.keep_ratio <= 1:
            raise ValueError(
                f"keep_ratio must be in (0, 1], got {self.keep_ratio}; it is the share that is "
                "kept, 0.01 for 1 %"
            )

    def num_kept(self, sizes: Sizes) -> Sizes:
        """Number of kept entries in each part.

        >>> TopK(keep_ratio=0.1).num_kept((100, 8, 0))
        (10, 1, 0)
        """
        return tuple(min(size, max(1, round(size * self.keep_ratio))) for size in sizes)

    def contraction_of_parts(self, sizes: Sizes) -> float:
        return self._least_share(sizes) * self.values.contraction_of_parts(self.num_kept(sizes))

    def consensus_step_of_parts(self, sizes: Sizes) -> float:
        kept = self.num_kept(sizes)
        return self._least_share(sizes) * self.values.consensus_step_of_parts(kept)

    def _least_share(self, sizes: Sizes) -> float:
        kept = self.num_kept(sizes)
        shares = [k / size for k, size in zip(kept, sizes, strict=True) if size]
        return min(shares, default=1.0)

    def pack(self, vector: Floats, sizes: Sizes, *key: int | str) -> Bytes:
        positions, packed_positions = self.choose(vector, sizes, *key)
        values = self.values.pack(vector[positions], self.num_kept(sizes), *key)
        return np.concatenate([values, packed_positions])

    def unpack(self, data: Bytes, sizes: Sizes) -> Floats:
        kept = self.num_kept(sizes)
        num_value_bytes = self.values.max_num_bytes(kept)
        positions = self.chosen(data[num_value_bytes:], sizes)
        values = self.values.unpack(data[:num_value_bytes], kept)[: len(positions)]
        vector = np.zeros(sum(sizes), np.float32)
        is_inside = positions < len(vector)
        vector[positions[is_inside]] = values[is_inside]
        return vector

    def magnitude(self, data: Bytes, sizes: Sizes) -> float:
        kept = self.num_kept(sizes)
        return self.values.magnitude(data[: self.values.max_num_bytes(kept)], kept)

    def max_num_bytes(self, sizes: Sizes) -> int:
        num_position_bytes = self.max_positions_num_bytes(sizes)
        return self.values.max_num_bytes(self.num_kept(sizes)) + num_position_bytes

    @abstractmethod
    def choose(self, vector: Floats, sizes: Sizes, *key: int | str) -> tuple[Positions, Bytes]:
        """Positions to keep, ascending, and the bytes that encode them."""

    @abstractmethod
    def chosen(self, data: Bytes, sizes: Sizes) -> Positions:
        """Read the positions; any other bytes give distinct positions, and at most as many."""

    @abstractmethod
    def max_positions_num_bytes(self, sizes: Sizes) -> int:
        """Maximum number of bytes that the positions take."""


@dataclass(frozen=True)
class TopK(Sparse):
    r"""Keeps the entries with the largest magnitudes; among equal magnitudes, the first.

    :math:`\delta` is the share of entries kept (times the :math:`\delta` of `values`). Vectors
    of equal entries attain this bound. With a `keep_ratio` of 1 %, a position takes 8.3 bits:
    see `packing.pack_positions`.

    References:
        Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018,
        arXiv:1809.07599.

    >>> import torch
    >>> compressor = TopK(keep_ratio=0.5)
    >>> compressor.decompress(compressor.compress(torch.tensor([1.0, -3.0, 2.0, 0.0])), 4)
    tensor([ 0., -3.,  2.,  0.])
    """

    def choose(self, vector: Floats, sizes: Sizes, *key: int | str) -> tuple[Positions, Bytes]:
        kept = self.num_kept(sizes)
        starts = np.cumsum((0, *sizes))
        parts = zip(starts.tolist(), sizes, kept, strict=False)
        chosen = [start + largest(vector[start : start + n], k) for start, n, k in parts]
        positions = np.concatenate(chosen)
        return positions, pack_positions(positions, sum(sizes))

    def chosen(self, data: Bytes, sizes: Sizes) -> Positions:
        return unpack_positions(data, sum(self.num_kept(sizes)), sum(sizes))

    def max_positions_num_bytes(self, sizes: Sizes) -> int:
        return max_positions_num_bytes(sum(self.num_kept(sizes)), sum(sizes))


@dataclass(frozen=True)
class RandomK(Sparse):
    r"""Keeps entries at random, all with equal probability within their part.

    In expectation, :math:`\delta` is exactly the share of entries kept (times the
    :math:`\delta` of `values`). Positions are not sent: 8 bytes identify the random stream, and
    the receiver draws the positions again. Both ends need PyTorch versions with the same
    generator.

    >>> import torch
    >>> compressor = RandomK(keep_ratio=0.5)
    >>> payload = compressor.compress(torch.tensor([1.0, -3.0, 2.0, 0.0]), 7, "round", 3)
    >>> compressor.decompress(payload, 4)
    tensor([ 1., -3.,  0.,  0.])
    """

    @property
    def divergence_factor(self) -> float:
        return 2.0

    def choose(self, vector: Floats, sizes: Sizes, *key: int | str) -> tuple[Positions, Bytes]:
        seed = np.array([derive_seed(0, *key)], "<u8").view(np.uint8)
        return self.chosen(seed, sizes), seed

    def chosen(self, data: Bytes, sizes: Sizes) -> Positions:
        seed = int(padded(data, 8).view("<u8")[0])
        stream = generator(seed, "positions")
        starts = np.cumsum((0, *sizes))
        parts = zip(starts.tolist(), sizes, self.num_kept(sizes), strict=False)
        return np.concatenate([start + at_random(n, k, stream) for start, n, k in parts])

    def max_positions_num_bytes(self, sizes: Sizes) -> int:
        return 8
