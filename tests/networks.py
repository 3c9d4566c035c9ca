"""Our architectures with a few samples each, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.small_runs import SHAPE, small_model
from torch import nn

from edgegossip.data.dataset import ArraySplit, Dataset, from_tensors
from edgegossip.models import gpt, lenet5, mlp, resnet20
from edgegossip.training.loss import TokenCrossEntropy, next_token


def pictures_of(shape: tuple[int, ...], num_classes: int = 10) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    x = torch.randint(256, (80, *shape), generator=random).to(torch.uint8)
    split = ArraySplit(x, torch.randint(num_classes, (80,), generator=random))
    return {"dataset": Dataset("noise", split, split, num_classes, shape).training}


def texts() -> dict[str, Any]:
    x = torch.randint(9, (80, 17), generator=torch.Generator().manual_seed(0))
    return {
        "dataset": from_tensors("text", train=x, test=x).training,
        "forward": next_token,
        "loss": TokenCrossEntropy(),
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
    }


def small_gpt() -> nn.Module:
    return gpt(num_tokens=9, context=16, width=16, num_layers=2, num_heads=2)


def shaped(make: Callable[..., nn.Module], *shape: int) -> tuple[Any, dict[str, Any]]:
    return partial(make, shape, 10), pictures_of(shape)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "mlp": shaped(mlp, 1, 28, 28),
    "lenet5": shaped(lenet5, 1, 28, 28),
    "resnet20": shaped(resnet20, 3, 32, 32),
    "gpt": (small_gpt, texts()),
    "dropout": (small_model, pictures_of(SHAPE, 3)),
}
