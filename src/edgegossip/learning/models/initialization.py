"""Initial weights for networks of rectified linear units."""

from __future__ import annotations

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
