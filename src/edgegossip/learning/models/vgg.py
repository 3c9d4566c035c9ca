"""VGG networks for 32 x 32 pictures."""

from __future__ import annotations

from torch import nn

from edgegossip.learning.dropout import Dropout
from edgegossip.learning.models.initialization import initialize_like_he
from edgegossip.learning.models.layout import channels_last
from edgegossip.learning.models.picture import picture_shape
from edgegossip.learning.models.width import scaled
from edgegossip.learning.normalization import Normalization, normalization_2d

CONFIGURATION_A = ((64,), (128,), (256, 256), (512, 512), (512, 512))
CONFIGURATION_D = ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)
"""Widths of the convolutions between two poolings, from Table 1 of the paper."""


def vgg11(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    normalization: Normalization = "none",
    width: float = 1.0,
) -> nn.Module:
    """Build VGG11 as Sparse-Push trains it: 9,488,266 parameters for 10 classes.

    A head of dropout, 512 units and the classes replaces the ImageNet head (4096, 4096,
    classes); there is no second dropout.

    Args:
        input_shape: (channels, 32, 32).
        num_classes: Number of classes: the size of the output.
        normalization: Kind of normalization after each convolution.
        width: Factor on the channels and hidden units, in (0, 4].

    Raises:
        ValueError: If `input_shape` is not of such pictures, `width` is out of range, or
            `normalization` is unknown.

    References:
        Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
        Recognition", ICLR 2015, arXiv:1409.1556, Table 1, column A.
        Aketi, Singh and Rabaey, "Sparse-Push", arXiv:2102.05715; the head is that of the
        first author's published code.
    """
    return _vgg("vgg11", CONFIGURATION_A, input_shape, num_classes, normalization, width)


def vgg16(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    normalization: Normalization = "none",
    width: float = 1.0,
) -> nn.Module:
    """Build VGG16 with the head of `vgg11`: 14,982,474 parameters for 10 classes.

    Column D of the table cited in `vgg11`.

    Args:
        input_shape: (channels, 32, 32).
        num_classes: Number of classes: the size of the output.
        normalization: Kind of normalization after each convolution.
        width: Factor on the channels and hidden units, in (0, 4].

    Raises:
        ValueError: If `input_shape` is not of such pictures, `width` is out of range, or
            `normalization` is unknown.
    """
    return _vgg("vgg16", CONFIGURATION_D, input_shape, num_classes, normalization, width)


def _vgg(
    name: str,
    configuration: tuple[tuple[int, ...], ...],
    input_shape: tuple[int, ...],
    num_classes: int,
    normalization: Normalization,
    width: float,
) -> nn.Module:
    num_inputs, _ = picture_shape(name, input_shape, (32,))
    layers: list[nn.Module] = []
    for widths in configuration:
        for num_channels in (scaled(each, width, name) for each in widths):
            layers += [
                nn.Conv2d(num_inputs, num_channels, kernel_size=3, padding=1),
                normalization_2d(normalization, num_channels),
            ]
            num_inputs = num_channels
        layers.append(nn.MaxPool2d(2))
    num_hidden = scaled(512, width, name)
    model = nn.Sequential(
        *layers,
        nn.Flatten(),
        Dropout(0.5),
        nn.Linear(num_inputs, num_hidden),
        nn.ReLU(inplace=True),
        nn.Linear(num_hidden, num_classes),
    )
    initialize_like_he(model)
    return channels_last(model)
