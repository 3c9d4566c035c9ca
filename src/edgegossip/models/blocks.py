"""Building blocks of several models: initial weights, widths, checks of shapes, layout."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from edgegossip.models.normalization import EvoNormS0


def initialize_like_he(model: nn.Module) -> None:
    """Draw the weights of convolutions to keep the variance of gradients; zero the biases.

    A deep network without normalization would not start to learn from PyTorch's own initial
    weights, which shrink the signal in each layer. Draws are from PyTorch's global generator.

    References:
        He, Zhang, Ren and Sun, "Delving Deep into Rectifiers", ICCV 2015, arXiv:1502.01852,
        equation 14.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


_GLOBAL_GENERATOR = threading.RLock()  # parts of a model may lock it again


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Draw the weights of models built within the block from `seed`, without side effects.

    Initializers draw from PyTorch's global generator, which is restored afterwards. A lock
    serializes workers that are threads of one process.
    """
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def scaled(num_channels: int, width: float, model: str) -> int:
    """Round `width` times `num_channels` to a multiple of 8, at most 10 % below the product.

    Args:
        num_channels: Number of channels, or of hidden units, in the full model.
        width: Factor on the channels, above 0 and at most 4.
        model: Name of the model, for the message.

    Raises:
        ValueError: If the width is out of range.

    References:
        Sandler et al., "MobileNetV2", arXiv:1801.04381, and the rounding of its authors' code.

    >>> scaled(24, 0.5, "mobilenet_v2"), scaled(24, 0.25, "mobilenet_v2")
    (16, 8)
    """
    if not 0 < width <= 4:
        raise ValueError(f"{model} takes a width above 0 and up to 4, got {width}")
    nearest = max(8, int(num_channels * width + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * num_channels * width else nearest + 8


SMALL = range(8, 65)
"""Sides, in pixels, for models adapted from pictures of 224 x 224."""


def picture_shape(
    model: str, input_shape: tuple[int, ...], sides: Sequence[int]
) -> tuple[int, int]:
    """Return (channels, side) from the shape of a square picture.

    Args:
        model: Name of the model, for the message.
        input_shape: Shape of one sample, (channels, height, width).
        sides: Allowed heights, in pixels.

    Raises:
        ValueError: If the sample is not a square picture, or its side is out of range.

    >>> picture_shape("lenet5", (1, 28, 28), (28, 32))
    (1, 28)
    """
    match input_shape:
        case (channels, height, width) if height == width and height in sides:
            return channels, height
    is_range = isinstance(sides, range) and len(sides) > 1
    allowed = f"{sides[0]} to {sides[-1]}" if is_range else " or ".join(map(str, sides))
    raise ValueError(
        f"{model} takes square pictures (channels, height, width) with a height of {allowed}, "
        f"got input_shape={input_shape}; resize them, or use a model that takes any shape (mlp)"
    )


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


def hooks(module: nn.Module) -> list[object]:
    """The hooks of `module` itself, not of its children."""
    kinds = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return [hook for each in kinds for hook in each.values()]
