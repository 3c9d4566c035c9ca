"""Encoding of activations and gradients between stages: 32, 16 or 8 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from edgegossip.contract import LocalProtocolError, MessageSpec, Payload, TensorSpec

Shape: TypeAlias = tuple[int, ...]
LARGEST = 1e6
"""Largest activation or gradient; larger ones are clipped, because a receiver would reject
them.
"""
_INT8 = 127
_MAX_BATCHES = 2**53
_UP, _DOWN, _END = "activations-", "done-", "end-"


@dataclass(frozen=True, slots=True)
class Precision:
    """Precision of a tensor in transit.

    `float32` and `bfloat16` send each value with that many bits. `int8` sends whole numbers
    from -127 to 127 and their unit, which is the largest absolute value divided by 127; its
    error is at most half a unit.

    >>> sent = Precision("int8").encode("x", torch.tensor([[1.0, -2.0]]))
    >>> Precision("int8").decode("x", sent)
    tensor([[ 1.0079, -2.0000]])
    """

    name: str = "float32"

    def __post_init__(self) -> None:
        if self.name not in _DTYPES:
            raise ValueError(f"precision must be one of {[*_DTYPES]}, got {self.name!r}")

    @property
    def num_bytes(self) -> int:
        """Bytes per value."""
        return _DTYPES[self.name].itemsize

    def encode(self, name: str, tensor: Tensor) -> Payload:
        """Encode `tensor` as tensors under `name`."""
        # A large value would get this worker muted, for what another one may have sent it.
        tensor = tensor.clamp(-LARGEST, LARGEST)
        if self.name != "int8":
            return {name: tensor.to(_DTYPES[self.name])}
        # One unit for the batch. It is not 0, by which zeros would be divided.
        unit = torch.tensor([max(_magnitude(tensor), 1e-30) / _INT8])
        whole = (tensor / unit).round_().clamp_(-_INT8, _INT8)
        return {name: whole.to(torch.int8), f"{name}_unit": unit}

    def decode(self, name: str, payload: Payload) -> Tensor:
        """Decode the tensor, in float32."""
        return payload[name].to(torch.float32) * payload.get(f"{name}_unit", 1.0)

    def specs(self, name: str, shape: Shape, max_batch: int) -> dict[str, TensorSpec]:
        """Describe batches of at most `max_batch` tensors of `shape`.

        The description measures magnitudes, so values far beyond the usual range are rejected
        early, when their sender is still known.
        """
        dtype, numel = _DTYPES[self.name], max_batch * math.prod(shape)
        largest = 1.01 * LARGEST  # `bfloat16` rounds up
        if self.name != "int8":
            values = TensorSpec(dtype, (None, *shape), numel, -largest, largest, _magnitude)
            return {name: values}
        unit = TensorSpec(
            torch.float32,
            (1,),
            minimum=0.0,
            maximum=largest / _INT8,
            measure=lambda unit: _INT8 * _magnitude(unit),
        )
        return {
            name: TensorSpec(dtype, (None, *shape), numel, -_INT8, _INT8),
            f"{name}_unit": unit,
        }

    def messages(
        self, shape: Shape, max_batch: int, num_classes: int, max_round: int | None
    ) -> tuple[MessageSpec, MessageSpec]:
        """Describe the messages up and down over a boundary."""
        batch = {"batch": range(_MAX_BATCHES)}
        labels = TensorSpec(torch.int64, (None,), max_batch, 0, num_classes - 1)
        up = MessageSpec(
            {**self.specs("activations", shape, max_batch), "labels": labels},
            numbers={**batch, "wants_gradient": range(2)},
            max_round=max_round,
        )
        # Optional: an answer without a gradient says that the batch is done or dropped.
        down = MessageSpec(
            optional=self.specs("gradient", shape, max_batch),
            numbers=batch,
            max_round=max_round,
        )
        return up, down


def check_batch(
    stage: int, outputs: Payload, shape: Shape, max_batch: int, num_classes: int
) -> None:
    """Raise an error for outputs that the receiver would reject.

    Raises:
        LocalProtocolError: If `outputs` lacks a tensor, or its shape, size or labels are out of
            bounds.
    """
    # Here and not at the receiver, which would drop the message and mute this worker.
    name = f"the trainer of stage {stage}"
    if not {"activations", "labels"} <= outputs.keys():
        raise LocalProtocolError(
            f"{name} gives {sorted(outputs)}, not activations and labels; use one of "
            "training.stages"
        )
    activations, labels = outputs["activations"], outputs["labels"]
    if activations.shape[1:] != shape:
        raise LocalProtocolError(
            f"{name} gives activations of shape {tuple(activations.shape[1:])}, but "
            f"boundaries say {shape}; give the shape at which the model is cut"
        )
    if not 1 <= len(labels) <= max_batch:
        raise LocalProtocolError(
            f"{name} gives a batch of {len(labels)} samples, but max_batch is {max_batch}; "
            "make it one more than the batch size"
        )
    low, high = (int(extreme) for extreme in labels.aminmax())
    if low < 0 or high >= num_classes:
        raise LocalProtocolError(
            f"{name} gives labels from {low} to {high}, but num_classes is {num_classes}; "
            "labels must be from 0 to num_classes - 1"
        )


def kind_up(boundary: int) -> str:
    """The kind of the messages that go up over a boundary."""
    return f"{_UP}{boundary}"


def kind_down(boundary: int) -> str:
    """The kind of the answers that come down over a boundary."""
    return f"{_DOWN}{boundary}"


def kind_end(boundary: int) -> str:
    """The kind of the message that announces a worker's end."""
    return f"{_END}{boundary}"


def is_of_stages(kind: str) -> bool:
    """Whether messages of this kind pass between stages."""
    return kind.startswith((_UP, _DOWN, _END))


def _magnitude(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
