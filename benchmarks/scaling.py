"""Cost of a worker and of an event, from 100 to 100,000 workers, and a forecast for a million.

    python -m benchmarks.scaling --json FILE

All times are processor time, so that other work on the machine matters little; each
measurement is a process of its own, and sizes and kinds take turns. The first round is not
counted, in which learners are made.

- "events": training stubbed, each worker pushes a small message after each step (`Chatter`).
  "tied": four speeds, so a quarter of the workers finish at the same times. "distinct": each
  worker has a speed of its own, so the agenda has one entry at a time.
- "rounds": Gossip on a ring, MLP 784-8-10, a step of a batch of 4 a round; with training
  stubbed ("handling": events, mixing, messages), and with it, in batches, as `--batched auto`
  does ("training").

The model: a worker's round takes h + k (e(N) - e(1,000)) in the event loop, with e(n) = a + b
log2(n) a least-squares line through the tied events and k = 3 events a round, and t more in
training. It is fitted without the largest size, and compared with what was measured there. h
and t are those at 1,000 workers.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import about, rounded
from benchmarks.many_workers import MEMORY_MODELS
from benchmarks.simulator import Chatter, pictures

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.observer import Observer
from edgegossip.contract.protocol import Rank, Seconds, Trained
from edgegossip.contract.topology import ring
from edgegossip.recipes.epoch_times import NoTraining
from edgegossip.runs.files import write_json
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform, uneven
from edgegossip.sim.pool import ComputePool, MakeTrainer
from edgegossip.sim.simulator import Simulator
from edgegossip.training.stacked.learner import StackedLearner
from edgegossip.training.task import Task, Workload

SIZES = (100, 1_000, 10_000, 100_000)
REFERENCE = 1_000
EVENTS_A_ROUND = 3
GOLDEN = (math.sqrt(5) - 1) / 2
MILLION = 1_000_000


def distinct(num_workers: int) -> tuple[Platform, ...]:
    """Platforms between 250 and 1,000 samples a second, each with a speed of its own."""
    shares = (rank * GOLDEN % 1 for rank in range(num_workers))
    return tuple(Platform(throughput=250 + 750 * share) for share in shares)


class Meter(Observer):
    """Processor time from the end of the first round of all workers on.

    Args:
        num_workers: Number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        self._first = num_workers
        self.num_trained = 0
        self.began = math.nan
        self.events_before = 0
        self.simulator: Simulator[Any] | None = None

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self.num_trained += 1
        if self.num_trained == self._first:
            assert self.simulator is not None
            self.events_before = self.simulator.num_events
            self.began = time.process_time()

    def run(
        self,
        algorithm: Algorithm[Any],
        platforms: Sequence[Platform],
        initial: torch.Tensor,
        make_trainer: MakeTrainer,
        pool: ComputePool,
    ) -> dict[str, float]:
        """Seconds an event, and a worker's round; memory of the process at its peak."""
        links = Links(default=Link(latency=0.003, bandwidth=1e6))
        self.simulator = Simulator(
            algorithm, platforms, initial, make_trainer, links=links, pool=pool, observer=self
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.simulator.run()
        seconds = time.process_time() - self.began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "event": seconds / (self.simulator.num_events - self.events_before),
            "round": seconds / (self.num_trained - self._first),
            "kib_per_worker": (peak - before) / self._first,
        }


def events(num_workers: int, kind: str) -> dict[str, float]:
    """Seconds an event, training stubbed."""
    torch.set_num_threads(1)
    num_rounds = 1 + max(2, 150_000 // num_workers)
    platforms = (uneven if kind == "tied" else distinct)(num_workers)
    algorithm = Chatter(ring(num_workers), num_rounds)
    with ComputePool(0) as pool:
        meter = Meter(num_workers)
        return meter.run(algorithm, platforms, torch.zeros(16), make_stub, pool)


def rounds(num_workers: int, kind: str) -> dict[str, float]:
    """Seconds of a worker's round of gossip."""
    torch.set_num_threads(1)
    dataset = pictures(max(60_000, num_workers))
    task = Task(
        dataset=dataset, model=MEMORY_MODELS["mlp"], batch_size=4, trainer=StackedLearner
    )
    workload = Workload(task, range(num_workers), seed=0)
    num_rounds = 1 + max(2, 20_000 // num_workers)
    algorithm = Gossip(topology=ring(num_workers), num_rounds=num_rounds)
    is_stubbed = kind == "handling"
    with ComputePool(0 if is_stubbed else None) as pool:
        return Meter(num_workers).run(
            algorithm,
            uneven(num_workers),
            workload.initial_params(),
            make_stub if is_stubbed else workload.make_trainer,
            pool,
        )


def make_stub(rank: Rank, incarnation: int) -> NoTraining:
    return NoTraining(1)


def alone(work: partial[dict[str, float]]) -> dict[str, float]:
    """The result of `work`, called in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work).result()


def measured(sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """One row for each run."""
    kinds = {"tied": events, "distinct": events, "handling": rounds, "training": rounds}
    rows: list[dict[str, Any]] = []
    for turn, size, (kind, work) in product(range(repeats), sizes, kinds.items()):
        if work is rounds and size == max(sizes) and turn:
            continue  # minutes, and gigabytes: once
        found = alone(partial(work, size, kind))
        rows.append({"kind": kind, "workers": size, "load": os.getloadavg()[0], **found})
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def median(rows: Sequence[dict[str, Any]], kind: str, size: int, figure: str) -> float:
    """In microseconds, or KiB."""
    some: list[float] = [
        row[figure] for row in rows if (row["kind"], row["workers"]) == (kind, size)
    ]
    return statistics.median(some) * (1 if figure == "kib_per_worker" else 1e6)


def handling_and_training(rows: Sequence[dict[str, Any]], size: int) -> tuple[float, float]:
    """Microseconds of a worker's round: h, and t.

    In a short run, the messages of the first round are counted behind it, so h goes by events.
    Runs with training have the same messages, so t is the difference of both.
    """
    handling, training = (
        median(rows, kind, size, "round") for kind in ("handling", "training")
    )
    return EVENTS_A_ROUND * median(rows, "handling", size, "event"), training - handling


def fitted(rows: Sequence[dict[str, Any]], sizes: Sequence[int]) -> dict[str, float]:
    """The model's constants, in microseconds, from all sizes but the largest."""
    some = sorted(sizes)[:-1]
    tied = [median(rows, "tied", size, "event") for size in some]
    slope, constant = statistics.linear_regression([math.log2(size) for size in some], tied)
    handling, training = handling_and_training(rows, REFERENCE)
    return {"a": constant, "b": slope, "h": handling, "t": training}


def predicted(constants: dict[str, float], num_workers: int, *, is_training: bool) -> float:
    """Microseconds of a worker's round.

    >>> constants = {"a": 1.0, "b": 0.5, "h": 20.0, "t": 50.0}
    >>> predicted(constants, 1000, is_training=True)
    70.0
    >>> predicted(constants, 1000 * 2**10, is_training=False)
    35.0
    """
    growth = EVENTS_A_ROUND * constants["b"] * math.log2(num_workers / REFERENCE)
    return constants["h"] + growth + (constants["t"] if is_training else 0.0)


def cluster(
    constants: dict[str, float], kib_per_worker: float, send: float, num_cores: int
) -> dict[str, float]:
    """A round of a million workers, the event loop on one machine and training on others.

    Args:
        constants: Of the model.
        kib_per_worker: Memory at the event loop.
        send: Microseconds of the loop for a work sent to an actor and its result.
        num_cores: Of all nodes together.
    """
    loop = MILLION * (predicted(constants, MILLION, is_training=False) + send) / 1e6
    params = sum(each.numel() for each in MEMORY_MODELS["mlp"]().parameters())
    return {
        "loop_seconds": loop,
        "training_seconds": MILLION * constants["t"] / 1e6 / num_cores,
        "gb_out": 4 * params * MILLION / 1e9,
        "gb_in": 8 * params * MILLION / 1e9,
        "gib_at_the_loop": kib_per_worker * MILLION / 2**20,
    }


def summed_up(
    rows: Sequence[dict[str, Any]], sizes: Sequence[int], send: float
) -> dict[str, Any]:
    constants, largest = fitted(rows, sizes), max(sizes)
    kib = median(rows, "training", largest, "kib_per_worker")
    handling, training = handling_and_training(rows, largest)
    truth = {"handling": handling, "handling and training": handling + training}
    check = {}
    for kind, found in truth.items():
        model = predicted(constants, largest, is_training=kind != "handling")
        check[kind] = {"predicted": model, "measured": found, "error": model / found - 1}
    return {
        "microseconds": {
            str(size): {
                "tied": median(rows, "tied", size, "event"),
                "distinct": median(rows, "distinct", size, "event"),
                "h": handling_and_training(rows, size)[0],
                "t": handling_and_training(rows, size)[1],
                "kib_per_worker": median(rows, "training", size, "kib_per_worker"),
            }
            for size in sizes
        },
        "constants": constants,
        "check_at": largest,
        "check": check,
        "million_on_100_nodes_of_2_cores": cluster(constants, kib, send, 200),
        "million_on_one_machine_of_2_cores": cluster(constants, kib, 0.0, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="with 1000")
    parser.add_argument(
        "--send", type=float, default=144.0, help="microseconds a trip to another process takes"
    )
    options = parser.parse_args()
    origin = about(options)
    before = os.getloadavg()[0]
    rows = measured(options.sizes, options.repeats)
    kept = {
        **origin,
        "load_before_and_after": [before, os.getloadavg()[0]],
        "model": summed_up(rows, options.sizes, options.send),
        "runs": rows,
    }
    print(json.dumps(rounded(kept["model"]), indent=2))
    if options.json:
        write_json(options.json, rounded(kept))


if __name__ == "__main__":
    main()
