"""Interface of a compressor, and the compressor that changes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgegossip.core.compression.packing import Bytes, padded
from edgegossip.core.protocol import Payload
from edgegossip.core.schema import TensorSpec

Floats: TypeAlias = NDArray[np.float32]
Sizes: TypeAlias = tuple[int, ...]
"""Number of entries in each part of a vector."""


class Compressor(ABC):
    r"""Makes a payload of a vector, and a vector much like it of the payload.

    Implementations are frozen dataclasses. They promise a contraction: for every finite vector
    :math:`x` and a :math:`\delta` in (0, 1] that depends on its length alone,

    .. math:: E \|C(x) - x\|^2 \le (1 - \delta) \|x\|^2

    so that the remainder, which is held back and added to the next vector, stays bounded.
    """

    @abstractmethod
    def compress(self, vector: Tensor, *key: int | str) -> Payload:
        """Make a payload of `vector`, float32 [numel].

        Args:
            vector: Not written to.
            key: Key of the random stream to draw from (seed, rank, ..., round). Equal keys give
                equal payloads. Compressors that draw nothing ignore it.
        """

    @abstractmethod
    def decompress(self, payload: Payload, numel: int) -> Tensor:
        """Make a vector, float32 [numel], of any payload that `schema` allows: never raises.

        All its entries are finite. Other tensors of the payload are ignored.
        """

    @abstractmethod
    def contraction(self, numel: int) -> float:
        r""":math:`\delta`, in (0, 1], for vectors [numel]."""

    def consensus_step(self, numel: int) -> float:
        r"""Consensus step, in (0, 1], for vectors [numel] that travel compressed.

        The share of the entries that is kept, times the share of the square that is left of
        normally distributed ones: :math:`\delta` itself, where few bits are sent, follows
        vectors that do not occur.
        """
        return self.contraction(numel)

    @property
    def divergence_factor(self) -> float:
        """Multiple of `consensus_step` from which on workers were seen to diverge."""
        return 5.0

    @abstractmethod
    def schema(self, numel: int) -> Mapping[str, TensorSpec]:
        """Describe the payloads of vectors [numel]."""


class PartwiseCompressor(Compressor):
    """A compressor that can treat each part of a vector on its own and send all as one.

    All that it sends is one tensor of bytes, because each tensor of a message takes about 60
    bytes of the header. `PerLayer` makes use of the parts; on its own, the vector is one part.
    """

    def compress(self, vector: Tensor, *key: int | str) -> Payload:
        return self.compress_parts(vector, (vector.numel(),), *key)

    def decompress(self, payload: Payload, numel: int) -> Tensor:
        return self.decompress_parts(payload, (numel,))

    def contraction(self, numel: int) -> float:
        return self.contraction_of_parts((numel,))

    def consensus_step(self, numel: int) -> float:
        return self.consensus_step_of_parts((numel,))

    def schema(self, numel: int) -> Mapping[str, TensorSpec]:
        return self.schema_of_parts((numel,))

    def compress_parts(self, vector: Tensor, sizes: Sizes, *key: int | str) -> Payload:
        """`compress` a vector whose parts have these `sizes`."""
        entries = np.ascontiguousarray(vector.detach().cpu().numpy())
        # A vector that is not finite is compressed anyway; the trainer reports the problem.
        with np.errstate(all="ignore"):
            return {"bits": torch.from_numpy(self.pack(entries, sizes, *key))}

    def decompress_parts(self, payload: Payload, sizes: Sizes) -> Tensor:
        """`decompress` a vector whose parts have these `sizes`."""
        with np.errstate(all="ignore"):
            return torch.from_numpy(self.unpack(payload["bits"].cpu().numpy(), sizes))

    def schema_of_parts(self, sizes: Sizes) -> Mapping[str, TensorSpec]:
        """The `schema` for vectors whose parts have these `sizes`."""
        measure = partial(self._measure, sizes)
        most = self.max_num_bytes(sizes)
        return {"bits": TensorSpec(torch.uint8, (None,), max_numel=most, measure=measure)}

    def _measure(self, sizes: Sizes, bits: Tensor) -> float:
        with np.errstate(all="ignore"):
            return self.magnitude(bits.cpu().numpy(), sizes)

    def magnitude(self, data: Bytes, sizes: Sizes) -> float:
        """The largest absolute value in what `unpack` makes of `data`, or a bound of it."""
        return float(np.abs(self.unpack(data, sizes)).max(initial=0.0))

    @abstractmethod
    def contraction_of_parts(self, sizes: Sizes) -> float:
        """The `contraction` for vectors whose parts have these `sizes`."""

    def consensus_step_of_parts(self, sizes: Sizes) -> float:
        """The `consensus_step` for vectors whose parts have these `sizes`."""
        return self.contraction_of_parts(sizes)

    @abstractmethod
    def pack(self, vector: Floats, sizes: Sizes, *key: int | str) -> Bytes:
        """Write `vector`, [sum(sizes)], as bytes."""

    @abstractmethod
    def unpack(self, data: Bytes, sizes: Sizes) -> Floats:
        """Read what `pack` wrote; of any other bytes, some finite vector [sum(sizes)]."""

    @abstractmethod
    def max_num_bytes(self, sizes: Sizes) -> int:
        """Most bytes that `pack` writes."""


class Values(PartwiseCompressor):
    """A compressor that sends something of every entry; its number of bytes is constant."""


@dataclass(frozen=True)
class Identity(Values):
    """Leaves everything as it is.

    >>> Identity().compress(torch.ones(2))
    {'values': tensor([1., 1.])}
    """

    def compress(self, vector: Tensor, *key: int | str) -> Payload:
        return {"values": vector}

    def decompress(self, payload: Payload, numel: int) -> Tensor:
        return payload["values"]

    def schema(self, numel: int) -> Mapping[str, TensorSpec]:
        return {"values": TensorSpec(torch.float32, (numel,))}

    def contraction_of_parts(self, sizes: Sizes) -> float:
        return 1.0

    def pack(self, vector: Floats, sizes: Sizes, *key: int | str) -> Bytes:
        return vector.view(np.uint8)

    def unpack(self, data: Bytes, sizes: Sizes) -> Floats:
        return np.nan_to_num(padded(data, self.max_num_bytes(sizes)).view(np.float32))

    def max_num_bytes(self, sizes: Sizes) -> int:
        return 4 * sum(sizes)
