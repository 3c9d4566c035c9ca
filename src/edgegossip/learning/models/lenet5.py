"""LeNet-5."""

from __future__ import annotations

from torch import nn

from edgegossip.learning.models.layout import channels_last
from edgegossip.learning.models.picture import picture_shape


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
