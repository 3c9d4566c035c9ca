"""Several executors of one worker: their speed, its forecasts, and what a lost one costs.

    python -m benchmarks.executors                  tables
    python -m benchmarks.executors --json           one JSON object
    python -m benchmarks.executors --only speed     or forecast, or losses

All executors are processes with one thread on cores of this machine.

- speed: LeNet-5 trains on noise of the size of MNIST's pictures. These take turns: one
  executor; two; two processes of torch's `DistributedDataParallel` in a loop written by hand
  ("ddp"); and two processes that train on halves of the batches without any exchange
  ("apart"), which is the most that the cores can do. Samples per second are medians over the
  turns, and so are ratios within a turn. Turns in which other processes use over 5 % of the
  cores do not count, as long as there are enough others.
- forecast: two executors train LeNet-5 in blocks. Before each block, a monitor forecasts the
  throughput, as for EdgeGossip. Then one is killed, and the rest are blocks of the other.
- losses: LeNet-5 learns the first 20,000 samples of MNIST. For each seed, one run has one
  executor; in another, one of two is killed with SIGKILL at a random moment.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.kept import about, rounded
from torch import Tensor

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.contract.protocol import Epochs, Steps, Train
from edgegossip.contract.randomness import generator
from edgegossip.contract.trainer import Trainer
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.hold_out import some_of
from edgegossip.data.readers import mnist
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.machine.counters import SystemCounters
from edgegossip.machine.monitor import Monitor
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.machine.profiling import TimedTraining
from edgegossip.models import lenet5
from edgegossip.real.executors import ExecutorProcesses, follow, leading
from edgegossip.real.launch import free_ports
from edgegossip.recipes.tasks import default_data_dir
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.platform import Platform
from edgegossip.training.executors.lead import Executors
from edgegossip.training.executors.learners import LeadingLearner
from edgegossip.training.optimizer import SGD
from edgegossip.training.task import Task

SHAPE = (1, 28, 28)
BATCH_SIZES = (32, 64, 128, 256, 512)
NUM_TURNS = 9
TURN = 6144
"""Samples per turn."""
MOST = 0.05
"""Share of the cores that other processes may use in a turn that counts."""
MIN_TURNS = 5
PATIENCE = 40.0
"""Seconds for the turns with one batch size."""
BLOCK = 1.0
NUM_BLOCKS = 20
NUM_EPOCHS = 3
NUM_SAMPLES = 20_000


def noise() -> Dataset:
    generated = generator(0, "noise")
    x = torch.randint(256, (6400, *SHAPE), generator=generated, dtype=torch.uint8)
    split = ArraySplit(x, torch.randint(10, (6400,), generator=generated))
    return Dataset("noise", split, split, num_classes=10, input_shape=SHAPE)


def first_of_mnist() -> Dataset:
    whole = mnist(default_data_dir())
    train = some_of(whole.train, torch.arange(NUM_SAMPLES))
    return Dataset("mnist", train, whole.test, num_classes=10, input_shape=SHAPE)


def experiment(data: str, batch_size: int, seed: int = 0) -> Experiment:
    """A worker that trains LeNet-5 alone; also made by its other executors."""
    task = Task(
        dataset=noise() if data == "noise" else first_of_mnist(),
        model=partial(lenet5, SHAPE, 10),
        optimizer=SGD(lr=0.01, momentum=0.9),
        batch_size=batch_size,
    )
    platforms = (Platform(throughput=1.0),)
    return Experiment(task=task, algorithm=Alone(num_rounds=1), platforms=platforms, seed=seed)


def processes(data: str, batch_size: int, seed: int = 0) -> ExecutorProcesses:
    """Two executors of the same experiment."""
    role = ("--follow", data, str(batch_size), str(seed))
    return ExecutorProcesses(devices="2", command=("-m", "benchmarks.executors", *role))


def trainer(some: Experiment, executors: Executors | None) -> tuple[Trainer, Tensor]:
    workload = some.workload()
    make = None if executors is None else partial(LeadingLearner, executors=executors)
    return workload.make_trainer(0, make=make), workload.initial_params()


# Speed.


class Pair:
    """Two processes: a loop with `DistributedDataParallel`, or two learners apart."""

    def __init__(self, rank: int, port: int, batch_size: int) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=2)
        model = lenet5(SHAPE, 10)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._model = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True
        )
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self._share = batch_size // 2
        split = noise().train
        assert isinstance(split, ArraySplit)
        self._x, self._y = split.batch(torch.arange(len(split)))
        self._rank = rank

        self._apart, self._params = trainer(experiment("noise", self._share), None)

    def run(self, num_steps: int, apart: bool = False) -> bool:
        """Take part in some steps; the first process says how many, or with -1 the end."""
        order = torch.tensor([num_steps, apart])
        dist.broadcast(order, 0)
        number, apart = order.tolist()
        if apart:
            self._apart.train(Train(self._params, Steps(number)))
            dist.barrier()
        else:
            self._average(number)
        return bool(number >= 0)

    def _average(self, num_steps: int) -> None:
        for step in range(num_steps):
            order = torch.randperm(len(self._x), generator=generator(0, step))
            chosen = order[self._rank * self._share :][: self._share]
            x = self._x[chosen].float().div_(255).contiguous(memory_format=torch.channels_last)
            self._optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(self._model(x), self._y[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()


def speed(
    work: Callable[[], Any], counters: SystemCounters, pause: float
) -> tuple[float, float]:
    """How often per second `work` could run, and the share of the cores that others used."""
    time.sleep(pause)  # for others on this machine, if this process has a higher priority
    before, start = counters.read(), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - start, counters.read()
    used = after.machine.cores - before.machine.cores - (after.own.cores - before.own.cores)
    return 1 / seconds, used / seconds / counters.num_cores


def measure_speed(batch_size: int, pause: float) -> dict[str, Any]:
    some = experiment("noise", batch_size)
    num_steps = max(4, TURN // batch_size)
    [port] = free_ports(1)
    command = [
        sys.executable,
        "-m",
        "benchmarks.executors",
        "--ddp",
        str(port),
        str(batch_size),
    ]
    with leading(some, 0, processes("noise", batch_size)) as executors:
        assert executors is not None
        other = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        pair = Pair(0, port, batch_size)
        alone, params = trainer(some, None)
        together, _ = trainer(some, executors)
        request = Train(params, Steps(num_steps))
        run: dict[str, Callable[[], Any]] = {
            "one": lambda: alone.train(request),
            "two": lambda: together.train(request),
            "ddp": lambda: pair.run(num_steps),
            "apart": lambda: pair.run(num_steps, apart=True),
        }
        counters, deadline = SystemCounters(), time.monotonic() + PATIENCE
        for each in run.values():  # the first turn prepares kernels
            each()
        turns: list[dict[str, tuple[float, float]]] = []
        while time.monotonic() < deadline:
            turns.append({name: speed(each, counters, pause) for name, each in run.items()})
            if sum(map(is_quiet, turns)) >= NUM_TURNS:
                break
        pair.run(-1)
        other.wait()
        dist.destroy_process_group()
        shares = executors.shares(batch_size)
    quiet = [turn for turn in turns if is_quiet(turn)]
    used = quiet if len(quiet) >= MIN_TURNS else turns
    found = {name: [num_steps * batch_size * turn[name][0] for turn in used] for name in run}

    def ratio(name: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(found[name], found[base], strict=True))

    return {
        "batch_size": batch_size,
        "num_turns": len(used),
        "are_quiet": used is quiet,
        "num_left_out": len(turns) - len(used),
        "shares": shares,
        **{name: statistics.median(each) for name, each in found.items()},
        "two_over_one": ratio("two", "one"),
        "ddp_over_one": ratio("ddp", "one"),
        "apart_over_one": ratio("apart", "one"),
        "two_over_apart": ratio("two", "apart"),
        "two_over_ddp": ratio("two", "ddp"),
        "others": {name: statistics.fmean(turn[name][1] for turn in used) for name in run},
        "turns": found,
    }


def is_quiet(turn: dict[str, tuple[float, float]]) -> bool:
    return all(others <= MOST for _, others in turn.values())


# Forecasts.


def measure_forecasts(batch_size: int, pause: float) -> dict[str, Any]:
    some = experiment("noise", batch_size)
    with leading(some, 0, processes("noise", batch_size)) as executors:
        assert executors is not None
        training = TimedTraining(*trainer(some, executors))
        training.run(0.01)
        start, end, cost = training.run(1.0)
        predictor = PerformancePredictor(2, seconds_alone=2 * (end - start) / cost)
        with Monitor(predictor, executors=executors, counters=SystemCounters()) as monitor:
            two = [forecast_error(monitor, training, pause) for _ in range(NUM_BLOCKS)]
            seconds_each = [each["average"] for each in predictor.state_dict()["base_times"]]
            os.kill(executors.process_ids[0], signal.SIGKILL)
            training.run(0.1)
            one = [forecast_error(monitor, training, pause) for _ in range(NUM_BLOCKS // 2)]
    return {
        "batch_size": batch_size,
        "seconds_per_sample": seconds_each,
        "first_error": two[0],
        "mean_error": statistics.fmean(map(abs, two)),
        "median_error": statistics.median(map(abs, two)),
        "bias": statistics.fmean(two),
        "first_error_after_the_loss": one[0],
        "mean_error_after_the_loss": statistics.fmean(map(abs, one)),
        "blocks": two,
    }


def forecast_error(monitor: Monitor, training: TimedTraining, pause: float) -> float:
    """The relative error of the forecast for the next block."""
    time.sleep(pause)
    forecast = monitor.forecast(time.monotonic()).throughput
    start, end, cost = training.run(BLOCK)
    monitor.trained(start, end, cost)
    return forecast * (end - start) / cost - 1


# Losses.


def accuracy(some: Experiment, executors: Executors | None) -> float:
    """Percent of test samples after some epochs."""
    workload = some.workload()
    each, params = trainer(some, executors)
    for _ in range(NUM_EPOCHS):
        params = each.train(Train(params, Epochs())).params
    return 100 * workload.evaluate(params)[1]["accuracy"]


def measure_loss(seed: int, seconds: float) -> dict[str, Any]:
    some = experiment("mnist", 64, seed)
    start = time.perf_counter()
    undisturbed = accuracy(some, None)
    alone = time.perf_counter() - start
    moment = random.Random(seed).uniform(0.1, 0.9) * (seconds or alone / 2)
    with leading(some, 0, processes("mnist", 64, seed)) as executors:
        assert executors is not None
        kill = partial(os.kill, executors.process_ids[0], signal.SIGKILL)
        timer = threading.Timer(moment, kill)
        timer.start()
        start = time.perf_counter()
        found = accuracy(some, executors)
        timer.join()
        return {
            "seed": seed,
            "killed_after": moment,
            "seconds": time.perf_counter() - start,
            "seconds_alone": alone,
            "accuracy": found,
            "accuracy_undisturbed": undisturbed,
            "difference": found - undisturbed,
            "members_at_the_end": len(executors.members),
            "samples_of_the_other": executors.num_samples[1],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["speed", "forecast", "losses"])
    parser.add_argument("--seeds", type=int, default=10, help="of the losses")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each turn")
    parser.add_argument("--follow", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--ddp", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    if options.follow is not None:
        data, batch_size, seed = options.follow
        follow(experiment(data, int(batch_size), int(seed)), 0)
        return
    if options.ddp is not None:
        pair = Pair(1, *options.ddp)
        while pair.run(0):
            pass
        dist.destroy_process_group()
        return
    origin = about(options)
    found: dict[str, Any] = {"load_before": os.getloadavg()}
    if options.only in (None, "speed"):
        found["speed"] = [measure_speed(size, options.pause) for size in options.batch_sizes]
    if options.only in (None, "forecast"):
        found["forecast"] = measure_forecasts(256, options.pause)
    if options.only in (None, "losses"):
        found["losses"] = [measure_loss(seed, 0.0) for seed in range(options.seeds)]
    if options.json:
        print(json.dumps(origin | rounded(found)))
        return
    show(found)


def show(found: dict[str, Any]) -> None:
    for row in found.get("speed", ()):
        print(
            f"batches of {row['batch_size']:4d}: one {row['one']:7.0f} samples/s, two "
            f"{row['two_over_one']:.2f} times, DDP {row['ddp_over_one']:.2f}, apart "
            f"{row['apart_over_one']:.2f}; two over apart {row['two_over_apart']:.2f}; "
            f"{row['num_turns']} {'quiet' if row['are_quiet'] else 'BUSY'} turns"
        )
    if row := found.get("forecast"):
        print(
            f"forecast errors: mean {row['mean_error']:.1%}, median {row['median_error']:.1%}, "
            f"bias {row['bias']:+.1%}; after the loss {row['mean_error_after_the_loss']:.1%}, "
            f"at first {row['first_error_after_the_loss']:+.1%}"
        )
    for row in found.get("losses", ()):
        print(
            f"seed {row['seed']}: {row['accuracy']:.2f} % ({row['difference']:+.2f} points), "
            f"{row['seconds']:.1f} s (alone {row['seconds_alone']:.1f} s), "
            f"killed after {row['killed_after']:.1f} s"
        )


if __name__ == "__main__":
    main()
