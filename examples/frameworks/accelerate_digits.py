"""Handwritten digits with Accelerate; its loop takes part in a run through a `TrainingLoop`.

    edgegossip script -n 4 examples/frameworks/accelerate_digits.py

Started with python, it trains alone. Needs pip install 'edgegossip[transformers]'.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edgegossip as eg


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1797 pictures of 8x8 pixels, a fifth of them for testing."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TensorDataset(x[360:], y[360:]), TensorDataset(x[:360], y[:360])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    set_seed(options.seed)
    worker = eg.script_worker()
    train, test = digits()
    train = worker.own_share(train)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(train, batch_size=16, shuffle=True),
    )
    num_steps = options.epochs * len(loader)
    with worker.training_loop(
        model, eg.averaging(every=4), num_samples=len(train), num_steps=num_steps
    ) as loop:
        while not loop.is_over:
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                loop.step(loss.item(), len(x))
                if loop.is_over:
                    break  # the model has the final parameters
    x, y = test.tensors
    with torch.no_grad():
        print(f"test loss {F.cross_entropy(model(x), y):.4f}")


if __name__ == "__main__":
    main()
