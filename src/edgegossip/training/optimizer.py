"""Optimizers and learning-rate schedules, as values that a resolved experiment can display."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import torch
from torch import nn

from edgegossip.contract.errors import unknown_name
from edgegossip.contract.ranges import check_range, check_ranges

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


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """PyTorch's AdamW, with PyTorch's defaults.

    Args:
        lr: Learning rate, at least 0.
        betas: Decay of the first and the second moment, each in [0, 1).
        weight_decay: Decoupled weight decay on all parameters, at least 0.

    Raises:
        ValueError: If a number is out of range.

    References:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019,
        arXiv:1711.05101.
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        check_ranges(self, lr="in [0, inf)", weight_decay="in [0, inf)")
        for beta in self.betas:
            check_range("betas", beta, "in [0, 1)")

    def __call__(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            params, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay
        )


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon for matrices, AdamW for all other parameters; needs PyTorch 2.9 or later.

    Muon moves a matrix by about the nearest semi-orthogonal matrix to its momentum. Its steps
    are scaled to be about as long as those of AdamW, so that both use the same learning rate
    and weight decay. Vectors, scalars and convolution kernels are not matrices in this sense.
    Embeddings and output layers are matrices; the authors train these with AdamW, too, but an
    optimizer does not know which parameters they are.

    Args:
        lr: Learning rate of both, at least 0.
        momentum: Momentum of Muon, in [0, 1).
        betas: Decay of AdamW's moments, each in [0, 1).
        weight_decay: Decoupled weight decay on all parameters, at least 0.

    Raises:
        ValueError: If a number is out of range or, when the optimizer is made, if PyTorch has
            no Muon.

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the
        scale of Liu et al., "Muon is Scalable for LLM Training", 2025, arXiv:2502.16982.
        Therien et al., "MuLoCo", 2025, arXiv:2505.23725, use it within DiLoCo.
    """

    lr: float = 0.001
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        check_ranges(self, lr="in [0, inf)", weight_decay="in [0, inf)", momentum="in [0, 1)")
        for beta in self.betas:
            check_range("betas", beta, "in [0, 1)")

    def __call__(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        make_muon = getattr(torch.optim, "Muon", None)
        if make_muon is None:
            raise ValueError(
                f"Muon needs PyTorch 2.9 or later, got {torch.__version__}; update PyTorch or "
                "choose AdamW"
            )
        params = list(params)
        matrices = [each for each in params if each.ndim == 2]
        others = [each for each in params if each.ndim != 2]
        parts: list[torch.optim.Optimizer] = []
        if matrices:  # PyTorch makes no optimizer of nothing
            muon = make_muon(
                matrices,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            parts.append(muon)
        if others:
            adamw = AdamW(lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)
            parts.append(adamw(others))
        return PartwiseOptimizer(parts)


class PartwiseOptimizer(torch.optim.Optimizer):
    """Several optimizers, each of its own parameters, as one.

    Args:
        parts: The optimizers; this one shares their groups, and they its state.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for part in self._parts:
            part.step()


Rise = Literal["constant", "linear"]


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """A small initial rate.

    Args:
        share: Duration as a share of the run, in (0, 1]; one of 20 epochs is 0.05.
        start: Factor at the beginning, in (0, 1].
        rise: "constant" keeps this factor and then jumps to 1; "linear" rises evenly to 1.

    Raises:
        ValueError: If a number is out of range, or `rise` is unknown.

    References:
        Constant for one epoch at a tenth: the code of Aketi, Singh and Rabaey,
        "Sparse-Push", arXiv:2102.05715, as He et al. (arXiv:1512.03385, section 4.2) did.
        Linear: Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677.

    >>> [WarmUp(share=0.5, rise="linear").factor(p) for p in (0.0, 0.25, 0.5, 0.75)]
    [0.1, 0.55, 1.0, 1.0]
    """

    share: float = 0.05
    start: float = 0.1
    rise: Rise = "constant"

    def __post_init__(self) -> None:
        check_ranges(self, share="in (0, 1], a share of the run", start="in (0, 1]")
        if self.rise not in get_args(Rise):
            raise ValueError(unknown_name("rise", self.rise, get_args(Rise)))

    def factor(self, progress: float) -> float:
        """Factor of the rate at `progress` in [0, 1]."""
        if progress >= self.share:
            return 1.0
        risen = progress / self.share if self.rise == "linear" else 0.0
        return self.start + (1 - self.start) * risen


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """Base of learning-rate schedules: a factor on the optimizer's own rate.

    The factor depends on the completed share of the run (`Traits.progress`), not on a worker's
    own passes: under EdgeGossip the fastest worker makes many passes while the slowest makes
    one, and a returning worker would start from the beginning. In a given round, all workers of
    a synchronous algorithm train at the same rate. Give such an algorithm its real number of
    rounds: if a time limit ends it earlier, the rate does not reach its final value. Its rate
    depends on time only with `UNTIL_CUT_OFF`.

    Args:
        warm_up: Another factor, for a small initial rate; None for none.
    """

    warm_up: WarmUp | None = None

    def factor(self, progress: float) -> float:
        """Factor of the optimizer's rate at `progress` in [0, 1]."""
        warm = 1.0 if self.warm_up is None else self.warm_up.factor(progress)
        return warm * self._decay(progress)

    @abstractmethod
    def _decay(self, progress: float) -> float:
        """The factor without the warm-up."""


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The optimizer's own rate.

    >>> Constant(warm_up=WarmUp()).factor(0.0), Constant().factor(0.0)
    (0.1, 1.0)
    """

    def _decay(self, progress: float) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class StepDecay(Schedule):
    """Multiply the rate by `decay` at each milestone.

    Args:
        milestones: Shares of the run, ascending, in (0, 1].
        decay: Factor, above 0 and at most 1.

    Raises:
        ValueError: If a number is out of range.

    >>> [StepDecay(milestones=(0.5, 0.75), decay=0.5).factor(p) for p in (0.4, 0.5, 0.75)]
    [1.0, 0.5, 0.25]
    """

    milestones: tuple[float, ...]
    decay: float = 0.1

    def __post_init__(self) -> None:
        for milestone in self.milestones:
            check_range("milestones", milestone, "in (0, 1], a share of the run")
        if any(after <= before for before, after in pairwise(self.milestones)):
            raise ValueError(f"milestones must ascend, got {self.milestones}")
        check_ranges(self, decay="in (0, 1]")

    def _decay(self, progress: float) -> float:
        return self.decay ** sum(progress >= milestone for milestone in self.milestones)


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    r"""Half a cosine wave: from the full rate down to 0.

    After the share :math:`p` of the run, the factor is :math:`\frac12 (1 + \cos \pi p)`.

    References:
        Loshchilov and Hutter, "SGDR", ICLR 2017, arXiv:1608.03983, without restarts.

    >>> [round(Cosine().factor(progress), 3) for progress in (0.0, 0.25, 0.5, 1.0)]
    [1.0, 0.854, 0.5, 0.0]
    """

    def _decay(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2
