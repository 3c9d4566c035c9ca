"""How far off forecasts are on this machine, beside WordCount and Sort: the paper's Fig. 9.

    sudo python -m benchmarks.predictor_real             a table
    sudo python -m benchmarks.predictor_real --json      one JSON object

Two hosts of the lab are joined by a link. On one, LeNet-5 trains on one thread beside WordCount
and Sort (`benchmarks/mapreduce.py`), which read their input from the other. The use of cores,
network and disk so depends on the job, its size and its phase. Sizes are nominal, see there.

Each repeat is a new process. It first measures a profile beside jobs of four sizes, then trains
beside jobs of seven others in random order. Before each block of training a forecast is asked
for, as EdgeGossip does, and compared with the throughput of the block.

- "forecast": what EdgeGossip gets: slow-down from the profile, base time followed online.
- "first": the same for the block in which a load begins, which nobody could foresee.
- "no profile": the forecasts of a predictor without a profile, from the same readings.
- "profile only": what RG and t0 of the profile say of what was used during the block itself.
- "same load": what the other block beside the very same load says of it: how far equal blocks
  differ on this machine.

"stolen" is the share of the cores' time that a hypervisor gave to other machines, and "collect"
the milliseconds that a sample of telemetry took (Fig. 11).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmarks.kept import about, rounded
from benchmarks.mapreduce import SCALE, running
from benchmarks.predictor_trace import Trace, replay
from benchmarks.telemetry import redis_url
from lab.lab import HostSpec, Lab

from edgegossip.contract.randomness import generator
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.machine.contention import Contention
from edgegossip.machine.counters import SystemCounters
from edgegossip.machine.loads import KINDS, MB, Load
from edgegossip.machine.monitor import Monitor
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.machine.profile import Profile
from edgegossip.machine.profiling import TimedTraining, measure, profile_of
from edgegossip.machine.telemetry import Sample, TelemetryStore, open_telemetry
from edgegossip.models import lenet5
from edgegossip.training.task import Task, Workload

SIZES = tuple(MB * n for n in (1, 10, 100, 300, 1000, 3000, 10_000))
"""Nominal sizes; the paper's are 1 MB to 10 GB."""
PROFILED = tuple(MB * n for n in (5, 50, 500, 5000))
NUM_SAMPLES = 3
"""Samples of telemetry timed in each block."""


@dataclass(frozen=True)
class Block:
    """A stretch of training, some seconds long.

    Attributes:
        num_bytes: Nominal size.
        is_first: Whether the load begins with the block.
        forecast: Samples per second.
        no_profile: Forecast without a profile; 0 before there is one.
        claimed: Error that the forecast claims.
        throughput: Samples per second.
        contention: Mean use by others.
        uses: Use by others in each whole second.
        stolen: Share of the cores' time that a hypervisor gave to other machines.
        collect: Milliseconds to collect and store a sample of telemetry.
    """

    kind: str
    num_bytes: int
    is_first: bool
    forecast: float
    no_profile: float
    claimed: float
    throughput: float
    contention: Contention
    uses: Sequence[Contention]
    stolen: float
    collect: Sequence[float]

    @property
    def error(self) -> float:
        return self.forecast / self.throughput - 1


def make_training() -> TimedTraining:
    """LeNet-5 on noise of the size of MNIST's pictures."""
    noise = generator(0, "noise")
    x = torch.randint(256, (6400, 1, 28, 28), generator=noise, dtype=torch.uint8)
    split = ArraySplit(x, torch.randint(10, (6400,), generator=noise))
    dataset = Dataset("noise", split, split, num_classes=10, input_shape=(1, 28, 28))
    workload = Workload(
        Task(dataset=dataset, model=partial(lenet5, (1, 28, 28), 10)), [0], seed=0
    )
    return TimedTraining(workload.make_trainer(0), workload.initial_params())


def jobs(sizes: Sequence[int], num_cores: int) -> list[Load]:
    """A stream of jobs of each kind and nominal size, on all cores."""
    return [
        Load(kind=kind, num_bytes=size // SCALE, num_processes=num_cores)
        for size in sizes
        for kind in KINDS
    ]


def get_profile(training: TimedTraining, path: str, rows_per_load: int) -> Profile:
    """Train beside jobs of other sizes than those of the blocks, and thrice alone."""
    counters = SystemCounters()
    beside = jobs(PROFILED, counters.num_cores)
    half = len(beside) // 2
    loads = [None, *beside[:half], None, *beside[half:], None]
    with Monitor(PerformancePredictor(), counters=counters) as monitor:
        run = partial(running, path=path)
        return profile_of(list(measure(training, monitor, loads, rows_per_load, run)))


def steal() -> float:
    """Seconds that a hypervisor gave to other machines, as a mean over the cores."""
    cores = psutil.cpu_times(percpu=True)
    return statistics.fmean(getattr(times, "steal", 0.0) for times in cores)


def time_samples(monitor: Monitor, store: TelemetryStore) -> list[float]:
    """Milliseconds to collect and store a sample, as a monitor does once a minute."""
    times = []
    for _ in range(NUM_SAMPLES):
        time.sleep(0.01)
        start, now = time.perf_counter(), time.monotonic()
        monitor.read()
        u = monitor.contention(now - 60, now)
        store.append(0, Sample(time.time(), 60.0, u.cores, u.network, u.disk, 100.0))
        times.append(1e3 * (time.perf_counter() - start))
    return times


class Measurement:
    """One repeat: training beside all jobs.

    Args:
        options: Those of the command line.
        store: Takes samples of telemetry.
    """

    def __init__(self, options: argparse.Namespace, store: TelemetryStore) -> None:
        self._options, self._store = options, store
        self._training = make_training()
        self._profile = get_profile(self._training, options.jobs, options.rows)
        self._trace = Trace(SystemCounters())
        self._blocks: list[Block] = []

    def run(self) -> dict[str, Any]:
        """Train beside each job in turn; returns the blocks and what they were made of."""
        loads = jobs(SIZES[:: self._options.every], self._trace.num_cores)
        # Were sizes in order, the machine's drift could not be told from their effect.
        random.Random(self._options.seed).shuffle(loads)
        predictor = PerformancePredictor().fit(self._profile)
        with Monitor(predictor, counters=self._trace) as monitor:
            self._trace.trained(monitor, *self._training.run(self._options.seconds))
            for load in loads:
                self._follow(monitor, load)
        others = self.replayed(PerformancePredictor())
        blocks = [
            {**asdict(block), "no_profile": other}
            for block, other in zip(self._blocks, others, strict=True)
        ]
        return {
            "seed": self._options.seed,
            "profile": [
                [u.cores, u.network, u.disk, t]
                for u, t in zip(self._profile.contentions, self._profile.seconds, strict=True)
            ],
            "blocks": blocks,
            "trace": self._trace.as_json(),
        }

    def replayed(self, predictor: PerformancePredictor) -> list[float]:
        found = replay(self._trace.events, predictor, self._trace.num_cores, self._trace.quota)
        return [each.throughput for each in found]

    def _follow(self, monitor: Monitor, load: Load) -> None:
        """Forecast and train, block by block; `load` begins after the first forecast."""
        with ExitStack() as stack:
            for number in range(self._options.blocks + 1):
                predicted = self._trace.forecast(monitor)
                if number == 0:
                    stack.enter_context(running(load, self._options.jobs))
                before = steal()
                start, end, cost = self._training.run(self._options.seconds)
                stolen = (steal() - before) / (end - start)
                self._trace.trained(monitor, start, end, cost)
                collect = time_samples(monitor, self._store)
                whole = range(int(end - start))
                block = Block(
                    kind=load.kind,
                    num_bytes=load.num_bytes * SCALE,
                    is_first=number == 0,
                    forecast=predicted.throughput,
                    no_profile=0.0,
                    claimed=predicted.relative_error,
                    throughput=cost / (end - start),
                    contention=monitor.contention(start, end),
                    uses=[monitor.contention(start + i, start + i + 1) for i in whole],
                    stolen=stolen,
                    collect=collect,
                )
                self._blocks.append(block)


# Figures.


def blocks_of(repeat: dict[str, Any]) -> list[Block]:
    """The blocks of a kept repeat."""
    return [
        Block(
            **{
                **block,
                "contention": Contention(**block["contention"]),
                "uses": [Contention(**each) for each in block["uses"]],
            }
        )
        for block in repeat["blocks"]
    ]


def profile_only(blocks: Sequence[Block], rows: Sequence[Sequence[float]]) -> list[float]:
    profile = Profile([Contention(*row[:3]) for row in rows], [row[3] for row in rows])
    predictor = PerformancePredictor().fit(profile)
    return [
        predictor.forecast([block.contention]).throughput / block.throughput - 1
        for block in blocks
    ]


def same_load(blocks: Sequence[Block]) -> list[float]:
    errors = []
    for block in blocks:
        others = [
            other.throughput
            for other in blocks
            if other is not block
            and (other.kind, other.num_bytes) == (block.kind, block.num_bytes)
        ]
        if others:
            errors.append(statistics.fmean(others) / block.throughput - 1)
    return errors


def errors_of(repeat: dict[str, Any]) -> dict[str, list[float]]:
    """The errors of one repeat, by what was asked."""
    blocks = blocks_of(repeat)
    later = [block for block in blocks if not block.is_first]
    by_kind = {kind: [block.error for block in later if block.kind == kind] for kind in KINDS}
    return {
        "forecast": [block.error for block in later],
        **by_kind,
        "first": [block.error for block in blocks if block.is_first],
        "no_profile": [block.no_profile / block.throughput - 1 for block in later],
        "profile_only": profile_only(later, repeat["profile"]),
        "same_load": same_load(later),
    }


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Statistics of the errors' magnitudes."""
    sizes = sorted(map(abs, errors))
    return {
        "mean": statistics.fmean(sizes),
        "median": statistics.median(sizes),
        "percentile_90": sizes[int(0.9 * (len(sizes) - 1))],
        "worst": sizes[-1],
        "bias": statistics.fmean(errors),
        "num_blocks": len(sizes),
    }


def summaries(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of all repeats together, and the mean of each."""
    found = [errors_of(repeat) for repeat in repeats]
    return {
        name: summary([error for errors in found for error in errors[name]])
        | {"mean_by_repeat": [summary(errors[name])["mean"] for errors in found]}
        for name in found[0]
        if all(errors[name] for errors in found)  # a single later block has no equal
    }


def show(found: dict[str, Any]) -> None:
    print("                mean  median     90 %   worst    bias  blocks  repeats")
    for name, values in found["errors"].items():
        repeats = " ".join(f"{each:.1%}" for each in values["mean_by_repeat"])
        print(
            f"{name.replace('_', ' '):12s} {values['mean']:7.1%} {values['median']:7.1%} "
            f"{values['percentile_90']:8.1%} {values['worst']:7.1%} {values['bias']:+7.1%} "
            f"{values['num_blocks']:7d}  {repeats}"
        )
    blocks = [block for repeat in found["repeats"] for block in blocks_of(repeat)]
    for size in sorted({block.num_bytes for block in blocks}):
        own = [block for block in blocks if block.num_bytes == size]
        uses = [use for block in own for use in block.uses]
        cores, network, disk = (
            statistics.fmean(getattr(use, name) for use in uses)
            for name in ("cores", "network", "disk")
        )
        collect = statistics.median(each for block in own for each in block.collect)
        error = summary([block.error for block in own if not block.is_first])["mean"]
        print(
            f"{size / MB:8,g} MB: error {error:5.1%}, cores {cores:.2f}, network "
            f"{network / MB:5.2f} MB/s, disk {disk / MB:6.2f} MB/s, stolen "
            f"{max(block.stolen for block in own):.2%} at most, collect {collect:.1f} ms"
        )


# Hosts.


def measure_inside(options: argparse.Namespace) -> None:
    """On a host of the lab: one repeat, written to `options.out`."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_url(Path(folder)) as url,
        closing(open_telemetry(url or "memory", "benchmark")) as store,
    ):
        found = Measurement(options, store).run()
    options.out.write_text(json.dumps(found))


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All repeats, each in a process on host 0."""
    link = options.mbit * 1e6 / 8
    folders = tempfile.TemporaryDirectory() if options.out is None else None
    with (
        folders or nullcontext(options.out) as name,
        Lab([HostSpec(bandwidth=link)] * 2) as lab,
    ):
        folder, address = Path(name), lab.addresses[1]
        folder.mkdir(exist_ok=True)
        module = [sys.executable, "-m", "benchmarks.mapreduce"]
        path = f"/tmp/edgegossip-jobs-{time.time_ns()}"
        helpers = [lab.start(1, [*module, "serve", address])]
        helpers += [lab.start(0, [*module, "run", address, path])]
        while not Path(path).exists():
            time.sleep(0.1)
        repeats = []
        for seed in range(options.repeats):
            out = folder / f"{seed}.json"
            given = [f"--{name}={getattr(options, name)}" for name in PASSED]
            own = [f"--seed={seed}", f"--out={out}", f"--jobs={path}"]
            command = [sys.executable, "-m", "benchmarks.predictor_real", *given, *own]
            if lab.start(0, command).wait():
                raise RuntimeError("a repeat failed; see the messages above")
            repeats.append(json.loads(out.read_text()))
        Path(path).unlink()
        for host in range(2):
            lab.kill(host)
        for helper in helpers:
            helper.wait()
    return repeats


PASSED = ("rows", "blocks", "seconds", "every")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mbit", type=float, default=400, help="of the link, per second")
    parser.add_argument("--rows", type=int, default=4, help="of the profile, for each load")
    parser.add_argument("--blocks", type=int, default=2, help="for each load, after the first")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each block")
    parser.add_argument("--every", type=int, default=1, help="take each so-manyth size")
    parser.add_argument("--out", type=Path, help="folder for repeats with all readings")
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs is not None:
        measure_inside(options)
        return
    origin = about(options)
    repeats = measure_all(options)
    for repeat in repeats:
        del repeat["trace"]
    found = {"scale": SCALE, "errors": summaries(repeats), "repeats": repeats}
    print(json.dumps(origin | rounded(found))) if options.json else show(found)


if __name__ == "__main__":
    main()
