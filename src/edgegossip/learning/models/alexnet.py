"""AlexNet for small pictures."""

from __future__ import annotations

from torch import nn

from edgegossip.learning.dropout import Dropout
from edgegossip.learning.models.initialization import initialize_like_he
from edgegossip.learning.models.layout import channels_last
from edgegossip.learning.models.picture import SMALL, picture_shape
from edgegossip.learning.models.width import scaled


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
