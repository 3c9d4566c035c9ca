"""Models that train in seconds: dense layers, LeNet-5, and two more convolutional networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from edgegossip.models.blocks import channels_last, picture_shape


def mlp(
    input_shape: tuple[int, ...], num_classes: int, *, hidden: Sequence[int] = (64,)
) -> nn.Module:
    """Build a multilayer perceptron with rectified linear units.

    Args:
        input_shape: Shape of one sample, any.
        num_classes: Number of classes: the size of the output.
        hidden: Sizes of the hidden layers; empty for a logistic regression.

    Raises:
        ValueError: If a hidden layer has a size below 1.

    >>> sum(parameter.numel() for parameter in mlp((1, 8, 8), 10, hidden=()).parameters())
    650
    """
    if any(size < 1 for size in hidden):
        raise ValueError(f"hidden layers need a size of at least 1, got {tuple(hidden)}")
    sizes = [math.prod(input_shape), *hidden, num_classes]
    layers: list[nn.Module] = [nn.Flatten()]
    for size, next_size in pairwise(sizes):
        layers += [nn.Linear(size, next_size), nn.ReLU()]
    return nn.Sequential(*layers[:-1])  # no activation after the output


def lenet5(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build LeNet-5: 61,706 parameters for MNIST, 62,006 for CIFAR-10.

    Args:
        input_shape: (channels, 28, 28), padded to 32 x 32, or (channels, 32, 32).
        num_classes: Number of classes: the size of the output.

    Raises:
        ValueError: If `input_shape` is not of such pictures.

    References:
        LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document
        Recognition", Proceedings of the IEEE 1998. Departures, as is common today: rectified
        linear units instead of a scaled tanh, and maximum pooling instead of trained averages;
        the second convolution sees all six channels, and the output is linear.
    """
    channels, side = picture_shape("lenet5", input_shape, (28, 32))
    model = nn.Sequential(
        nn.Conv2d(channels, 6, kernel_size=5, padding=(32 - side) // 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(inplace=True),
        nn.Linear(120, 84),
        nn.ReLU(inplace=True),
        nn.Linear(84, num_classes),
    )
    return channels_last(model)


def lrn_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build two convolutions with local response normalization, 148,298 parameters.

    Args:
        input_shape: (channels, 32, 32).
        num_classes: Number of classes: the size of the output.

    Raises:
        ValueError: If `input_shape` is not of such pictures.

    References:
        Hu, Wang & Wu, AAAI 2020, arXiv:1911.06949, whose published code omits the two hidden
        layers of TensorFlow's CIFAR-10 tutorial. Departure: pooling pads one pixel on each
        side; TensorFlow pads on the right and below.

    >>> model = lrn_cnn((3, 32, 32), 10)
    >>> sum(parameter.numel() for parameter in model.parameters())
    148298
    """
    channels, _ = picture_shape("lrn_cnn", input_shape, (32,))
    model = nn.Sequential(
        nn.Conv2d(channels, 64, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0),
        nn.Conv2d(64, 64, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, num_classes),
    )
    return channels_last(model)


def sensor_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a network of three convolutions over time: 65,350 parameters for UCI HAR.

    The mean over time before the output makes the network independent of the position of events
    in the window, and of the window's length.

    Args:
        input_shape: (channels, length) of a window, with a length of at least 4; (9, 128) in
            UCI HAR.
        num_classes: Number of classes: the size of the output.

    Raises:
        ValueError: If samples are not such windows.

    >>> sum(parameter.numel() for parameter in sensor_cnn((9, 128), 6).parameters())
    65350
    """
    if len(input_shape) != 2 or input_shape[1] < 4:
        raise ValueError(
            "sensor_cnn takes windows (channels, length) with a length of at least 4, "
            f"got input_shape={input_shape}; use a model for pictures, or mlp"
        )
    channels, _ = input_shape
    return nn.Sequential(
        nn.Conv1d(channels, 64, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool1d(2),
        nn.Conv1d(64, 64, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool1d(2),
        nn.Conv1d(64, 128, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )
