"""Every compressor once: what holds for one is tested for all."""

from __future__ import annotations

import torch
from torch import Tensor

from edgegossip.compression.compressor import (
    Compressor,
    Identity,
    PartwiseCompressor,
    PerChunk,
    PerLayer,
)
from edgegossip.compression.sparse import RandomK, TopK
from edgegossip.compression.values import BFloat16, Quantize, Sign

PARTWISE: dict[str, PartwiseCompressor] = {
    "identity": Identity(),
    "bfloat16": BFloat16(),
    "sign": Sign(),
    **{f"quantize-{bits}": Quantize(bits=bits) for bits in (2, 3, 4, 8)},
    "top-all": TopK(keep_ratio=1.0),
    "top": TopK(keep_ratio=0.1),
    "top-bfloat16": TopK(keep_ratio=0.3, values=BFloat16()),
    "top-sign": TopK(keep_ratio=0.3, values=Sign()),
    "top-quantize-4": TopK(keep_ratio=0.05, values=Quantize(bits=4)),
    "random": RandomK(keep_ratio=0.1),
    "random-most": RandomK(keep_ratio=0.7),
    "random-quantize-8": RandomK(keep_ratio=0.2, values=Quantize(bits=8)),
}
PER_LAYER = ["identity", "sign", "quantize-4", "top", "top-quantize-4", "random-quantize-8"]
PER_CHUNK = ["quantize-2", "top-quantize-4"]
NAMES = [
    *PARTWISE,
    *(f"{name}-per-layer" for name in PER_LAYER),
    *(f"{name}-per-chunk" for name in PER_CHUNK),
]


def compressor_for(name: str, numel: int) -> Compressor:
    """The compressor `name` for vectors [numel], cut into up to three parts if per layer."""
    inner = PARTWISE[name.removesuffix("-per-layer").removesuffix("-per-chunk")]
    if name in PARTWISE:
        return inner
    if name.endswith("-per-chunk"):
        return PerChunk(inner, chunk_size=1 + numel // 3)
    sizes = (1, (numel - 1) // 3, numel - 1 - (numel - 1) // 3)
    return PerLayer(inner, tuple(size for size in sizes if size))


def draws(name: str) -> bool:
    """Whether the contraction of the compressor holds in expectation only."""
    return name.startswith("random")


def squared_norm(vector: Tensor) -> float:
    return float(vector.double().square().sum())


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))
