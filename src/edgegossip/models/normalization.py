"""Normalization of pictures within a model, by name, with the following activation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from edgegossip.contract.errors import unknown_name

Normalization: TypeAlias = Literal["none", "batch", "group", "evonorm"]
"""Kinds of normalization. Only "batch" has running statistics, which suffer from skewed data.
"""


def normalization_2d(
    kind: Normalization,
    num_channels: int,
    *,
    activation: type[nn.ReLU | nn.ReLU6] | None = nn.ReLU,
) -> nn.Sequential:
    """Build the layers after a convolution: a normalization and its activation.

    They are built together because EvoNorm is both in one. Without an activation, a GroupNorm
    with the same groups replaces EvoNorm (the authors' code only scales and shifts in this
    case).

    Args:
        kind: Kind of normalization.
        num_channels: Number of channels of the input [batch, num_channels, height, width].
        activation: Class of the activation; None for none.

    Raises:
        ValueError: If `kind` is unknown.

    >>> [type(layer).__name__ for layer in normalization_2d("batch", 16)]
    ['BatchNorm2d', 'ReLU']
    >>> [type(layer).__name__ for layer in normalization_2d("evonorm", 16)]
    ['EvoNormS0']
    """
    layers: list[nn.Module] = []
    match kind:
        case "none":
            pass
        case "batch":
            layers.append(nn.BatchNorm2d(num_channels))
        case "evonorm" if activation is not None:
            return nn.Sequential(EvoNormS0(num_channels))
        case "group" | "evonorm":
            layers.append(nn.GroupNorm(num_groups(num_channels), num_channels))
        case _:
            raise ValueError(unknown_name("normalization", kind, get_args(Normalization)))
    if activation is not None:
        layers.append(activation(inplace=True))
    return nn.Sequential(*layers)


def num_groups(num_channels: int) -> int:
    """Choose the number of groups: 8, or fewer if `num_channels` is not divisible by 8.

    Some layers of a ResNet-20 have only 16 channels, fewer than the papers' 32 groups.

    >>> num_groups(64), num_groups(12)
    (8, 4)
    """
    return math.gcd(8, num_channels)


def running_statistics(module: nn.Module) -> list[nn.modules.batchnorm._NormBase]:
    """The layers of `module` with running means and variances."""
    kind = nn.modules.batchnorm._NormBase
    layers = [layer for layer in module.modules() if isinstance(layer, kind)]
    return [layer for layer in layers if layer.track_running_stats]


def trained_statistics(module: nn.Module) -> list[nn.modules.batchnorm._NormBase]:
    """The layers whose running statistics training changes.

    Others are frozen: their ``train`` leaves them in eval mode.
    """
    was_training = module.training
    module.train()
    layers = [layer for layer in running_statistics(module) if layer.training]
    module.train(was_training)
    return layers


def reset_lost_statistics(module: nn.Module) -> None:
    """Reset the layers with running statistics that are no longer finite."""
    for layer in running_statistics(module):
        if not all(buffer.isfinite().all() for buffer in layer.buffers()):
            layer.reset_running_stats()


def warn_of_running_statistics(module: nn.Module, *, has_buffers: bool) -> None:
    """Warn if `module` has running statistics, which do not fit workers with different data.

    Args:
        module: Model to train on skewed shards.
        has_buffers: Whether the statistics are exchanged and averaged with the parameters.
    """
    if not (layers := trained_statistics(module)):
        return
    then = (
        "the running ones are exchanged and averaged with the parameters, but fit no single "
        "worker's batches"
        if has_buffers
        else "the running ones are not exchanged, but measured again for each evaluation, on "
        "samples of all workers"
    )
    warnings.warn(
        f"{len(layers)} layers ({type(layers[0]).__name__}) normalize each batch by its own "
        f"statistics, which differ between workers with skewed data; {then}. Use a model with "
        "normalization='evonorm' or 'group' instead; in a model of your own, nn.GroupNorm",
        stacklevel=3,
    )


def warn_of_other_buffers(module: nn.Module, exchanged: Iterable[Tensor]) -> None:
    """Warn of exchanged buffers that are no running statistics, as they may be constants.

    Exchanges with compression change constants, and no training changes them back.

    Args:
        module: Model of a worker.
        exchanged: Its buffers that are exchanged and averaged with the parameters.
    """
    known = {id(each) for layer in running_statistics(module) for each in layer.buffers()}
    others = {id(each) for each in exchanged} - known
    names = [name for name, buffer in module.named_buffers() if id(buffer) in others]
    if names:
        warnings.warn(
            f"buffers {names} are exchanged and averaged with the parameters, because training "
            "may change them. Register constants, such as masks and encodings of positions, "
            "with persistent=False: compression could change them",
            stacklevel=3,
        )


class EvoNormS0(nn.Module):
    r"""Normalization and activation in one layer, which treats each sample by itself.

    .. math:: y = \frac{x\,\sigma(v x)}{\sqrt{s^2_{h,w,c/g}(x) + \epsilon}} \gamma + \beta

    where :math:`s^2` is the variance within one sample and one group of channels, and
    :math:`v`, :math:`\gamma`, :math:`\beta` are learned for each channel. Add no activation
    after it.

    Args:
        num_channels: Number of channels of the input [batch, num_channels, height, width].
        epsilon: Added to the variance.

    References:
        Liu, Brock, Simonyan and Le, "Evolving Normalization-Activation Layers", NeurIPS 2020,
        arXiv:2004.02967, Table 1. Here, `num_groups` chooses the number of groups.
    """

    def __init__(self, num_channels: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.num_groups = num_groups(num_channels)
        self.epsilon = epsilon
        shape = (num_channels, 1, 1)
        self.v = nn.Parameter(torch.ones(shape))
        self.gamma = nn.Parameter(torch.ones(shape))
        self.beta = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, *_ = x.shape
        groups = x.reshape(batch, self.num_groups, -1)
        centered = groups - groups.mean(2, keepdim=True)
        # On the CPU, `Tensor.var` takes several times as long as this product.
        variance = torch.linalg.vecdot(centered, centered) / groups.shape[2]
        scale = (variance + self.epsilon).rsqrt()  # [batch, group]
        # The scale is expanded to channels, instead of grouping x, which keeps its layout.
        scale = scale.repeat_interleave(channels // self.num_groups, dim=1)[..., None, None]
        return torch.addcmul(self.beta, x * torch.sigmoid(self.v * x), scale * self.gamma)
