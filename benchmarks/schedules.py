"""Does a learning rate that falls over the run serve EdgeGossip as it serves others?

    python -m benchmarks.schedules --out DIR [--num-epochs 3] [--json]

LeNet-5 on MNIST (from $EDGEGOSSIP_DATA), four workers of which the fastest is 8 times as fast
as the slowest. EdgeGossip makes 8 rounds while EpochGossip makes one, which takes as long; so
all runs get the same virtual time, and those of one algorithm the same rounds. EpochGossip is
the control: what the cosine does for it, it does without EdgeGossip.

A sixth of the training samples is held out. Each of the four combinations gets the learning
rate of the grid whose final models are the best there, on average over seeds that results do
not use. Results are of the final averaged model on the test split, ten seeds. All runs end with
one evaluation, and none is chosen by it. What is in DIR is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.kept import about
from studies.race import imbalanced

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.errors import TrainingError
from edgegossip.contract.topology import complete
from edgegossip.data.dataset import Dataset
from edgegossip.data.hold_out import hold_out
from edgegossip.data.readers import DATASETS
from edgegossip.models import lenet5
from edgegossip.recipes.baselines import HOME_LINK
from edgegossip.recipes.tasks import ACCURACY_AWARE, default_data_dir
from edgegossip.runs.describe import describe
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run
from edgegossip.sim.link import Links
from edgegossip.training.optimizer import SGD, Constant, Cosine, Schedule
from edgegossip.training.task import Task

IMBALANCE = 8
NUM_WORKERS = 4
THROUGHPUT = 2000.0
MOMENTUM = 0.9
RATES = (0.01, 0.02, 0.04, 0.08, 0.16)
TUNING_SEEDS = (100, 101, 102)
SEEDS = tuple(range(10))
SCHEDULES: Mapping[str, Schedule] = {"constant": Constant(), "cosine": Cosine()}
ALGORITHMS = ("edge-gossip", "epoch-gossip")


def algorithm(name: str, num_epochs: int) -> EdgeGossip | EpochGossip:
    everyone = complete(NUM_WORKERS)
    if name == "epoch-gossip":
        return EpochGossip(topology=everyone, num_rounds=num_epochs)
    return EdgeGossip(inner=EpochGossip(topology=everyone, num_rounds=IMBALANCE * num_epochs))


def experiment(
    dataset: Dataset, name: str, schedule: str, rate: float, seed: int, num_epochs: int
) -> Experiment:
    """One run; what it is measured on is the data set's test split."""
    task = Task(
        dataset=dataset,
        model=partial(lenet5, dataset.input_shape, dataset.num_classes),
        optimizer=SGD(lr=rate, momentum=MOMENTUM),
        schedule=SCHEDULES[schedule],
    )
    if name == "edge-gossip":
        task = replace(task, accuracy_aware=ACCURACY_AWARE)
    return Experiment(
        task=task,
        algorithm=algorithm(name, num_epochs),
        platforms=imbalanced(NUM_WORKERS, THROUGHPUT, IMBALANCE),
        links=Links(default=HOME_LINK),
        seed=seed,
        evaluation_interval=1e6,  # at the end only
    )


class Runs:
    """Makes runs, or reads those that `out` has."""

    def __init__(self, dataset: Dataset, out: Path, num_epochs: int) -> None:
        held_out = hold_out(dataset, share=1 / 6)
        self._measured = replace(held_out, validation=None)
        # While tuning, nothing sees the test split.
        assert held_out.validation is not None
        self._tuned = replace(self._measured, test=held_out.validation)
        self._out = out
        self._num_epochs = num_epochs

    def tune(self, name: str, schedule: str, rate: float) -> float:
        """The mean final accuracy on the validation split; 0 where training diverges."""
        return statistics.mean(
            self._validated(name, schedule, rate, seed) for seed in TUNING_SEEDS
        )

    def _validated(self, name: str, schedule: str, rate: float, seed: int) -> float:
        try:
            results = self._run(self._tuned, "tuning", name, schedule, rate, seed)
        except TrainingError:
            return 0.0
        return results.history[-1].accuracy

    def measure(self, name: str, schedule: str, rate: float, seed: int) -> Results:
        return self._run(self._measured, "measured", name, schedule, rate, seed)

    def _run(
        self, dataset: Dataset, kind: str, name: str, schedule: str, rate: float, seed: int
    ) -> Results:
        out = self._out / kind / f"{name}-{schedule}-{rate:g}-seed{seed}"
        print(out, file=sys.stderr, flush=True)
        one = experiment(dataset, name, schedule, rate, seed, self._num_epochs)
        return run(one, out=out, resume=out.exists())


def rows(runs: Runs) -> Iterator[dict[str, Any]]:
    """Tune and measure each algorithm with each schedule."""
    for name, schedule in product(ALGORITHMS, SCHEDULES):
        tuned = {rate: runs.tune(name, schedule, rate) for rate in RATES}
        best = max(tuned, key=tuned.__getitem__)
        results = [runs.measure(name, schedule, best, seed) for seed in SEEDS]
        accuracies = [each.history[-1].accuracy for each in results]
        yield {
            "algorithm": name,
            "schedule": schedule,
            "validation_accuracies": {f"{rate:g}": found for rate, found in tuned.items()},
            "rate": best,
            "accuracies": accuracies,
            "mean": statistics.mean(accuracies),
            "deviation": statistics.stdev(accuracies),
            "virtual_seconds": [each.virtual_seconds for each in results],
            "samples_processed": [each.history[-1].samples_processed for each in results],
        }


def gains(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By how much the cosine is better than the constant rate, seed by seed."""
    by_name = {(row["algorithm"], row["schedule"]): row["accuracies"] for row in found}
    return {
        name: {
            "by_seed": (each := _differences(by_name, name)),
            "mean": statistics.mean(each),
            "standard_error": statistics.stdev(each) / len(each) ** 0.5,
        }
        for name in ALGORITHMS
    }


def _differences(by_name: Mapping[tuple[str, str], list[float]], name: str) -> list[float]:
    pairs = zip(by_name[name, "cosine"], by_name[name, "constant"], strict=True)
    return [cosine - constant for cosine, constant in pairs]


def show(found: Sequence[Mapping[str, Any]]) -> None:
    print(f"{'':24}{'rate':>8}{'mean':>9}{'+-':>8}{'from':>9}{'to':>9}{'seconds':>9}")
    for row in found:
        each = row["accuracies"]
        spread = f"{row['mean']:9.4f}{row['deviation']:8.4f}{min(each):9.4f}{max(each):9.4f}"
        name = f"{row['algorithm']}, {row['schedule']}"
        seconds = statistics.mean(row["virtual_seconds"])
        print(f"{name:24}{row['rate']:8g}{spread}{seconds:9.1f}")
    for name, gain in gains(found).items():
        print(f"{name}: cosine {gain['mean']:+.4f} +- {gain['standard_error']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--num-epochs", type=int, default=3, help="of EpochGossip")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    origin = about(options)
    dataset = DATASETS["mnist"](default_data_dir())
    found = list(rows(Runs(dataset, options.out, options.num_epochs)))
    if not options.json:
        return show(found)
    kept = {
        **origin,
        "seeds": {"tuning": TUNING_SEEDS, "results": SEEDS, "held_out": 0},
        "imbalance": IMBALANCE,
        "num_epochs": options.num_epochs,
        "momentum": MOMENTUM,
        "algorithms": {
            each: describe(algorithm(each, options.num_epochs)) for each in ALGORITHMS
        },
        "result": found,
        "gains": gains(found),
    }
    print(json.dumps(kept, indent=1))
    return None


if __name__ == "__main__":
    main()
