"""The ResNet-20 of the CIFAR-10 experiments."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from edgegossip.models.blocks import SMALL, channels_last, initialize_like_he, picture_shape
from edgegossip.models.normalization import Normalization, normalization_2d

NUM_BLOCKS = 3
"""Blocks per stage: n in the paper's 6 n + 2 layers."""


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a parameter-free shortcut.

    Args:
        num_inputs: Channels of the input.
        num_outputs: Channels of the output.
        normalization: Kind of normalization after each convolution.
    """

    def __init__(self, num_inputs: int, num_outputs: int, normalization: Normalization) -> None:
        super().__init__()
        self.stride = num_outputs // num_inputs  # twice the channels, half the side
        self.num_new_channels = num_outputs - num_inputs
        self.residual = nn.Sequential(
            _convolution(num_inputs, num_outputs, self.stride, normalization),
            normalization_2d(normalization, num_outputs),
            _convolution(num_outputs, num_outputs, 1, normalization),
            normalization_2d(normalization, num_outputs, activation=None),
        )

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.residual(x)
        return (residual + self._shortcut(x)).relu()

    def _shortcut(self, x: Tensor) -> Tensor:
        """Option A of the paper: every second pixel, and zeros for the new channels."""
        if self.num_new_channels == 0:
            return x
        before = self.num_new_channels // 2
        after = self.num_new_channels - before
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, after))


def resnet20(
    input_shape: tuple[int, ...], num_classes: int, *, normalization: Normalization = "batch"
) -> nn.Module:
    """Build the ResNet-20 for CIFAR-10: 269,722 parameters for 10 classes.

    Args:
        input_shape: (channels, side, side) with a side of 8 to 64 pixels.
        num_classes: Number of classes: the size of the output.
        normalization: Kind of normalization after each convolution. With "evonorm", a block
            ends as in the paper: normalize (by GroupNorm), add, rectify.

    Raises:
        ValueError: If `input_shape` is not of such pictures, or `normalization` is unknown.

    References:
        He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016,
        arXiv:1512.03385, section 4.2 (Table 6: 0.27 million parameters).
    """
    channels, _ = picture_shape("resnet20", input_shape, SMALL)
    widths = [16] * (NUM_BLOCKS + 1) + [32] * NUM_BLOCKS + [64] * NUM_BLOCKS
    blocks = [
        BasicBlock(num_inputs, num_outputs, normalization)
        for num_inputs, num_outputs in pairwise(widths)
    ]
    model = nn.Sequential(
        _convolution(channels, 16, 1, normalization),
        normalization_2d(normalization, 16),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )
    initialize_like_he(model)
    return channels_last(model)


def _convolution(
    num_inputs: int, num_outputs: int, stride: int, normalization: Normalization
) -> nn.Conv2d:
    has_bias = normalization == "none"
    return nn.Conv2d(num_inputs, num_outputs, 3, stride, padding=1, bias=has_bias)
