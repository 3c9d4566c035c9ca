"""Learners of milliseconds, with each kind of optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tests.small_runs import adam, dataset, small_model
from torch import Tensor, nn

from edgegossip.contract.protocol import Work
from edgegossip.data.dataset import WorkerData
from edgegossip.data.pictures import flip_and_crop
from edgegossip.training.learner import Learner, LearnerSettings
from edgegossip.training.optimizer import SGD, AdamW, Muon
from edgegossip.training.sampling.batches import BatchStream
from edgegossip.training.sampling.sampler import Batch

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
    "fused": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "own": Slowing,
    "adamw": AdamW(lr=0.01),
    **({"muon": Muon(lr=0.01)} if hasattr(torch.optim, "Muon") else {}),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}


def seeded(make: Callable[[], nn.Module] = small_model) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def learner(**changes: Any) -> Learner:  # noqa: ANN401
    defaults: dict[str, Any] = {
        "model": seeded(),
        "loss": F.cross_entropy,
        "optimizer": adam,
        "dataset": DATA.training,
        "shard": SHARD,
        "batch_size": 8,
        "augmentation": partial(flip_and_crop, padding=1),
    }
    return learner_of(**defaults | changes)


def learner_of(**given: Any) -> Learner:  # noqa: ANN401
    """A learner of the fields of its settings and data, and of its other arguments."""
    return Learner(**arguments_of(given))


def arguments_of(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a learner, with the fields of its settings and data among `given`."""

    def made(kind: type[Any]) -> Any:  # noqa: ANN401
        return kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given})

    arguments = {"settings": made(LearnerSettings), "data": made(WorkerData)}
    used = {each.name for kind in (LearnerSettings, WorkerData) for each in fields(kind)}
    return {**arguments, **{k: v for k, v in given.items() if k not in used}}


def taken(
    batches: BatchStream, work: Work, keep_ratio: float = 1.0, **how: bool
) -> list[Batch]:
    """The batches of `work`, for selections that need no losses."""
    return [each for each in batches.take(work, keep_ratio, **how) if isinstance(each, Batch)]


def start(some: Learner) -> Tensor:
    return some.model.params.clone()
