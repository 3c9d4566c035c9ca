"""The CIFAR-10 network of the ADSP paper, adapted from a TensorFlow tutorial."""

from __future__ import annotations

from torch import nn

from edgegossip.learning.models.layout import channels_last
from edgegossip.learning.models.picture import picture_shape


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
