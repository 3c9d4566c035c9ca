"""SqueezeNet for small pictures."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgegossip.learning.dropout import Dropout
from edgegossip.learning.models.layout import channels_last
from edgegossip.learning.models.picture import SMALL, picture_shape


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
    _initialize(model)
    return channels_last(model)


def _initialize(model: nn.Sequential) -> None:
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    for layer in convolutions:
        nn.init.kaiming_uniform_(layer.weight)
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
    # The authors start the classifier small.
    nn.init.normal_(convolutions[-1].weight, std=0.01)
