"""MobileNetV2 for small pictures."""

from __future__ import annotations

from torch import Tensor, nn

from edgegossip.learning.dropout import Dropout
from edgegossip.learning.models.initialization import initialize_like_he
from edgegossip.learning.models.layout import channels_last
from edgegossip.learning.models.picture import SMALL, picture_shape
from edgegossip.learning.models.width import scaled
from edgegossip.learning.normalization import Normalization, normalization_2d

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
