"""How many workers one machine simulates: samples per second in batches, and memory.

    python -m benchmarks.many_workers speed            a table: batched over plain
    python -m benchmarks.many_workers memory lenet5 10000
    python -m benchmarks.many_workers memory mlp 100000
    ... --json FILE                                     keep it

`speed`: 1,000 workers with an MLP 784-64-10 and 60 pictures of MNIST's size each, two rounds of
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
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kept import about
from benchmarks.simulator import pictures, simulate

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.topology import ring
from edgegossip.models import lenet5, mlp
from edgegossip.runs.files import write_json
from edgegossip.training.learner import Learner
from edgegossip.training.stacked.learner import StackedLearner
from edgegossip.training.task import Task

NUM_SAMPLES = 60_000
SHAPE = (1, 28, 28)
SPEED_MODEL = partial(mlp, SHAPE, 10)
MEMORY_MODELS = {
    "lenet5": partial(lenet5, input_shape=SHAPE, num_classes=10),
    "mlp": partial(mlp, SHAPE, 10, hidden=(8,)),
}
BATCH_SIZES = (4, 10, 32, 60)


def samples_per_second(batch_size: int, num_workers: int, *, is_batched: bool) -> float:
    """Speed of two epochs."""
    trainer = StackedLearner if is_batched else Learner
    task = Task(
        dataset=pictures(NUM_SAMPLES), model=SPEED_MODEL, batch_size=batch_size, trainer=trainer
    )
    algorithm = EpochGossip(topology=ring(num_workers), num_rounds=2)
    return 2 * NUM_SAMPLES / simulate(task, algorithm, num_workers)


def speeds(num_repeats: int, num_workers: int) -> list[dict[str, Any]]:
    """Medians by batch size, and the range of the ratios of neighbouring runs."""
    rows = []
    for batch_size in BATCH_SIZES:
        found: list[tuple[float, float]] = []
        for _ in range(num_repeats):
            plain, together = (
                alone(partial(samples_per_second, batch_size, num_workers, is_batched=each))
                for each in (False, True)
            )
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
    size = parts.add_parser("memory")
    size.add_argument("model", choices=[*MEMORY_MODELS])
    size.add_argument("workers", type=int)
    options = parser.parse_args()
    origin = about(options)
    found: object
    if options.part == "speed":
        found = speeds(options.repeats, options.workers)
    else:
        found = alone(partial(memory, options.model, options.workers))
    print(json.dumps(found, indent=2))
    if options.json:
        write_json(options.json, {**origin, "found": found})


if __name__ == "__main__":
    main()
