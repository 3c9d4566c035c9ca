"""The task that all systems get; needs nothing but NumPy, psutil and PyTorch.

A peer is not installed beside edgegossip, so data and models are read and built here again, and
`ours.py` checks that the models have the same layers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
from torch import Tensor, nn

LEARNING_RATE, MOMENTUM = 0.01, 0.9
MEAN, STD = 0.1307, 0.3081


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one system in one turn.

    Attributes:
        model: "lenet5" or "mlp" (784-64-10).
        workers: Number of workers, each with as many pictures.
        samples: Pictures of all workers together.
        rounds: Passes over them that are counted.
        batch_size: Samples a step.
        threads: Intra-op threads of a process.
        kind: What else a system distinguishes, such as the algorithm.
        batched: Choice of `--batched`, for ours.
        is_channels_last: Memory format of pictures and convolutions.
    """

    model: str
    workers: int
    samples: int
    rounds: int
    batch_size: int
    threads: int = 1
    kind: str = ""
    batched: Literal["auto", "on", "off"] = "auto"
    is_channels_last: bool = False

    @property
    def shard_size(self) -> int:
        return self.samples // self.workers

    @property
    def steps(self) -> int:
        """Steps of a worker's pass."""
        return -(-self.shard_size // self.batch_size)


def job_from_command_line() -> Job:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", help="the fields of `Job`, as JSON")
    return Job(**json.loads(parser.parse_args().job))


@functools.cache
def pictures(num_samples: int, *, is_channels_last: bool = False) -> tuple[Tensor, Tensor]:
    """The first pictures and labels of MNIST, standardized floats."""
    folder = Path(os.environ["EDGEGOSSIP_DATA"]) / "mnist"
    with gzip.open(folder / "train-images-idx3-ubyte.gz") as file:
        raw = np.frombuffer(file.read(16 + num_samples * 784)[16:], np.uint8)
    with gzip.open(folder / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(8 + num_samples)[8:], np.uint8)
    x = (torch.from_numpy(raw.copy()).view(-1, 1, 28, 28).float() / 255 - MEAN) / STD
    if is_channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, torch.from_numpy(labels.astype(np.int64))


def shard(job: Job, rank: int) -> tuple[Tensor, Tensor]:
    x, y = pictures(job.samples, is_channels_last=job.is_channels_last)
    return x[rank :: job.workers], y[rank :: job.workers]


def make_model(job: Job) -> nn.Sequential:
    if job.model == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    model = nn.Sequential(
        nn.Conv2d(1, 6, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(inplace=True),
        nn.Linear(120, 84),
        nn.ReLU(inplace=True),
        nn.Linear(84, 10),
    )
    if job.is_channels_last:
        return model.to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload]
    return model


def processor_seconds() -> float:
    """Processor time of this process and of its children that still run."""
    this = psutil.Process()
    total = 0.0
    for each in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


@dataclass
class StopWatch:
    """Wall and processor time, since it was made until it is stopped."""

    def __post_init__(self) -> None:
        self.processor, self.wall = -processor_seconds(), -time.perf_counter()

    def stop(self) -> None:
        self.wall += time.perf_counter()
        self.processor += processor_seconds()


def report(job: Job, watch: StopWatch, loss: float) -> None:
    """Tell the driver, on the last line."""
    num_samples = job.rounds * job.samples
    found = {
        "samples_per_second": num_samples / watch.wall,
        "samples_per_processor_second": num_samples / watch.processor,
        "seconds": watch.wall,
        "loss": loss,
    }
    print("\n" + json.dumps(found), flush=True)
