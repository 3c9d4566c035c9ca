"""Optimizer factories that a resolved experiment can display."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from edgegossip.core.ranges import check_ranges

OptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes a worker's optimizer, for example ``lambda params: torch.optim.Adam(params)``."""


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent; the defaults are those of the EdgeGossip paper.

    The update is elementwise, so the learner passes all parameters as one flat tensor, which
    saves a kernel launch for each layer.

    Args:
        lr: Learning rate, at least 0.
        momentum: Momentum, in [0, 1).
        weight_decay: L2 penalty on all parameters, at least 0.
        nesterov: Use Nesterov's momentum.

    Raises:
        ValueError: If a number is out of range, or `nesterov` is set without momentum.
    """

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False

    is_elementwise = True

    def __post_init__(self) -> None:
        check_ranges(self, lr="in [0, inf)", weight_decay="in [0, inf)", momentum="in [0, 1)")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0, got 0")

    def __call__(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            params,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
        )
