"""Interface of a compressor, and the identity."""

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
    r"""Turns a vector into a payload, and the payload into a similar vector.

    Implementations are frozen dataclasses. They promise a contraction: for every finite vector
    :math:`x` and a :math:`\delta` in (0, 1] that depends only on the length of :math:`x`,

    .. math:: E \|C(x) - x\|^2 \le (1 - \delta) \|x\|^2

    so that the remainder, which is held back and added to the next vector, stays bounded. The
    bound holds for every vector; for `PerLayer`, :math:`\delta` is the minimum over the layers.
    Scales are bfloat16, so values from 1e-38 to the largest float32 are kept in proportion.
    """

    @abstractmethod
    def compress(self, vector: Tensor, *key: int | str) -> Payload:
        """Compress `vector`, float32 [numel], into a payload.

        Args:
            vector: Vector to compress; it is not changed.
            key: Key of the random stream to draw from (seed, rank, ..., round). Equal keys
                produce equal payloads. Deterministic compressors ignore it.
        """

    @abstractmethod
    def decompress(self, payload: Payload, numel: int) -> Tensor:
        """Make a vector, float32 [numel], from any payload that `schema` allows; never raises.

        All entries of the vector are finite. Tensors of the payload that are not in `schema`
        are ignored.
        """

    @abstractmethod
    def contraction(self, numel: int) -> float:
        r"""The contraction's :math:`\delta`, in (0, 1], for vectors [numel]."""

    def consensus_step(self, numel: int) -> float:
        r"""The consensus step, in (0, 1], for compressed vectors [numel].

        The step is the share of entries kept, times the share of the squared norm that remains
        after rounding normally distributed entries. With few bits, :math:`\delta` would instead
        reflect vectors that do not occur in practice.
        """
        return self.contraction(numel)

    @property
    def divergence_factor(self) -> float:
        """The smallest multiple of `consensus_step` at which workers diverged in tests."""
        return 5.0

    @abstractmethod
    def schema(self, numel: int) -> Mapping[str, TensorSpec]:
        """Describe the payloads of vectors [numel]."""


class PartwiseCompressor(Compressor):
    """A compressor that can handle the parts of a vector separately and send them together.

    Its payload is one tensor of bytes, because each tensor in a message adds about 60 bytes to
    the header. `PerLayer` uses the parts; without it, the vector is one part.
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
        """Compress a vector whose parts have these `sizes`."""
        entries = np.ascontiguousarray(vector.detach().cpu().numpy())
        # A vector that is not finite is compressed anyway; the trainer reports the problem.
        with np.errstate(all="ignore"):
            return {"bits": torch.from_numpy(self.pack(entries, sizes, *key))}

    def decompress_parts(self, payload: Payload, sizes: Sizes) -> Tensor:
        """Decompress a vector whose parts have these `sizes`."""
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
        """The largest absolute value in the vector from `unpack`, or an upper bound."""
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
        """Read the bytes from `pack`; any bytes give a finite vector [sum(sizes)]."""

    @abstractmethod
    def max_num_bytes(self, sizes: Sizes) -> int:
        """The maximum number of bytes from `pack`."""


class Values(PartwiseCompressor):
    """A compressor that sends every entry; the number of bytes depends only on the sizes."""


@dataclass(frozen=True)
class Identity(Values):
    """Changes nothing.

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
