"""Fully connected layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn


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
