"""Interface of a compressor with error feedback, the identity, and layers one by one."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgegossip.compression.packing import Bytes, padded
from edgegossip.contract.protocol import Payload, Rank
from edgegossip.contract.ranges import check_counts, check_ranges
from edgegossip.contract.schema import TensorSpec

Floats: TypeAlias = NDArray[np.float32]
Sizes: TypeAlias = tuple[int, ...]
"""Number of entries in each part of a vector."""


TOO_LITTLE = 1e-4
"""Smallest useful consensus step; smaller ones take over ten thousand rounds to agree."""


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """Result of `Compressor.feed_back`.

    Attributes:
        payload: Payload to send.
        sent: Vector that receivers see, [numel].
        error: Part held back and added to the next vector, [numel].
    """

    payload: Payload
    sent: Tensor
    error: Tensor


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

    def feed_back(self, vector: Tensor, error: Tensor, *key: int | str) -> Feedback:
        r"""Compress `vector` plus the previous error, and compute the new error.

        .. math:: v = x + e, \qquad q = C(v), \qquad e' = v - q

        so that the sum of all sent vectors plus the current error equals the sum of all
        vectors, up to rounding. With a compressor that contracts by :math:`\delta` and vectors
        of norm at most :math:`G`, :math:`\|e\|` stays below :math:`2 G / \delta`.

        Args:
            vector: x, [numel].
            error: e, [numel]; initially zero.
            key: Key of the random stream, as for `compress`.

        References:
            Karimireddy, Rebjock, Stich and Jaggi, ICML 2019, arXiv:1901.09847, algorithm 2 and
            lemma 3.

        >>> from edgegossip.compression.sparse import TopK
        >>> turn = TopK(0.5).feed_back(torch.tensor([3.0, 2.0]), torch.tensor([0.0, 2.0]))
        >>> turn.sent, turn.error
        (tensor([0., 4.]), tensor([3., 0.]))
        """
        wanted = vector + error
        payload = self.compress(wanted, *key)
        sent = self.decompress(payload, wanted.numel())
        return Feedback(payload, sent, wanted - sent)

    def step_or_default(self, step: float | None, numel: int) -> float:
        """Return the given consensus step; if it is None, `consensus_step`.

        >>> from edgegossip.compression.sparse import TopK
        >>> TopK(keep_ratio=0.01).step_or_default(None, numel=1000)
        0.01
        """
        return self.consensus_step(numel) if step is None else step

    def warn_of_step(self, step: float | None, rank: Rank, numel: int) -> None:
        """Warn about a consensus step that may cause divergence or is too small to be useful.

        A large step is not an error, because some graphs allow larger steps than others.

        Args:
            step: The given step, or None for `consensus_step`.
            rank: Rank of the worker; only worker 0 warns, so a run warns once.
            numel: Length of the vectors.
        """
        suited = self.consensus_step(numel)
        if rank != 0:
            return
        if step is None and suited < TOO_LITTLE:
            warnings.warn(
                f"the consensus step is {suited:.2g} by default, as suits {self}: workers "
                "will hardly come closer to each other; give a consensus_step, or choose "
                "another compressor",
                stacklevel=3,
            )
        if step is not None and step >= self.divergence_factor * suited:
            warnings.warn(
                f"consensus_step={step:g} is {step / suited:.0f} times what suits {self}, "
                f"{suited:.2g}: workers will probably diverge; leave consensus_step out, or "
                f"try less than {self.divergence_factor:g} times as much",
                stacklevel=3,
            )

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


# Compression of each part of a vector separately.


@dataclass(frozen=True)
class PerPart(Compressor):
    """Base of the compressors that let another one compress each part of a vector."""

    inner: PartwiseCompressor

    @abstractmethod
    def parts(self, numel: int) -> Sizes:
        """Number of entries in each part of a vector [numel]."""

    def compress(self, vector: Tensor, *key: int | str) -> Payload:
        return self.inner.compress_parts(vector, self.parts(vector.numel()), *key)

    def decompress(self, payload: Payload, numel: int) -> Tensor:
        return self.inner.decompress_parts(payload, self.parts(numel))

    def contraction(self, numel: int) -> float:
        return self.inner.contraction_of_parts(self.parts(numel))

    def consensus_step(self, numel: int) -> float:
        return self.inner.consensus_step_of_parts(self.parts(numel))

    @property
    def divergence_factor(self) -> float:
        return self.inner.divergence_factor

    def schema(self, numel: int) -> Mapping[str, TensorSpec]:
        return self.inner.schema_of_parts(self.parts(numel))


@dataclass(frozen=True)
class PerLayer(PerPart):
    """Compresses each part of a vector separately, and sends the parts together.

    Layers differ in the magnitude of their entries, so choosing the largest entries overall
    could omit some layers forever. Each layer therefore keeps its share (at least one entry)
    and has its own scale.

    Args:
        inner: Compressor of each part.
        sizes: Number of entries in each part, in order.

    Raises:
        ValueError: If `sizes` is empty or contains a size less than 1; on use, if the sizes do
            not add up to the length of a vector.

    >>> import torch
    >>> from edgegossip.compression.sparse import TopK
    >>> compressor = PerLayer(TopK(keep_ratio=0.5), sizes=(2, 2))
    >>> compressor.decompress(compressor.compress(torch.tensor([8.0, 9.0, -1.0, 0.0])), 4)
    tensor([ 0.,  9., -1.,  0.])
    """

    sizes: Sizes

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(
                f"sizes must be entries of each part, at least 1, got {self.sizes}; take "
                "those of the model's parameters"
            )

    def parts(self, numel: int) -> Sizes:
        if sum(self.sizes) != numel:
            raise ValueError(
                f"sizes of {len(self.sizes)} parts add up to {sum(self.sizes)}, but the vector "
                f"has {numel} entries; take the sizes of the same model's parameters"
            )
        return self.sizes


@dataclass(frozen=True)
class PerChunk(PerPart):
    """Compresses chunks of equal size separately; the last one may be shorter.

    Every chunk keeps its share of entries (at least one) and has its own scale, whatever the
    layers of the model.

    Args:
        inner: Compressor of each chunk.
        chunk_size: Number of entries in a chunk, at least 1.

    Raises:
        ValueError: If `chunk_size` is less than 1.

    References:
        Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
        arXiv:2508.15706, choose the largest entries of each chunk.

    >>> import torch
    >>> from edgegossip.compression.sparse import TopK
    >>> compressor = PerChunk(TopK(keep_ratio=0.5), chunk_size=2)
    >>> compressor.decompress(compressor.compress(torch.tensor([8.0, 9.0, -1.0])), 3)
    tensor([ 0.,  9., -1.])
    """

    chunk_size: int = 4096

    def __post_init__(self) -> None:
        check_counts(self, "chunk_size")
        check_ranges(self, chunk_size="at least 1")

    def parts(self, numel: int) -> Sizes:
        whole, rest = divmod(numel, self.chunk_size)
        return (self.chunk_size,) * whole + ((rest,) if rest else ())
