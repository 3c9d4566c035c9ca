"""How close the simulator comes to raw PyTorch, and how fast its event loop is.

    python -m benchmarks.simulator           a table
    python -m benchmarks.simulator --json    one JSON object

Training: samples per second of LeNet-5 at batch 64 on pictures of MNIST's size, simulated with
4 and with 64 workers, over those of plain PyTorch loops that keep all cores busy (one thread
a model, as many models at once as cores, contiguous or channels-last, as threads or as
processes: the fastest of the four). What PyTorch imports at the first optimizer is not
counted. Raw and simulated runs alternate; medians are compared.

Event loop: training stubbed, each worker pushes a small message after each step. For batched
training and memory: benchmarks/many_workers.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.kept import about
from torch import Tensor

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    WORKER,
    Effect,
    Event,
    Finish,
    Message,
    Payload,
    Rank,
    Role,
    Seconds,
    Send,
    Started,
    Steps,
    Train,
    Trained,
    WorkerState,
)
from edgegossip.contract.topology import Topology, ring
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.models import lenet5
from edgegossip.recipes.epoch_times import NoTraining
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import uneven
from edgegossip.sim.pool import ComputePool
from edgegossip.sim.simulator import Simulator
from edgegossip.training.task import Task, Workload

BATCH_SIZE = 64
NUM_CORES = len(os.sched_getaffinity(0))


# Raw PyTorch.


def pictures(num_samples: int, shape: tuple[int, ...] = (1, 28, 28)) -> Dataset:
    """Random samples, by default of MNIST's size: their content does not change the speed."""
    random = torch.Generator().manual_seed(0)
    x = torch.randint(256, (num_samples, *shape), generator=random, dtype=torch.uint8)
    y = torch.randint(10, (num_samples,), generator=random)
    split = ArraySplit(x, y)
    few = ArraySplit(x[:100], y[:100])
    half = torch.full((shape[0],), 0.5)
    return Dataset("random", split, few, 10, shape, mean=half, std=half)


def warm_up() -> None:
    """Let PyTorch import what it imports for the first optimizer, which takes 0.7 s."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def raw_loop(num_steps: int, memory_format: torch.memory_format) -> None:
    """A hand-written loop: float pictures in memory, one SGD step after another."""
    torch.set_num_threads(1)
    x = torch.rand(12_500, 1, 28, 28)
    y = torch.randint(10, (12_500,))
    model = lenet5(input_shape=(1, 28, 28), num_classes=10).to(memory_format=memory_format)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    order = torch.randperm(len(x))
    for step in range(num_steps):
        start = step * BATCH_SIZE % (len(x) - BATCH_SIZE)
        batch = order[start : start + BATCH_SIZE]
        inputs = x[batch].contiguous(memory_format=memory_format)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def raw_speed(kind: str, num_steps: int, num_loops: int = NUM_CORES) -> float:
    """Samples per second of `num_loops` raw loops at once."""
    runner, _, layout = kind.partition(" ")
    formats = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
    work = (num_steps, formats[layout])
    if runner == "threads":
        warm_up()
        jobs = [threading.Thread(target=raw_loop, args=work) for _ in range(num_loops)]
        start = time.perf_counter()
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        return num_loops * num_steps * BATCH_SIZE / (time.perf_counter() - start)
    with processes(num_loops) as pool:
        spans = list(pool.map(timed_raw_loop, *zip(*[work] * num_loops, strict=True)))
    seconds: float = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return num_loops * num_steps * BATCH_SIZE / seconds


def timed_raw_loop(num_steps: int, memory_format: torch.memory_format) -> tuple[float, float]:
    """When it began and ended, on the clock that all processes share."""
    warm_up()
    begin = time.perf_counter()
    raw_loop(num_steps, memory_format)
    return begin, time.perf_counter()


# Simulated training.


def simulate(task: Task, algorithm: Algorithm[Any], num_workers: int) -> float:
    """Seconds of a whole run, from the making of the first learner to the last mixing."""
    workload = Workload(task, range(num_workers), seed=0)
    torch.set_num_threads(1)
    warm_up()
    with ComputePool() as pool:
        simulator = Simulator(
            algorithm,
            uneven(num_workers),
            workload.initial_params(),
            workload.make_trainer,
            pool=pool,
        )
        start = time.perf_counter()
        simulator.run()
        return time.perf_counter() - start


def simulated_speed(num_workers: int, num_samples: int) -> float:
    """Samples per second of a whole simulated run of two epochs of gossip on a ring."""
    task = Task(
        dataset=pictures(num_samples),
        model=partial(lenet5, input_shape=(1, 28, 28), num_classes=10),
        batch_size=BATCH_SIZE,
    )
    algorithm = EpochGossip(topology=ring(num_workers), num_rounds=2)
    return 2 * num_samples / simulate(task, algorithm, num_workers)


# The event loop.


@dataclass(slots=True, kw_only=True)
class ChatterState(WorkerState):
    """Nothing but what every state has."""


@dataclass(frozen=True)
class Chatter(Algorithm[ChatterState]):
    """Train and push one small message to the next neighbor, over and over."""

    topology: Topology
    num_rounds: int
    payload: Payload = field(default_factory=lambda: {"params": torch.zeros(16)})

    def init(self, rank: Rank, params: Tensor) -> ChatterState:
        return ChatterState(rank=rank, params=params)

    def role(self, rank: Rank) -> Role:
        return WORKER

    def handle(self, state: ChatterState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                return [Train(state.params, Steps(1))]
            case Trained():
                state.round += 1
                receiver = self.topology.out_neighbors(state.rank, state.round)[0]
                send = Send(receiver, Message("params", state.round, self.payload))
                is_done = state.round == self.num_rounds
                return [send, Finish() if is_done else Train(state.params, Steps(1))]
        return []


def event_speed(num_workers: int, num_events: int) -> float:
    """Events per second with training stubbed."""
    num_rounds = max(1, num_events // (2 * num_workers))
    simulator = Simulator(
        Chatter(ring(num_workers), num_rounds),
        uneven(num_workers),
        torch.zeros(16),
        lambda rank, incarnation: NoTraining(1),
        links=Links(default=Link(latency=0.003, bandwidth=1e6)),
    )
    start = time.perf_counter()
    simulator.run()
    return simulator.num_events / (time.perf_counter() - start)


# Measuring.


def processes(num_processes: int) -> ProcessPoolExecutor:
    """Fresh processes, so that no measurement changes what the next one finds."""
    return ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork"))


def alone(work: Callable[..., float], *arguments: object) -> float:
    """The result of `work`, called in a process of its own."""
    with processes(1) as pool:
        return pool.submit(work, *arguments).result()


def measure(num_repeats: int, num_steps: int, num_events: int) -> dict[str, float]:
    """All figures: medians of `num_repeats` alternating runs, each in a process of its own."""
    layouts = ("contiguous", "channels-last")
    kinds = [f"{runner} {layout}" for runner in ("threads", "processes") for layout in layouts]
    num_samples = NUM_CORES * num_steps * BATCH_SIZE
    runs: dict[str, list[float]] = defaultdict(list)
    for _ in range(num_repeats):
        for kind in kinds:
            runs[kind].append(alone(raw_speed, kind, num_steps))
        for num_workers in (4, 64):
            runs[f"{num_workers}"].append(alone(simulated_speed, num_workers, num_samples // 2))
        for num_workers in (100, 10_000):
            runs[f"events {num_workers}"].append(alone(event_speed, num_workers, num_events))
    medians = {name: statistics.median(values) for name, values in runs.items()}
    raw = max(medians[kind] for kind in kinds)
    return {
        "raw_samples_per_second": raw,
        "ratio_4_workers": medians["4"] / raw,
        "ratio_64_workers": medians["64"] / raw,
        "events_per_second": medians["events 100"],
        "events_per_second_10000_workers": medians["events 10000"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=900, help="steps of each raw loop")
    parser.add_argument("--events", type=int, default=400_000, help="of the event loop")
    options = parser.parse_args()
    origin = about(options)
    figures = measure(options.repeats, options.steps, options.events)
    if options.json:
        print(json.dumps(origin | figures))
        return
    for name, value in figures.items():
        print(f"{name:34} {value:>12,.3f}" if value < 10 else f"{name:34} {value:>12,.0f}")


if __name__ == "__main__":
    main()
