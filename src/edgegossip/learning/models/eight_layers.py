"""Eight layers, convolutional and fully connected, for training in stages."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from edgegossip.learning.models.initialization import initialize_like_he
from edgegossip.learning.models.layout import channels_last
from edgegossip.learning.models.picture import SMALL, picture_shape
from edgegossip.learning.models.width import scaled
from edgegossip.learning.normalization import Normalization, normalization_2d

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
