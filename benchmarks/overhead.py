"""The cost of taking part in a real run, compared with plain PyTorch.

    python -m benchmarks.overhead           a table
    python -m benchmarks.overhead --json    one JSON object
    python -m benchmarks.overhead --frameworks    callbacks of Lightning and Transformers

LeNet-5 on MNIST (from $EDGEGOSSIP_DATA), 15,000 pictures a process and epoch, one intra-op
thread each; a first epoch is not counted. All kinds take turns; ratios are medians of those
within a turn, as the speed of the machine changes from one to the next.

- "alone": samples per second of one process; a `TrainingLoop` around a hand-written loop and a
  worker (`take_part`), each without neighbors, over the same hand-written loop by itself.
- "four": the same of four processes at once, who exchange and average their models after each
  epoch, over four hand-written loops at once that do not.
- "round": seconds of an epoch and an average of four workers, over those of hand-written loops
  with an all-reduce of torch.distributed (gloo).

With --frameworks, the callbacks' trainings are compared with those of the same framework
without a callback, alone and four at once that average after each epoch.

All get what `edgegossip worker` gives itself: malloc keeps what is freed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.kept import about
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.topology import complete
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.readers import mnist
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.models import lenet5
from edgegossip.net.address import Address
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.join import Connection, join
from edgegossip.real.launch import free_ports
from edgegossip.real.training_loop import TrainingLoop
from edgegossip.real.worker import WorkerSettings
from edgegossip.recipes.tasks import default_data_dir
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.platform import uneven
from edgegossip.training.task import Task

BATCH_SIZE = 64


@dataclass(frozen=True)
class Part:
    """One of some processes that do the same at once.

    Attributes:
        rank: Which.
        ports: Of all of them.
        num_epochs: The first is not counted.
        dataset: Of all of them together.
        out: Folder of all of them.
    """

    rank: int
    ports: Sequence[int]
    num_epochs: int
    dataset: Dataset
    out: Path

    @property
    def num_workers(self) -> int:
        return len(self.ports)

    @property
    def algorithm(self) -> EpochGossip:
        return EpochGossip(topology=complete(self.num_workers), num_rounds=self.num_epochs)

    @property
    def address(self) -> Address:
        endpoints = [f"tcp/127.0.0.1:{port}" for port in self.ports]
        own = endpoints.pop(self.rank)
        return Address(listen=(own,), connect=tuple(endpoints))


class Person:
    """A hand-written loop: float pictures in memory, one SGD step after another."""

    def __init__(self, part: Part) -> None:
        indices = torch.arange(part.rank, len(part.dataset.train), part.num_workers)
        x, self.y = part.dataset.train.batch(indices)
        assert part.dataset.mean is not None
        assert part.dataset.std is not None
        self.x = (x.float() / 255 - part.dataset.mean) / part.dataset.std
        torch.manual_seed(0)
        self.model = lenet5(input_shape=(1, 28, 28), num_classes=10)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def train(self, after_step: Callable[[torch.Tensor, int], None] | None = None) -> None:
        """Train for an epoch."""
        for batch in torch.split(torch.randperm(len(self.x)), BATCH_SIZE):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(self.x[batch]), self.y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            if after_step is not None:
                after_step(loss, len(batch))


# The kinds: each returns seconds of an epoch.


def plain(part: Part) -> float:
    """By itself."""
    person, ends = Person(part), []
    for _ in range(part.num_epochs):
        person.train()
        ends.append(time.perf_counter())
    return _mean_gap(ends)


def training_loop(part: Part) -> float:
    """In a `TrainingLoop`."""
    person, ends = Person(part), []
    transport = ZenohTransport(
        run="overhead", rank=part.rank, num_workers=part.num_workers, address=part.address
    )
    loop = TrainingLoop(
        person.model,
        part.algorithm,
        part.rank,
        part.num_workers,
        transport,
        num_samples=len(person.x),
    )
    with loop:
        while not loop.is_over:
            person.train(lambda loss, num: loop.step(loss.item(), num))
            ends.append(time.perf_counter())
    return _mean_gap(ends[:-1])  # after the last, there may be a wait for others to leave


def worker(part: Part) -> float:
    """As `edgegossip worker` does, with all that it writes."""
    task = Task(
        dataset=part.dataset,
        model=partial(lenet5, input_shape=(1, 28, 28), num_classes=10),
        batch_size=BATCH_SIZE,
    )
    platforms = uneven(part.num_workers)
    experiment = Experiment(task=task, algorithm=part.algorithm, platforms=platforms)
    out = part.out / str(part.rank)
    connection = Connection(address=part.address)
    join(experiment, part.rank, out=out, connection=connection, settings=WorkerSettings())
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return _mean_gap([line["time"] for line in lines if line["type"] == "trained"])


def gloo(part: Part) -> float:
    """With an all-reduce of torch.distributed after each epoch."""
    address = f"tcp://127.0.0.1:{part.ports[0]}"
    dist.init_process_group("gloo", address, rank=part.rank, world_size=part.num_workers)
    person, ends = Person(part), []
    params = list(person.model.parameters())
    for _ in range(part.num_epochs):
        person.train()
        with torch.no_grad():
            flat = parameters_to_vector(params)
            dist.all_reduce(flat)
            vector_to_parameters(flat / part.num_workers, params)
        ends.append(time.perf_counter())
    dist.destroy_process_group()
    return _mean_gap(ends)


def framework(part: Part, name: str, *, is_joined: bool) -> float:
    """With a framework, with or without its callback."""
    from benchmarks.framework_training import FRAMEWORKS, callback_of

    person, (train, make) = Person(part), FRAMEWORKS[name]
    callbacks = []
    if is_joined:
        callbacks.append(
            callback_of(make, part.rank, part.num_workers, part.address, part.num_epochs)
        )
    samples = TensorDataset(person.x, person.y)
    ends = train(
        (person.model, person.optimizer, samples, BATCH_SIZE, part.num_epochs), callbacks
    )
    return _mean_gap(ends[:-1])  # as in `training_loop`


def _mean_gap(times: Sequence[float]) -> float:
    return (times[-1] - times[0]) / (len(times) - 1)


ALONE = (plain, training_loop, worker)
FOUR = (plain, training_loop, worker, gloo)


# Measuring.


def at_once(kind: Callable[[Part], float], num: int, dataset: Dataset, epochs: int) -> float:
    """Seconds of an epoch of so many processes at once, on average."""
    with tempfile.TemporaryDirectory() as folder:
        ports, out = free_ports(num), Path(folder)
        parts = [Part(rank, ports, epochs, dataset, out) for rank in range(num)]
        with ProcessPoolExecutor(num, multiprocessing.get_context("fork")) as pool:
            return statistics.mean(pool.map(kind, parts))


def measure(num_samples: int, num_epochs: int, num_repeats: int) -> dict[str, float]:
    """All figures: medians of alternating runs, and of the ratios between neighbors in time."""
    four = _first(mnist(default_data_dir()), 4 * num_samples)
    seconds: dict[str, list[float]] = defaultdict(list)
    for repeat in range(num_repeats):
        for num, dataset, kinds in ((1, _first(four, num_samples), ALONE), (4, four, FOUR)):
            # Whoever is first finds the machine as whatever ran before has left it.
            for kind in islice(cycle(kinds), repeat, repeat + len(kinds)):
                taken = at_once(kind, num, dataset, num_epochs)
                seconds[f"{kind.__name__} {num}"].append(taken)

    def ratio(kind: str, other: str) -> float:
        return statistics.median(
            a / b for a, b in zip(seconds[kind], seconds[other], strict=True)
        )

    return {
        "plain_samples_per_second": num_samples / statistics.median(seconds["plain 1"]),
        "training_loop_alone": ratio("plain 1", "training_loop 1"),
        "worker_alone": ratio("plain 1", "worker 1"),
        "training_loop_of_four": ratio("plain 4", "training_loop 4"),
        "worker_of_four": ratio("plain 4", "worker 4"),
        "round_seconds": statistics.median(seconds["worker 4"]),
        "gloo_round_seconds": statistics.median(seconds["gloo 4"]),
        "round_over_gloo": ratio("worker 4", "gloo 4"),
        "training_loop_round_over_gloo": ratio("training_loop 4", "gloo 4"),
        "gloo_of_four": ratio("plain 4", "gloo 4"),
    }


def measure_frameworks(num_samples: int, num_epochs: int, num_repeats: int) -> dict[str, Any]:
    """Throughput with a callback over that without, in each turn, and their medians."""
    four = _first(mnist(default_data_dir()), 4 * num_samples)
    names = ("lightning", "transformers")
    kinds = [(name, is_joined) for name in names for is_joined in (0, 1)]
    seconds: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for repeat in range(num_repeats):
        for num, dataset in ((1, _first(four, num_samples)), (4, four)):
            for name, is_joined in islice(cycle(kinds), repeat, repeat + len(kinds)):
                kind = partial(framework, name=name, is_joined=bool(is_joined))
                taken = at_once(kind, num, dataset, num_epochs)
                seconds[name, num, is_joined].append(taken)
    figures: dict[str, Any] = {}
    for name in names:
        for num, words in ((1, "alone"), (4, "of_four")):
            pairs = zip(seconds[name, num, 0], seconds[name, num, 1], strict=True)
            turns = [round(plain / joined, 4) for plain, joined in pairs]
            figures[f"{name}_{words}"] = statistics.median(turns)
            figures[f"{name}_{words}_turns"] = turns
        plain = statistics.median(seconds[name, 1, 0])
        figures[f"{name}_samples_per_second"] = round(num_samples / plain)
    return figures


def _first(dataset: Dataset, num_samples: int) -> Dataset:
    return replace(dataset, train=ArraySplit(*dataset.train.batch(torch.arange(num_samples))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind")
    parser.add_argument("--epochs", type=int, default=4, help="of each run, at least 3")
    parser.add_argument("--samples", type=int, default=15_000, help="a process and epoch")
    parser.add_argument("--frameworks", action="store_true", help="measure callbacks instead")
    options = parser.parse_args()
    origin = about(options)
    if options.epochs < 3:
        parser.error(f"--epochs must be at least 3, got {options.epochs}: the first is free")
    keep_freed_memory()  # all other processes are forked from this one
    torch.set_num_threads(1)
    measured = measure_frameworks if options.frameworks else measure
    figures = measured(options.samples, options.epochs, options.repeats)
    if options.json:
        print(json.dumps(origin | figures))
        return
    for name, value in figures.items():
        if isinstance(value, list):
            print(f"{name:34} {value}")
            continue
        print(f"{name:34} {value:>12,.3f}" if value < 100 else f"{name:34} {value:>12,.0f}")


if __name__ == "__main__":
    main()
