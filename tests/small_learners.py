"""Learners of milliseconds, with each kind of optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tests.small_runs import adam, dataset, small_model
from torch import Tensor, nn

from edgegossip.data.pictures import flip_and_crop
from edgegossip.training.learner import Learner
from edgegossip.training.optimizer import SGD

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
DATA = dataset()
SHARD = torch.arange(0, 64, 2)


def amsgrad(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, amsgrad=True)


class Slowing(torch.optim.Optimizer):
    """A user's own optimizer, with state in its groups, as that of Prodigy is."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        kept = {"lr": 0.05, "num_steps": 0, "total": torch.zeros(()), "root": math.sqrt}
        super().__init__(params, kept)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                group["num_steps"] += 1
                for param in group["params"]:
                    group["total"] = group["total"] + param.grad.square().sum()
                    slowed = group["root"](group["num_steps"]) * (1 + group["total"])
                    param -= group["lr"] / slowed * param.grad


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.05),
    "nesterov": SGD(lr=0.05, nesterov=True, weight_decay=0.01),
    "adam by groups": adam,
    "amsgrad": amsgrad,
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.001, momentum=0.5),
    "own": Slowing,
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}


def seeded(make: Callable[[], nn.Module] = small_model) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def learner(**changes: Any) -> Learner:  # noqa: ANN401
    settings: dict[str, Any] = {
        "model": seeded(),
        "loss": F.cross_entropy,
        "optimizer": adam,
        "dataset": DATA.training,
        "shard": SHARD,
        "batch_size": 8,
        "augmentation": partial(flip_and_crop, padding=1),
    }
    return Learner(**settings | changes)


def start(some: Learner) -> Tensor:
    return some.model.params.clone()
