"""Tasks of milliseconds that are no classifications."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.topology import ring
from edgegossip.data.dataset import Dataset, from_tensors
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.platform import Platform
from edgegossip.training.loss import TokenCrossEntropy
from edgegossip.training.metrics import (
    F1,
    R2,
    BitsPerCharacter,
    ExactMatch,
    MeanAbsoluteError,
    Perplexity,
)
from edgegossip.training.optimizer import SGD
from edgegossip.training.task import Task

TEXT = "the quick brown fox jumps over the lazy dog and runs away. " * 8


def numbers(num_samples: int = 96) -> tuple[Tensor, Tensor]:
    """Points, and a linear function of them with some noise."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 4, generator=random)
    noise = torch.randn(num_samples, 1, generator=random)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]]) + 3 + 0.1 * noise


def regression_data() -> Dataset:
    x, y = numbers()
    return from_tensors("numbers", train=(x[:64], y[:64]), test=(x[64:], y[64:]))


def regression(**changes: Any) -> Task:  # noqa: ANN401
    settings: dict[str, Any] = {
        "dataset": regression_data(),
        "model": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        "loss": F.mse_loss,
        "metrics": (MeanAbsoluteError(unit="years"), R2()),
        "optimizer": SGD(lr=0.05, momentum=0.5),
        "batch_size": 8,
    }
    return Task(**settings | changes)


def windows(context: int = 8) -> dict[str, Tensor]:
    """Overlapping pieces of a text; the next character is the target of each."""
    ids = torch.tensor(list(TEXT.encode())) - 32
    pieces = ids.unfold(0, context + 1, 3)
    return {"ids": pieces[:, :-1].contiguous(), "next": pieces[:, 1:].contiguous()}


class Speaker(nn.Module):
    """Predicts the next character by the present one and the mean of those before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 16)
        self.head = nn.Linear(32, 96)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        places = torch.arange(1, ids.shape[1] + 1, device=ids.device).view(-1, 1)
        logits: Tensor = self.head(torch.cat([x, x.cumsum(1) / places], dim=-1))
        return logits


def speak(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch["ids"]), batch["next"]


def language(**changes: Any) -> Task:  # noqa: ANN401
    samples = windows()
    settings: dict[str, Any] = {
        "dataset": from_tensors(
            "text",
            train={name: each[:-20] for name, each in samples.items()},
            test={name: each[-20:] for name, each in samples.items()},
        ),
        "model": Speaker,
        "forward": speak,
        "loss": TokenCrossEntropy(),
        "metrics": (Perplexity(), BitsPerCharacter()),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "batch_size": 16,
    }
    return Task(**settings | changes)


def labelling(**changes: Any) -> Task:  # noqa: ANN401
    x, _ = numbers()
    y = torch.stack([x[:, 0] > 0, x[:, 1] > x[:, 2], x.sum(1) > 1], dim=1).float()
    settings: dict[str, Any] = {
        "dataset": from_tensors("labels", train=(x[:64], y[:64]), test=(x[64:], y[64:])),
        "model": lambda: nn.Linear(4, 3),
        "loss": F.binary_cross_entropy_with_logits,
        "metrics": (F1(), ExactMatch()),
        "optimizer": SGD(lr=0.3),
        "batch_size": 8,
    }
    return Task(**settings | changes)


def experiment(task: Task, num_rounds: int = 12, **changes: Any) -> Experiment:  # noqa: ANN401
    settings: dict[str, Any] = {
        "algorithm": Gossip(topology=ring(3), num_rounds=num_rounds, local_steps=2),
        "platforms": tuple(Platform(throughput=v) for v in (400.0, 200.0, 100.0)),
        "seed": 1,
    }
    return Experiment(task=task, **settings | changes)
