"""How far off forecasts are on this machine, beside WordCount and Sort: the paper's Fig. 9.

    python -m benchmarks.predictor_real             a table
    python -m benchmarks.predictor_real --json      one JSON object
    python -m benchmarks.predictor_real --profile FILE --kind wordcount
                                                    in pieces: FILE is made if it is not there

First a profile is measured as `edgegossip profile` does. Then LeNet-5 trains on one thread
beside WordCount and Sort of 13 sizes, one after the other, each with as many processes as there
are cores. Before each block of training a forecast is asked for, as EdgeGossip does, and
compared with the throughput of the block.

- "forecast": what EdgeGossip gets: slow-down from the profile, base time followed online.
- "first": the same for the block in which a load begins, which nobody could foresee.
- "profile only": what RG and t0 of the profile say of what was used during the block itself.
- "other sizes": the same, fitted to the blocks of all other sizes of this run.
- "same load": what the other blocks beside the very same load say of it: how far equal blocks
  differ on this machine, which no predictor can foresee.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import about

from edgegossip.contract.randomness import generator
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.machine.contention import Contention
from edgegossip.machine.counters import SystemCounters
from edgegossip.machine.loads import KINDS, MB, SIZES, Load
from edgegossip.machine.monitor import Monitor
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.machine.profile import MIN_ROWS, Profile
from edgegossip.machine.profiling import TimedTraining, choose_loads, measure, profile_of
from edgegossip.models import lenet5
from edgegossip.training.task import Task, Workload


@dataclass(frozen=True)
class Block:
    """A stretch of training, some seconds long."""

    kind: str
    num_bytes: int
    is_first: bool
    forecast: float
    claimed: float
    throughput: float
    contention: Contention

    @property
    def error(self) -> float:
        return self.forecast / self.throughput - 1


def make_training() -> TimedTraining:
    """LeNet-5 on noise of the size of MNIST's pictures."""
    random = generator(0, "noise")
    x = torch.randint(256, (6400, 1, 28, 28), generator=random, dtype=torch.uint8)
    split = ArraySplit(x, torch.randint(10, (6400,), generator=random))
    dataset = Dataset("noise", split, split, num_classes=10, input_shape=(1, 28, 28))
    workload = Workload(
        Task(dataset=dataset, model=partial(lenet5, (1, 28, 28), 10)), [0], seed=0
    )
    return TimedTraining(workload.make_trainer(0), workload.initial_params())


def get_profile(path: Path | None, training: TimedTraining, seconds: float) -> Profile:
    if path is not None and path.exists():
        return Profile.read(path)
    counters = SystemCounters()
    with Monitor(PerformancePredictor(), counters=counters) as monitor:
        rows = measure(training, monitor, choose_loads(seconds, counters.num_cores))
        profile = profile_of(list(rows))
    if path is not None:
        profile.write(path)
    return profile


def follow(
    training: TimedTraining, monitor: Monitor, load: Load, num_blocks: int, seconds: float
) -> list[Block]:
    """Forecast and train, block by block; `load` begins after the first forecast."""
    blocks = []
    with ExitStack() as stack:
        for number in range(num_blocks + 1):
            predicted = monitor.forecast(time.monotonic())
            if number == 0:
                stack.enter_context(load.running())
            start, end, cost = training.run(seconds)
            monitor.trained(start, end, cost)
            monitor.read()
            blocks.append(
                Block(
                    load.kind,
                    load.num_bytes,
                    number == 0,
                    predicted.throughput,
                    predicted.relative_error,
                    cost / (end - start),
                    monitor.contention(start, end),
                )
            )
    return blocks


def profile_only(blocks: Sequence[Block], profile: Profile) -> list[float]:
    errors = []
    for block in blocks:
        predictor = PerformancePredictor().fit(profile)
        predicted = predictor.forecast([block.contention]).throughput
        errors.append(predicted / block.throughput - 1)
    return errors


def other_sizes(blocks: Sequence[Block]) -> list[float]:
    errors = []
    for size in {block.num_bytes for block in blocks}:
        others = [block for block in blocks if block.num_bytes != size]
        if len(others) < MIN_ROWS:
            return []
        profile = Profile(
            [block.contention for block in others], [1 / block.throughput for block in others]
        )
        own = [block for block in blocks if block.num_bytes == size]
        errors += profile_only(own, profile)
    return errors


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


def summary(errors: Sequence[float]) -> dict[str, float]:
    if not errors:
        return {}
    sizes = sorted(map(abs, errors))
    return {
        "mean": statistics.fmean(sizes),
        "median": statistics.median(sizes),
        "percentile_90": sizes[int(0.9 * (len(sizes) - 1))],
        "worst": sizes[-1],
        "bias": statistics.fmean(errors),
        "num_blocks": len(sizes),
    }


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    training = make_training()
    profile = get_profile(options.profile, training, 60 * options.minutes)
    predictor = PerformancePredictor().fit(profile)
    sizes = [size for size in SIZES if size <= options.max_megabytes * MB]
    kinds = KINDS if options.kind is None else (options.kind,)
    num_processes = SystemCounters().num_cores
    blocks = []
    with Monitor(predictor) as monitor:
        start, end, cost = training.run(options.seconds)
        monitor.trained(start, end, cost)
        for kind in kinds:
            for size in sizes:
                load = Load(kind=kind, num_bytes=size, num_processes=num_processes)
                blocks += follow(training, monitor, load, options.blocks, options.seconds)
    later = [block for block in blocks if not block.is_first]
    return {
        "sizes": sizes,
        "seconds": options.seconds,
        "profile_rows": len(profile),
        "forecast": summary([block.error for block in later]),
        "by_kind": {
            kind: summary([block.error for block in later if block.kind == kind])
            for kind in kinds
        },
        "first": summary([block.error for block in blocks if block.is_first]),
        "profile_only": summary(profile_only(later, profile)),
        "other_sizes": summary(other_sizes(later)),
        "same_load": summary(same_load(later)),
        "blocks": [asdict(block) for block in blocks],
    }


def show(found: dict[str, Any]) -> None:
    print("              mean  median     90 %   worst    bias  blocks")
    for name in ("forecast", "first", "profile_only", "other_sizes", "same_load"):
        if not (values := found[name]):
            continue  # too few blocks to learn from
        print(
            f"{name.replace('_', ' '):12s} {values['mean']:6.1%} {values['median']:7.1%} "
            f"{values['percentile_90']:8.1%} {values['worst']:7.1%} {values['bias']:+7.1%} "
            f"{values['num_blocks']:7d}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", type=Path, help="read from here, or made and kept here")
    parser.add_argument("--minutes", type=float, default=4.0, help="of profiling")
    parser.add_argument("--kind", choices=KINDS, help="of loads; by default both")
    parser.add_argument("--max-megabytes", type=float, default=2000)
    parser.add_argument("--blocks", type=int, default=3, help="for each load, after the first")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each block")
    options = parser.parse_args()
    origin = about(options)
    torch.set_num_threads(1)
    found = measure_all(options)
    print(json.dumps(origin | found)) if options.json else show(found)


if __name__ == "__main__":
    main()
