"""Do workers with data of their own, of unequal sizes, end their epochs together?

    sudo EDGEGOSSIP_DATA=data python -m benchmarks.local_data [--only NAME...] [--json]

Four hosts of a lab have 0.3, 0.27, 0.17 and 0.13 cores, and a file each with 24,000, 8,000,
16,000 and 12,000 pictures of MNIST, which no other host reads (`Local`). An `edgegossip worker`
on each trains LeNet-5 with

- edge-gossip: EdgeGossip around EpochGossip, with epochs as long as the quickest pass;
- edge-gossip-steps: EdgeGossip around Gossip, which asks for steps;
- epoch-gossip: EpochGossip alone, whose workers wait for the longest pass.

The spread of an epoch (or round) is the time between the first and the last worker that are
through with it, over its duration; the first, before which workers get ready, does not count.
The bound is what all hosts train in the same time without neighbors (`lab/calibrate.py`), just
before and after; the machine's own changes of speed are accounted for (`lab/pace.py`).
Exits with 1 if the median spread of edge-gossip is above 5 %, or its share of the bound below
0.9.
Afterwards each host measures the averaged models on its own validation data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.kept import about
from benchmarks.lab_runs import Setting, calibrate, work_in_lab
from lab.lab import HostSpec, Lab
from lab.machine import missing
from lab.pace import Pace, follow

import edgegossip as eg
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.randomness import generator
from edgegossip.data.dataset import ArraySplit
from edgegossip.real.gather import gather
from edgegossip.recipes.tasks import default_data_dir
from edgegossip.runs.process import one_intra_op_thread
from edgegossip.runs.results import Results

RECIPE = f"{Path(__file__)}:own_digits"
CORES = (0.3, 0.27, 0.17, 0.13)
SIZES = (24_000, 8_000, 16_000, 12_000)
HOSTS = tuple(HostSpec(cpu=cores, bandwidth=50e6 / 8) for cores in CORES)
RUNS = ("edge-gossip", "edge-gossip-steps", "epoch-gossip")
MOST_SPREAD, LEAST_SHARE = 0.05, 0.9


def own_digits(
    data_dir: str = "data/{rank}.npz", num_epochs: int = 12, local_steps: int = 120
) -> eg.Comparison:
    """Four workers with digits of their own.

    Args:
        data_dir: File of a worker.
        num_epochs: Epochs; a third of them for EpochGossip, whose are longer.
        local_steps: Steps of the fastest worker in a round.
    """

    def load(rank: int) -> eg.Dataset:
        found = np.load(data_dir.format(rank=rank))
        split = ArraySplit(torch.from_numpy(found["x"]), torch.from_numpy(found["y"]))
        return eg.Dataset("digits", split, num_classes=10, input_shape=(1, 28, 28))

    task = eg.Task(
        dataset=eg.Local(
            "digits",
            load=load,
            num_classes=10,
            input_shape=(1, 28, 28),
            mean=torch.tensor([0.1307]),
            std=torch.tensor([0.3081]),
        ),
        model=partial(eg.lenet5, (1, 28, 28), 10),
        optimizer=eg.SGD(lr=0.02, momentum=0.9),
    )
    everyone = eg.complete(len(CORES))
    epochs = eg.EpochGossip(topology=everyone, num_rounds=num_epochs)
    steps = eg.Gossip(topology=everyone, num_rounds=2 * num_epochs, local_steps=local_steps)
    whole = eg.EpochGossip(topology=everyone, num_rounds=max(2, num_epochs // 3))
    algorithms: dict[str, Algorithm[Any]] = {
        "edge-gossip": eg.EdgeGossip(inner=epochs),
        "edge-gossip-steps": eg.EdgeGossip(inner=steps),
        "epoch-gossip": whole,
    }
    platforms = tuple(eg.Platform(throughput=1000 * cores) for cores in CORES)
    return eg.Comparison(
        experiments={
            name: eg.Experiment(task=task, algorithm=algorithm, platforms=platforms)
            for name, algorithm in algorithms.items()
        },
        baseline="edge-gossip",
    )


def write_data(folder: Path) -> None:
    """Write the file of each host."""
    data = eg.mnist(default_data_dir())
    order = torch.randperm(len(data.train), generator=generator(0, "local data"))
    folder.mkdir(parents=True)
    for rank, indices in enumerate(torch.split(order[: sum(SIZES)], list(SIZES))):
        x, y = data.train.batch(indices)
        np.savez(folder / f"{rank}.npz", x=x.numpy(), y=y.numpy())


def spreads(out: Path) -> list[float]:
    """The spread of each epoch but the first."""
    ends: dict[int, dict[int, float]] = {}
    for line in map(json.loads, (out / "events.jsonl").read_text().splitlines()):
        if line["type"] == "sent" and line["kind"] == "params":
            of_round = ends.setdefault(line["round"], {})
            of_round[line["rank"]] = min(line["time"], of_round.get(line["rank"], np.inf))
    whole = [sorted(ends[each].values()) for each in sorted(ends)]
    return [(each[-1] - each[0]) / (each[-1] - last[-1]) for last, each in pairwise(whole)]


def trained(out: Path) -> tuple[float, float]:
    """Samples and seconds, after the first epoch."""
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    sends = [e for e in lines if e["type"] == "sent" and e["kind"] == "params"]
    start = max(e["time"] for e in sends if e["round"] == 0)
    end = max(e["time"] for e in sends)
    work = (e for e in lines if e["type"] == "trained" and start < e["time"] <= end)
    return sum(e["cost"] for e in work), end - start


def gathered(setting: Setting, name: str, out: Path) -> Results:
    """Let the hosts measure the averaged models, each on its own data, and gather."""
    experiment = setting.experiments[name]
    with one_intra_op_thread():
        waited_for, _ = gather(experiment, out, setting.arguments[0])
        assert isinstance(waited_for, list)
        command = [sys.executable, "-m", "edgegossip", "measure", *setting.arguments]
        with Lab(HOSTS) as lab:
            children = [
                lab.start(r, [*command, "--only", name, "--rank", str(r), "--out", str(out)])
                for r in waited_for
            ]
            codes = [child.wait() for child in children]
        if any(codes):
            raise RuntimeError(f"measuring ended with {codes}")
        results, _ = gather(experiment, out, setting.arguments[0])
    assert isinstance(results, Results)
    return results


def measure(setting: Setting, name: str, pace: Pace) -> dict[str, Any]:
    """Run an algorithm on the hosts, between two calibrations."""
    before = calibrate(setting, RUNS[0], pace)
    load = os.getloadavg()[0]
    out, num_bytes, began = work_in_lab(setting, name, None)
    ended = time.time()
    after = calibrate(setting, RUNS[0], pace)
    # Speeds as they were during the run, from those of the pace on the same cores.
    during = [pace.mean(core, began, ended) for core in setting.cores]
    each = zip(before.samples_per_step, after.samples_per_step, during, strict=True)
    speeds = [(a + b) / 2 / seconds for a, b, seconds in each]
    results = gathered(setting, name, out)
    found = spreads(out)
    samples, seconds = trained(out)
    shares = samples / seconds / sum(speeds)
    return {
        "name": name,
        "num_epochs": len(found),
        "seconds_an_epoch": seconds / len(found),
        "median_spread": statistics.median(found),
        "largest_spread": max(found),
        "within": sum(each <= MOST_SPREAD for each in found) / len(found),
        "samples_per_second": samples / seconds,
        "share_of_bound": shares,
        "throughputs": speeds,
        "accuracy": results.final_accuracy,
        "num_bytes": num_bytes,
        "load": load,
        "spreads": found,
        "before": before.throughputs,
        "after": after.throughputs,
    }


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['name']:18} {row['seconds_an_epoch']:6.2f} s an epoch, spread "
        f"{row['median_spread']:.1%} (largest {row['largest_spread']:.1%}, "
        f"{row['within']:.0%} within {MOST_SPREAD:.0%}), {row['samples_per_second']:.0f} "
        f"samples/s, {row['share_of_bound']:.3f} of the bound, accuracy {row['accuracy']:.2%}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--num-epochs", type=int, default=12)
    parser.add_argument("--local-steps", type=int, default=120)
    stamp = time.strftime("runs/local-data/%Y%m%d-%H%M%S")
    parser.add_argument("--out", type=Path, default=Path(stamp))
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    options = parser.parse_args()
    origin = about(options)
    if lacks := missing():
        print(f"no lab here, as this is missing: {'; '.join(lacks)}")
        return 0
    data = options.out.resolve() / "data"
    write_data(data)
    words = [RECIPE, "--data-dir", f"{data}/{{rank}}.npz"]
    words += ["--num-epochs", str(options.num_epochs)]
    words += ["--local-steps", str(options.local_steps)]
    setting = Setting(tuple(words), HOSTS, target=0.9, out=options.out)
    rows = []
    with follow(setting.cores) as pace:
        for name in options.only:
            rows.append(measure(setting, name, pace))
            if not options.json:
                show(rows[-1])
    if options.json:
        print(json.dumps({**origin, "rows": rows}, indent=2))
    return not all(
        row["median_spread"] <= MOST_SPREAD and row["share_of_bound"] >= LEAST_SHARE
        for row in rows
        if row["name"] == RUNS[0]
    )


if __name__ == "__main__":
    sys.exit(main())
