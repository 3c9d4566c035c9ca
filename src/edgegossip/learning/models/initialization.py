"""Initial weights: where they are drawn from, and those of rectified linear units."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def initialize_like_he(model: nn.Module) -> None:
    """Draw the weights of convolutions so that gradients keep their variance; zero biases.

    A deep network without normalisation would not start to learn from PyTorch's own initial
    weights, which shrink the signal in each layer. Draws from PyTorch's global generator.

    References:
        He, Zhang, Ren and Sun, "Delving Deep into Rectifiers", ICCV 2015, arXiv:1502.01852,
        equation 14.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


_GLOBAL_GENERATOR = threading.RLock()  # a model may be made of parts that do so too


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Let what is built within draw its weights from `seed`, and leave no trace of it.

    Initialisers draw from PyTorch's global generator, which is put back afterwards. Workers may
    be threads of one process: one at a time.
    """
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
