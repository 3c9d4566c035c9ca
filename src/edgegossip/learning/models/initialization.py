"""Initial weights: their random stream, and weights for rectified linear units."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def initialize_like_he(model: nn.Module) -> None:
    """Draw the weights of convolutions to keep the variance of gradients; zero the biases.

    A deep network without normalization would not start to learn from PyTorch's own initial
    weights, which shrink the signal in each layer. Draws are from PyTorch's global generator.

    References:
        He, Zhang, Ren and Sun, "Delving Deep into Rectifiers", ICCV 2015, arXiv:1502.01852,
        equation 14.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


_GLOBAL_GENERATOR = threading.RLock()  # parts of a model may lock it again


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Draw the weights of models built within the block from `seed`, without side effects.

    Initializers draw from PyTorch's global generator, which is restored afterwards. A lock
    serializes workers that are threads of one process.
    """
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
