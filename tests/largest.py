"""A compressor for long runs on few parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.compression.compressor import Compressor
from edgegossip.contract.protocol import Payload
from edgegossip.contract.schema import TensorSpec


@dataclass(frozen=True)
class Largest(Compressor):
    """Keeps the largest entries, as `TopK` does, and does not pack them, which takes longer."""

    num_kept: int

    def compress(self, vector: Tensor, *key: int | str) -> Payload:
        positions = vector.abs().topk(self.num_kept).indices
        return {"values": vector[positions], "positions": positions}

    def decompress(self, payload: Payload, numel: int) -> Tensor:
        return torch.zeros(numel).scatter(0, payload["positions"], payload["values"])

    def contraction(self, numel: int) -> float:
        return self.num_kept / numel

    def schema(self, numel: int) -> Mapping[str, TensorSpec]:
        positions = TensorSpec(torch.int64, (self.num_kept,), minimum=0, maximum=numel - 1)
        return {"values": TensorSpec(torch.float32, (self.num_kept,)), "positions": positions}
