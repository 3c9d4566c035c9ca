"""Compression of each layer of a model separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from edgegossip.core.compression.compressor import Compressor, PartwiseCompressor, Sizes
from edgegossip.core.protocol import Payload
from edgegossip.core.schema import TensorSpec


@dataclass(frozen=True)
class PerLayer(Compressor):
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
    >>> from edgegossip.core.compression.sparse import TopK
    >>> compressor = PerLayer(TopK(keep_ratio=0.5), sizes=(2, 2))
    >>> compressor.decompress(compressor.compress(torch.tensor([8.0, 9.0, -1.0, 0.0])), 4)
    tensor([ 0.,  9., -1.,  0.])
    """

    inner: PartwiseCompressor
    sizes: Sizes

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(
                f"sizes must be entries of each part, at least 1, got {self.sizes}; take "
                "those of the model's parameters"
            )

    def compress(self, vector: Tensor, *key: int | str) -> Payload:
        return self.inner.compress_parts(vector, self._checked(vector.numel()), *key)

    def decompress(self, payload: Payload, numel: int) -> Tensor:
        return self.inner.decompress_parts(payload, self._checked(numel))

    def contraction(self, numel: int) -> float:
        return self.inner.contraction_of_parts(self._checked(numel))

    def consensus_step(self, numel: int) -> float:
        return self.inner.consensus_step_of_parts(self._checked(numel))

    @property
    def divergence_factor(self) -> float:
        return self.inner.divergence_factor

    def schema(self, numel: int) -> Mapping[str, TensorSpec]:
        return self.inner.schema_of_parts(self._checked(numel))

    def _checked(self, numel: int) -> Sizes:
        if sum(self.sizes) != numel:
            raise ValueError(
                f"sizes of {len(self.sizes)} parts add up to {sum(self.sizes)}, but the vector "
                f"has {numel} entries; take the sizes of the same model's parameters"
            )
        return self.sizes
