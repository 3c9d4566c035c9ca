"""Networks with few parameters, for small pictures: SqueezeNet and MobileNetV2."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgegossip.models.blocks import (
    SMALL,
    channels_last,
    initialize_like_he,
    picture_shape,
    scaled,
)
from edgegossip.models.dropout import Dropout
from edgegossip.models.normalization import Normalization, normalization_2d


class Fire(nn.Module):
    """Squeeze the channels by a 1 x 1 convolution; expand by 1 x 1 and 3 x 3 convolutions.

    Args:
        num_inputs: Channels of the input.
        num_squeezed: Number of channels between the two steps.
        num_expanded: Number of channels of each expansion; the output has twice as many.
    """

    def __init__(self, num_inputs: int, num_squeezed: int, num_expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(num_inputs, num_squeezed, kernel_size=1)
        self.expand1x1 = nn.Conv2d(num_squeezed, num_expanded, kernel_size=1)
        self.expand3x3 = nn.Conv2d(num_squeezed, num_expanded, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x).relu()
        return torch.cat([self.expand1x1(x), self.expand3x3(x)], dim=1).relu()


def squeezenet(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build SqueezeNet 1.1: 727,626 parameters for 10 classes, 1,235,496 for 1000.

    There are two changes for small pictures. The first convolution is padded and has a stride
    of 1 up to 32 pixels, which does not change the parameters. The classifier has no ReLU after
    it: with the authors' ReLU, its outputs on CIFAR-10 were all zero within 40 steps at any
    learning rate we tried, and zeros give no gradient.

    Args:
        input_shape: (channels, side, side) with a side of 8 to 64 pixels.
        num_classes: Number of classes: the size of the output.

    Raises:
        ValueError: If `input_shape` is not of such pictures.

    References:
        Iandola et al., "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters and
        <0.5MB model size", arXiv:1602.07360; version 1.1 from the authors' repository.
    """
    channels, side = picture_shape("squeezenet", input_shape, SMALL)
    model = nn.Sequential(
        nn.Conv2d(channels, 64, kernel_size=3, stride=1 if side <= 32 else 2, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Fire(64, 16, 64),
        Fire(128, 16, 64),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Fire(128, 32, 128),
        Fire(256, 32, 128),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        Fire(256, 48, 192),
        Fire(384, 48, 192),
        Fire(384, 64, 256),
        Fire(512, 64, 256),
        Dropout(0.5),
        nn.Conv2d(512, num_classes, kernel_size=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    for layer in convolutions:
        nn.init.kaiming_uniform_(layer.weight)
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
    # The authors start the classifier small.
    nn.init.normal_(convolutions[-1].weight, std=0.01)
    return channels_last(model)


STAGES = (
    # expansion, channels, blocks, stride of the first block
    (1, 16, 1, 1),
    (6, 24, 2, 1),  # 2 in the paper, which starts from 224 x 224
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Table 2 of the paper."""


class InvertedResidual(nn.Module):
    """Widen, filter each channel separately, narrow linearly; add the input if shapes match.

    Args:
        num_inputs: Channels of the input.
        num_outputs: Channels of the output.
        expansion: Channels of the hidden layer, in multiples of `num_inputs`.
        stride: Stride of the filters, in pixels.
        normalization: Kind of normalization after each convolution.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        expansion: int,
        stride: int,
        normalization: Normalization,
    ) -> None:
        super().__init__()
        has_bias = normalization == "none"
        width = expansion * num_inputs
        layers: list[nn.Module] = []
        if expansion > 1:
            layers.append(_convolution(num_inputs, width, 1, 1, normalization))
        layers += [
            _convolution(width, width, 3, stride, normalization, num_groups=width),
            nn.Conv2d(width, num_outputs, kernel_size=1, bias=has_bias),
            normalization_2d(normalization, num_outputs, activation=None),
        ]
        self.residual = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and num_inputs == num_outputs

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.residual(x)
        return x + residual if self.has_shortcut else residual


def mobilenet_v2(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    normalization: Normalization = "batch",
    width: float = 1.0,
) -> nn.Module:
    """Build MobileNetV2: 2,236,682 parameters for 10 classes, 3,504,872 for 1000.

    The second stage has a stride of 1, as does the first convolution for pictures of up to 32
    pixels. This does not change the parameters.

    Args:
        input_shape: (channels, side, side) with a side of 8 to 64 pixels.
        num_classes: Number of classes: the size of the output.
        normalization: Kind of normalization after each convolution.
        width: The paper's multiplier of the channels, in (0, 4]. The last convolution is never
            narrowed: it has 1280 channels up to a width of 1.

    Raises:
        ValueError: If `input_shape` is not of such pictures, `width` is out of range, or
            `normalization` is unknown.

    References:
        Sandler, Howard, Zhu, Zhmoginov and Chen, "MobileNetV2: Inverted Residuals and Linear
        Bottlenecks", CVPR 2018, arXiv:1801.04381, Table 2.
    """
    channels, side = picture_shape("mobilenet_v2", input_shape, SMALL)
    num_inputs = scaled(32, width, "mobilenet_v2")
    layers: list[nn.Module] = [
        _convolution(channels, num_inputs, 3, 1 if side <= 32 else 2, normalization)
    ]
    for expansion, num_channels, num_blocks, stride in STAGES:
        num_outputs = scaled(num_channels, width, "mobilenet_v2")
        for block in range(num_blocks):
            layers.append(
                InvertedResidual(
                    num_inputs,
                    num_outputs,
                    expansion=expansion,
                    stride=stride if block == 0 else 1,
                    normalization=normalization,
                )
            )
            num_inputs = num_outputs
    num_last = scaled(1280, max(1.0, width), "mobilenet_v2")
    model = nn.Sequential(
        *layers,
        _convolution(num_inputs, num_last, 1, 1, normalization),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        Dropout(0.2),
        nn.Linear(num_last, num_classes),
    )
    initialize_like_he(model)
    return channels_last(model)


def _convolution(
    num_inputs: int,
    num_outputs: int,
    kernel_size: int,
    stride: int,
    normalization: Normalization,
    *,
    num_groups: int = 1,
) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(
            num_inputs,
            num_outputs,
            kernel_size,
            stride,
            padding=kernel_size // 2,
            groups=num_groups,
            bias=normalization == "none",
        ),
        normalization_2d(normalization, num_outputs, activation=nn.ReLU6),
    )
