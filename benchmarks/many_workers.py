"""How many workers one machine simulates: samples per second in batches, and memory.

    python -m benchmarks.many_workers speed            a table: batched over plain
    python -m benchmarks.many_workers speed --model lenet5 --workers 64 --samples 6400
    python -m benchmarks.many_workers memory lenet5 10000
    python -m benchmarks.many_workers memory mlp 100000
    ... --json FILE                                     keep it

`speed`: by default, 1,000 workers with an MLP 784-64-10 and 60 samples each, two rounds of
EpochGossip on a ring; plain and batched runs alternate, each in a process of its own. `memory`:
two rounds of gossip, each a step of a batch of 4; peak memory of the process, time, and what a
worker takes besides. Pictures are random: what is in them changes neither.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kept import about
from benchmarks.simulator import pictures, simulate
from torch import nn

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.topology import ring
from edgegossip.models import lenet5, mlp, resnet20, sensor_cnn, vgg11
from edgegossip.runs.files import write_json
from edgegossip.training.learner import Learner
from edgegossip.training.stacked.learner import StackedLearner
from edgegossip.training.task import Task

NUM_SAMPLES = 60_000
SHAPE = (1, 28, 28)
SPEED_MODELS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, SHAPE),
    "lenet5": (lenet5, SHAPE),
    "lenet5-cifar10": (lenet5, (3, 32, 32)),
    "sensor-cnn": (sensor_cnn, (9, 128)),
    "resnet20": (resnet20, (3, 32, 32)),
    "vgg11-quarter": (partial(vgg11, width=0.25), (3, 32, 32)),
}
MEMORY_MODELS = {
    "lenet5": partial(lenet5, input_shape=SHAPE, num_classes=10),
    "mlp": partial(mlp, SHAPE, 10, hidden=(8,)),
}
BATCH_SIZES = (4, 10, 32, 60)


def samples_per_second(
    model: str, num_samples: int, batch_size: int, num_workers: int, *, is_batched: bool
) -> float:
    """Speed of two epochs."""
    make, shape = SPEED_MODELS[model]
    task = Task(
        dataset=pictures(num_samples, shape),
        model=partial(make, shape, 10),
        batch_size=batch_size,
        trainer=StackedLearner if is_batched else Learner,
    )
    algorithm = EpochGossip(topology=ring(num_workers), num_rounds=2)
    return 2 * num_samples / simulate(task, algorithm, num_workers)


def speeds(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians by batch size, and the range of the ratios of neighbouring runs."""
    rows = []
    for batch_size in options.batch_sizes:
        speed = partial(
            samples_per_second, options.model, options.samples, batch_size, options.workers
        )
        found: list[tuple[float, float]] = []
        for _ in range(options.repeats):
            plain, together = (alone(partial(speed, is_batched=each)) for each in (False, True))
            found.append((plain, together))
        ratios = sorted(together / plain for plain, together in found)
        rows.append(
            {
                "batch_size": batch_size,
                "plain": round(statistics.median(plain for plain, _ in found)),
                "batched": round(statistics.median(together for _, together in found)),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(each, 3) for each in ratios],
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def memory(name: str, num_workers: int) -> dict[str, Any]:
    """Peak memory of two rounds of one step each."""
    dataset = pictures(max(NUM_SAMPLES, num_workers))
    task = Task(dataset=dataset, model=MEMORY_MODELS[name], batch_size=4)
    before = peak()
    seconds = simulate(task, Gossip(topology=ring(num_workers), num_rounds=2), num_workers)
    return {
        "model": name,
        "num_workers": num_workers,
        "peak_gib": round(peak() / 2**30, 2),
        "kib_per_worker": round((peak() - before) / num_workers / 2**10, 1),
        "seconds": round(seconds, 1),
    }


def peak() -> int:
    """Most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def alone(work: partial[Any]) -> Any:  # noqa: ANN401
    """The result of `work`, called in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parts = parser.add_subparsers(dest="part", required=True)
    speed = parts.add_parser("speed")
    speed.add_argument("--repeats", type=int, default=3)
    speed.add_argument("--workers", type=int, default=1000)
    speed.add_argument("--model", choices=[*SPEED_MODELS], default="mlp")
    speed.add_argument("--samples", type=int, default=NUM_SAMPLES, help="of all workers")
    speed.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    size = parts.add_parser("memory")
    size.add_argument("model", choices=[*MEMORY_MODELS])
    size.add_argument("workers", type=int)
    options = parser.parse_args()
    origin = about(options)
    found: object
    if options.part == "speed":
        found = speeds(options)
    else:
        found = alone(partial(memory, options.model, options.workers))
    print(json.dumps(found, indent=2))
    if options.json:
        write_json(options.json, {**origin, "found": found})


if __name__ == "__main__":
    main()
