"""A training loop of your own with a run folder, checkpoints and a report.

edgegossip script -n 3 examples/own_loop.py --out runs/own-loop
edgegossip gather examples/own_loop.py:experiment --out runs/own-loop

The first command starts three workers on this machine, which reach each other over sockets.
After Ctrl+C, or if all are killed, the same command continues at their checkpoints. The second
command measures the averaged model over time, and draws the report. With several machines, give
each its `--rank`, and copy the folders workers/R to one machine before gathering.
"""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edgegossip as eg

LR, BATCH_SIZE = 0.05, 16


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """Points whose class is the sign of a product, for training and testing; yours go here."""
    x = torch.randn(2000, 20, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    return TensorDataset(x[:1600], y[:1600]), TensorDataset(x[1600:], y[1600:])


def make_model() -> nn.Module:
    """A small perceptron; yours goes here."""
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))


def experiment(num_workers: int = 3, num_rounds: int = 200) -> eg.Experiment:
    """The run, for the folders and the report.

    The report measures the model on the test samples. The optimizer, its rate and the batch
    size are only recorded: the loop below has its own.
    """
    train, test = make_data()
    task = eg.Task(
        dataset=eg.from_torch("signs", train, test, num_classes=2),
        model=make_model,
        optimizer=eg.SGD(lr=LR, momentum=0.9),
        schedule=eg.Cosine(),
        batch_size=BATCH_SIZE,
    )
    return eg.Experiment(
        task=task,
        # Eight optimizer steps before each exchange.
        algorithm=eg.Gossip(
            topology=eg.complete(num_workers), num_rounds=num_rounds, local_steps=8
        ),
        platforms=(eg.Platform(throughput=1000.0),) * num_workers,  # not simulated
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs", "own-loop"))
    parser.add_argument("--num-rounds", type=int, default=200)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)  # all workers begin with the same model

    worker = eg.script_worker()
    run = experiment(worker.num_workers, options.num_rounds)
    train, test = make_data()
    own = worker.own_share(train)
    loader = DataLoader(own, batch_size=BATCH_SIZE, shuffle=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    out = options.out / "workers" / str(worker.rank)
    folder = eg.LoopFolder(
        out=out,
        experiment=run,
        stateful={"optimizer": optimizer},  # kept in checkpoints, beside the model
        # trackers=(eg.TensorBoard(),) would show this worker's numbers live.
    )
    with worker.training_loop(
        model, run.algorithm, num_samples=len(own), folder=folder
    ) as loop:
        while not loop.is_over:
            for x, y in loader:
                for group in optimizer.param_groups:  # half a cosine, over the whole run
                    group["lr"] = LR * (1 + math.cos(math.pi * loop.progress)) / 2
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                loop.step(loss.item(), num_samples=len(x))
                if loop.is_over:
                    break  # the model has the final parameters

    # It is an ordinary module: measure, save or serve it.
    x, y = test.tensors
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    torch.save(model.state_dict(), out / "model.pt")
    print(f"worker {worker.rank}: test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
