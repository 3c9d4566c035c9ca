"""The loss of a batch, and of each of its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from edgegossip.learning.dataset import TrainingData

Loss: TypeAlias = Callable[..., Tensor]
"""``loss(outputs, targets)``: the mean over the batch, a scalar. Where samples are ranked or
weighed, also ``loss(outputs, targets, reduction="none")``: one for each sample, as the
functions of `torch.nn.functional` do."""


def losses_of(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sample, [batch].

    Raises:
        ValueError: If `loss` cannot compute it.
    """
    problem = (
        f"ranking samples needs the loss of each one, but {loss!r} takes no "
        "reduction='none' as the functions of torch.nn.functional do; let it, or choose "
        "Random() or Cyclic()"
    )
    try:
        losses = loss(outputs, targets, reduction="none")
    except TypeError as error:
        raise ValueError(problem) from error
    if losses.shape[:1] != targets.shape[:1]:
        raise ValueError(problem)
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def prepare_batch(
    dataset: TrainingData, x: Tensor, y: Tensor, torch_device: torch.device
) -> tuple[Tensor, Tensor]:
    """The model's input: on the device, normalized, pictures channels-last."""
    return to_model(dataset.prepare(x.to(torch_device)), torch_device), y.to(torch_device)


def to_model(x: Tensor, torch_device: torch.device) -> Tensor:
    """Prepared samples on the device, pictures in the fastest layout of its kernels."""
    x = x.to(torch_device)
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
