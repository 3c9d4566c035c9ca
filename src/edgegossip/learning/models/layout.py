"""Memory layout of pictures in models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgegossip.learning.normalization import EvoNormS0


def channels_last(model: nn.Module) -> nn.Module:
    """Switch `model` to the channels-last layout; return `model`.

    On CPUs, convolutions, pooling and batch normalization are then 1.1 to 1.7 times as fast;
    shapes and parameters do not change. `EvoNormS0` is slower in this layout, so a model with
    it is not changed.

    Args:
        model: Model of pictures [batch, channels, height, width]; other inputs pass unchanged.

    >>> model = channels_last(nn.Conv2d(3, 8, kernel_size=3))
    >>> model(torch.zeros(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)
    True
    """
    if not any(isinstance(layer, EvoNormS0) for layer in model.modules()):
        model.register_forward_pre_hook(_lay_out)
    return model


def is_channels_last(model: nn.Module) -> bool:
    """Return whether `channels_last` has changed `model`."""
    return _lay_out in model._forward_pre_hooks.values()


def _lay_out(_model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    pictures, *others = inputs
    if pictures.ndim != 4:  # as in the last stages of a cut model
        return inputs
    return (pictures.contiguous(memory_format=torch.channels_last), *others)
