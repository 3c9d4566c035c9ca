"""How much memory do batches take that wait, and how long does each stage wait for the others?

    python -m benchmarks.stage_memory [--waiting 2 4 16] [--json]

Processes of this machine hold a stage each of a model, and meet over zenoh on loopback, with
certificates, as in `benchmarks.stage_kills`.

Memory: two stages, of which the last takes `SLOW` seconds for a batch at least, so that batches
pile up as far as they may: the first sends up `max_waiting` without an answer. A batch and its
gradient are 4.2 MB each. Measured is the resident memory of each process, each tenth of a
second for `MEASURED` seconds once `SETTLED` are over.

Waiting: two stages of a thread each, with the same work by the cut (`plan_cut`). Measured is
the share of time between two pieces of training in the middle half of the run, by each stage's
log: sending, receiving and Python are in it, and so is what else the machine was busy with.
Give these processes precedence where it is busy (`nice`).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmarks.kept import about
from benchmarks.stage_kills import Run, certificates
from torch import nn

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.contract.protocol import Seconds, Train
from edgegossip.contract.trainer import TrainingResult
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.platform import Platform
from edgegossip.training.stages.cutting import blocks
from edgegossip.training.stages.decoupled import DecoupledStage
from edgegossip.training.stages.planning import block_costs, plan_cut
from edgegossip.training.stages.staged import staged
from edgegossip.training.stages.teachers import Greedy
from edgegossip.training.task import Task

SLOW: Seconds = 0.1
SETTLED: Seconds = 6.0
MEASURED: Seconds = 4.0
WIDTH = 8192
"""Numbers of a sample in each link of the runs that measure memory."""
BATCH_SIZE = 128
HIDDEN = 1024
"""Units of each layer of the runs that measure waiting."""
NUM_BATCHES = 120
CHECKPOINT: Seconds = 60.0
"""As by default. What was sent since the last one of its receiver is kept, up to 64 MiB."""
MB = 1e6


class Slow(DecoupledStage):
    """A stage that takes its time, if it is the last."""

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        began = time.monotonic()
        result = super().train(request, progress)
        if self.place.is_last:
            time.sleep(max(0.0, began + SLOW - time.monotonic()))
        return result


def noise(num_features: int) -> Dataset:
    """Random samples, because what the model learns does not matter here."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn((2048, num_features), generator=random)
    split = ArraySplit(x, torch.arange(len(x)) % 10)
    return Dataset(
        "noise",
        split,
        ArraySplit(split.x, split.y),
        num_classes=10,
        input_shape=(num_features,),
    )


def wide() -> nn.Module:
    """Little work, and much to hand on."""
    return nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def even() -> nn.Module:
    """Layers of the same work."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, 10))


def run_of(
    task: Task,
    at: Sequence[int],
    kind: Callable[..., Any],
    num_batches: int,
    *,
    max_waiting: int = 4,
    gradient_every: int | None = 1,
) -> Experiment:
    parts = staged(task, at, kind, Greedy())
    algorithm = Decoupled(
        inner=Alone(num_rounds=1, local_steps=num_batches),
        boundaries=parts.boundaries,
        num_classes=parts.num_classes,
        max_batch=task.batch_size + 1,
        max_waiting=max_waiting,
        gradient_every=gradient_every,
    )
    platforms = (Platform(throughput=1000.0),) * algorithm.num_workers
    return Experiment(task=parts.task, algorithm=algorithm, platforms=platforms)


def memory(max_waiting: int, keys: Path) -> dict[str, Any]:
    """Megabytes of each stage while batches wait."""
    task = Task(dataset=noise(16), model=wide, batch_size=BATCH_SIZE)
    experiment = run_of(task, (1,), Slow, 100_000, max_waiting=max_waiting)
    with tempfile.TemporaryDirectory() as place:
        run = Run(experiment, Path(place) / "run", keys, CHECKPOINT)
        try:
            start(run)
            time.sleep(SETTLED)
            seen: list[list[float]] = [[] for _ in run.ranks]
            deadline = time.monotonic() + MEASURED
            while time.monotonic() < deadline:
                for rank, process in run.processes.items():
                    seen[rank].append(psutil.Process(process.pid).memory_info().rss / MB)
                time.sleep(0.1)
        finally:
            run.stop()
    return {
        "max_waiting": max_waiting,
        "median_megabytes": [statistics.median(each) for each in seen],
        "largest_megabytes": [max(each) for each in seen],
    }


def waiting(keys: Path) -> dict[str, Any]:
    """Share of time for which each stage trains on nothing, in the middle half of a run."""
    task = Task(dataset=noise(HIDDEN), model=even, batch_size=2 * BATCH_SIZE)
    costs = block_costs(blocks(even()), torch.zeros(1, HIDDEN))
    at = plan_cut(costs, [1e10, 1e10], [1e9]).at
    experiment = run_of(task, at, DecoupledStage, NUM_BATCHES, gradient_every=None)
    with tempfile.TemporaryDirectory() as place:
        run = Run(experiment, Path(place) / "run", keys, CHECKPOINT)
        try:
            start(run)
            if not run.wait():
                raise RuntimeError(run.said())
            trained = [
                [each for each in run.events(rank) if each["type"] == "trained"]
                for rank in run.ranks
            ]
        finally:
            run.stop()
    middle = [each[NUM_BATCHES // 4 : 3 * NUM_BATCHES // 4] for each in trained]
    spans = [each[-1]["time"] - each[0]["start"] for each in middle]
    busy = [sum(e["time"] - e["start"] for e in each) for each in middle]
    return {
        "cut_at": list(at),
        "load": os.getloadavg()[0],
        "seconds_a_batch": [b / len(each) for b, each in zip(busy, middle, strict=True)],
        "idle_share": [1 - b / span for b, span in zip(busy, spans, strict=True)],
    }


def start(run: Run) -> None:
    """Start all processes, and wait until each has trained."""
    for rank in run.ranks:
        run.start(rank)
    while not all(run.num_trained(rank) for rank in run.ranks):
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--waiting", nargs="+", type=int, default=[2, 4, 16])
    parser.add_argument("--repeats", type=int, default=3, help="of what measures waiting")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    options = parser.parse_args()
    origin = about(options)
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as keys:
        certificates(Path(keys), 2)
        found = {
            "memory": [memory(each, Path(keys)) for each in options.waiting],
            "waiting": [waiting(Path(keys)) for _ in range(options.repeats)],
        }
    if options.json:
        kept = {
            **origin,
            "niceness": os.nice(0),
            "settings": {
                "width": WIDTH,
                "batch_size": BATCH_SIZE,
                "slow_seconds": SLOW,
                "hidden": HIDDEN,
                "num_batches": NUM_BATCHES,
            },
            **found,
        }
        print(json.dumps(kept, indent=1))
    else:
        for row in [*found["memory"], *found["waiting"]]:
            print(*(f"{name}: {value}" for name, value in row.items()), sep="\n  ")


if __name__ == "__main__":
    main()
