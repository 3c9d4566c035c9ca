"""Number of operations for training a model: the unit of all other costs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

OVERHEAD = 4e5
"""Overhead of a training sample (autograd, optimizer, loading), in operations of the same
duration: about 14 microseconds of a core at 2.9e10 FLOP/s.
"""


def training_flops(module: nn.Module, x: Tensor) -> float:
    """Floating-point operations of training `module` on one sample, including overhead.

    The operations of a forward pass are counted. A backward pass takes twice as many, for the
    gradients of activations and of weights. `OVERHEAD` is added, which matters most for small
    models.

    Args:
        module: A model; its mode and buffers are not changed.
        x: [1, ...] one prepared sample.

    >>> training_flops(nn.Linear(10, 5), torch.zeros(1, 10)) - OVERHEAD
    300.0
    """
    was_training = module.training
    module.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x)
    module.train(was_training)
    return OVERHEAD + 3.0 * int(counter.get_total_flops())
