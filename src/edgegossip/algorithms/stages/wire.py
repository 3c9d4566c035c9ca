"""Activations and gradients as they travel between stages: with 32, 16 or 8 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from edgegossip.core.protocol import Payload
from edgegossip.core.schema import Limits, TensorSpec

Shape: TypeAlias = tuple[int, ...]
Numbers: TypeAlias = Mapping[str, float]
LARGEST = 1e6
"""Larger activations and gradients are sent as this: a network refuses them."""
_INT8 = 127


@dataclass(frozen=True, slots=True)
class Precision:
    """How a tensor travels.

    `float32` and `bfloat16` send each value with so many bits; `int8` sends whole numbers from
    -127 to 127 and their unit, the largest absolute value over 127. Its error is at most half a
    unit.

    >>> sent = Precision("int8").encode("x", torch.tensor([[1.0, -2.0]]))
    >>> Precision("int8").decode("x", *sent)
    tensor([[ 1.0079, -2.0000]])
    """

    name: str = "float32"

    def __post_init__(self) -> None:
        if self.name not in _DTYPES:
            raise ValueError(f"precision must be one of {[*_DTYPES]}, got {self.name!r}")

    def encode(self, name: str, tensor: Tensor) -> tuple[Payload, Numbers]:
        """Give the payload and the numbers in which `tensor` travels under `name`."""
        tensor = tensor.clamp(-LARGEST, LARGEST)
        if self.name != "int8":
            return {name: tensor.to(_DTYPES[self.name])}, {}
        unit = max(_magnitude(tensor), 1e-30) / _INT8
        whole = (tensor / unit).round_().clamp_(-_INT8, _INT8)
        return {name: whole.to(torch.int8)}, {f"{name}_unit": unit}

    def decode(self, name: str, payload: Payload, numbers: Numbers) -> Tensor:
        """Give the tensor back, in float32."""
        return payload[name].to(torch.float32) * numbers.get(f"{name}_unit", 1.0)

    def spec(self, shape: Shape, max_batch: int) -> TensorSpec:
        """Describe batches of at most `max_batch` tensors of `shape`."""
        dtype, numel = _DTYPES[self.name], max_batch * math.prod(shape)
        if self.name == "int8":
            return TensorSpec(dtype, (None, *shape), numel, -_INT8, _INT8)
        # `bfloat16` rounds up. With a measure, so that what is far beyond the usual is refused
        # sooner, and who has sent it is found.
        largest = 1.01 * LARGEST
        return TensorSpec(dtype, (None, *shape), numel, -largest, largest, _magnitude)

    def limits(self, name: str) -> dict[str, Limits]:
        """Limits of the numbers that travel with it."""
        return {f"{name}_unit": (0.0, LARGEST / _INT8)} if self.name == "int8" else {}


def _magnitude(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
