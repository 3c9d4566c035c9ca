"""Train your own model on your own data: a step-by-step version of the README's example.

python examples/own_model.py
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import edgegossip as eg


def make_dataset(num_samples: int = 2000) -> eg.Dataset:
    """Points in 20 dimensions whose class is the sign of a product: your data goes here.

    Any map-style PyTorch data set of pairs (x, y) will do, such as those of torchvision. Arrays
    that are already in memory are read faster through `ArraySplit`.
    """
    x = torch.randn(num_samples, 20, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    num_train = num_samples * 4 // 5
    train = TensorDataset(x[:num_train], y[:num_train])
    test = TensorDataset(x[num_train:], y[num_train:])
    return eg.from_torch("signs", train, test, num_classes=2)


def make_model() -> nn.Module:
    """A module with one output per class: your model goes here.

    It is called once, with PyTorch's global generator seeded by the experiment; every worker
    starts from a copy.
    """
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))


def make_experiment() -> eg.Experiment:
    """Four workers, the slowest a quarter as fast as the fastest, each with its own shard."""
    task = eg.Task(
        dataset=make_dataset(),
        model=make_model,
        optimizer=eg.SGD(lr=0.05, momentum=0.9),
        batch_size=16,
        partition=eg.Dirichlet(alpha=1.0),
    )
    return eg.Experiment(
        task=task,
        # One of 'epoch-gossip', 'gossip', 'all-reduce' would be built in the same way.
        algorithm=eg.GoSGD(topology=eg.complete(4), num_rounds=400, exchange_probability=0.2),
        platforms=eg.uneven(4, throughput=1000.0),
        links=eg.Links(default=eg.Link(latency=0.005, bandwidth=12.5e6)),
        seed=0,
    )


def main() -> None:
    # A folder holds one run, so each gets its own.
    out = Path("runs", "own-model", datetime.now().strftime("%Y-%m-%d-%H%M%S-%f"))
    results = eg.run(make_experiment(), out=out)

    print(f"averaged model: {results.final_accuracy:.1%}")
    print(f"workers' own:   {min(results.worker_accuracies):.1%} and better")
    print(f"took            {results.virtual_seconds:.1f} s of virtual time")

    # `params` is a state dict: the trained model is an ordinary module again.
    model = make_model()
    model.load_state_dict(results.params)

    print(f"report:         {eg.write_report(out)}")


if __name__ == "__main__":
    main()
