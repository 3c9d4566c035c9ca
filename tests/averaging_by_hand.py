"""A small model for workers of a framework, and its training by hand in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.script import ScriptWorker

NUM_SAMPLES, EPOCHS = 48, 3


def numbers() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 4, generator=random)
    return TensorDataset(x, x.sum(1, keepdim=True))


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return model


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def clipped_steps(models: list[nn.Sequential], every: int = 2) -> list[torch.optim.AdamW]:
    """By hand: AdamW on each worker's share, two batches accumulated, clipped, averaged.

    A step that is no whole round is left out.
    """
    n = len(models)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    shares = [[*DataLoader(share_of(rank, n), batch_size=4)] for rank in range(n)]
    num_steps = EPOCHS * len(shares[0]) // 2
    for step in range(num_steps // every * every):
        for model, optimizer, batches in zip(models, optimizers, shares, strict=True):
            optimizer.zero_grad()
            for number in (2 * step, 2 * step + 1):
                loss = loss_of(model, batches[number % len(batches)])
                (loss / 2).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        if (step + 1) % every == 0:
            average(models)
    return optimizers


def share_of(rank: int, num_workers: int) -> Any:  # noqa: ANN401
    transport = MemoryNetwork().transport(rank)
    worker = ScriptWorker(rank=rank, num_workers=num_workers, transport=transport)
    return worker.own_share(numbers())


def average(models: list[nn.Sequential]) -> None:
    with torch.no_grad():
        for pair in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([*pair]).mean(0)
            for each in pair:
                each.copy_(mean)


def moments(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([x.flatten() for s in optimizer.state.values() for x in s.values()])


def require_same(models: list[nn.Sequential], by_hand: list[nn.Sequential]) -> None:
    for ours, theirs in zip(models, by_hand, strict=True):
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)
    for same in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(same[0], same[-1])
