"""Deep convolutional networks without branches, for small pictures: AlexNet and kin."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from edgegossip.models.blocks import (
    SMALL,
    channels_last,
    initialize_like_he,
    picture_shape,
    scaled,
)
from edgegossip.models.dropout import Dropout
from edgegossip.models.normalization import Normalization, normalization_2d


def alexnet(input_shape: tuple[int, ...], num_classes: int, *, width: float = 1.0) -> nn.Module:
    """Build AlexNet: 57,023,306 parameters for 10 classes, 61,079,336 for 1000.

    Layers are torchvision's (61,100,840 parameters for 1000 classes) with two changes for
    small pictures. The first convolution is 3 x 3 with a stride of 1 (2 above 32 pixels)
    instead of 11 x 11 with a stride of 4, which removes 21,504 parameters. The 3 x 3 poolings
    are padded, so that a side of 8 pixels shrinks to 1, not 0. The fully connected head on
    256 x 6 x 6 features, with 96 % of the parameters, is unchanged. (Some sources quote 61.5
    million for AlexNet on CIFAR-10; we know of no such variant.)

    Args:
        input_shape: (channels, side, side) with a side of 8 to 64 pixels.
        num_classes: Number of classes: the size of the output.
        width: Factor on the channels and hidden units, in (0, 4]. At 0.25, a picture costs a
            sixteenth as much as in the full model.

    Raises:
        ValueError: If `input_shape` is not of such pictures, or `width` is out of range.

    References:
        Krizhevsky, Sutskever and Hinton, "ImageNet Classification with Deep Convolutional
        Neural Networks", NeurIPS 2012; Krizhevsky, "One Weird Trick for Parallelizing
        Convolutional Neural Networks", arXiv:1404.5997, whose widths torchvision follows.
    """
    channels, side = picture_shape("alexnet", input_shape, SMALL)
    a, b, c, d, hidden = (scaled(n, width, "alexnet") for n in (64, 192, 384, 256, 4096))
    model = nn.Sequential(
        nn.Conv2d(channels, a, kernel_size=3, stride=1 if side <= 32 else 2, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(a, b, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(b, c, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(c, d, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(d, d, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d((6, 6)),
        nn.Flatten(),
        Dropout(0.5),
        nn.Linear(d * 6 * 6, hidden),
        nn.ReLU(inplace=True),
        Dropout(0.5),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, num_classes),
    )
    # From PyTorch's initial weights, the loss on CIFAR-10 did not move in 80 steps.
    initialize_like_he(model)
    return channels_last(model)


CHANNELS = (32, 32, 64, 64)
HIDDEN = (256, 128, 64)


def eight_layers(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    normalization: Normalization = "batch",
    width: float = 1.0,
) -> nn.Sequential:
    """Build four convolutions and four linear layers: 1,156,586 parameters for 10 classes.

    The model is a sequence of eight blocks. Each block is a layer with everything before the
    next layer: normalization, ReLU, and 2 x 2 maximum pooling after the second and the fourth
    convolution. A cut between two blocks is a cut between two layers.

    Args:
        input_shape: (channels, side, side) with a side of 8 to 64 pixels; the count is for
            (3, 32, 32).
        num_classes: Number of classes: the size of the output.
        normalization: Kind of normalization after each convolution.
        width: Factor on the channels and hidden units, in (0, 4].

    Raises:
        ValueError: If `input_shape` is not of such pictures, `width` is out of range, or
            `normalization` is unknown.

    References:
        Chen, Zhao, Li and Zhao, "Exploring the Use of Synthetic Gradients for Distributed Deep
        Learning across Cloud and Edge Resources", HotEdge 2019, train a model of eight layers,
        convolutional and fully connected. The sizes here are ours.

    >>> len(eight_layers((1, 28, 28), 10))
    8
    """
    num_inputs, side = picture_shape("eight_layers", input_shape, SMALL)
    blocks: list[nn.Sequential] = []
    for num_channels in (scaled(size, width, "eight_layers") for size in CHANNELS):
        block = nn.Sequential(
            nn.Conv2d(num_inputs, num_channels, kernel_size=3, padding=1),
            *normalization_2d(normalization, num_channels),
        )
        blocks.append(block)
        num_inputs = num_channels
    for block in blocks[1::2]:
        block.append(nn.MaxPool2d(2))
    hidden = (scaled(size, width, "eight_layers") for size in HIDDEN)
    sizes = (num_inputs * (side // 4) ** 2, *hidden, num_classes)
    head = [nn.Sequential(nn.Linear(*each), nn.ReLU(inplace=True)) for each in pairwise(sizes)]
    head[0].insert(0, nn.Flatten())
    head[-1].pop(-1)  # no activation after the output
    model = nn.Sequential(*blocks, *head)
    initialize_like_he(model)
    channels_last(model)
    return model


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
    """Build VGG11 with a small head: 9,488,266 parameters for 10 classes.

    `sparse-push/cifar10-vgg11` trains it. A head of dropout, 512 units and the classes replaces
    the ImageNet head (4096, 4096, classes); there is no second dropout.

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
