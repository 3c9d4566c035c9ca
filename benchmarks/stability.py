"""Does EdgeGossip diverge where machines differ by up to 64 times?

    EDGEGOSSIP_DATA=data python -m benchmarks.stability [--set-ups 50] [--json]

A seed draws each set-up: 3 to 8 machines, the fastest 8 to 64 times as fast as the slowest and
the others in between; learning rate, momentum and batch size. A small MLP learns 12,000
pictures of MNIST for 12 rounds by EdgeGossip with random shares and with `Focused`, each with
the limit of the correction (`max_mean_factor`) and without, without a correction, and with
control variates of weight 1 and 0.3 instead. A run has diverged if its loss is not finite, or
at the end above that of the untrained model; accuracies are those of the averaged model on
2,000 pictures of the test split, means of the last three rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import about

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.errors import EdgeGossipError
from edgegossip.contract.topology import complete
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.readers import mnist
from edgegossip.models import mlp
from edgegossip.recipes.baselines import balanced
from edgegossip.recipes.tasks import ACCURACY_AWARE, default_data_dir
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.platform import Platform
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import PLAIN, AccuracyAware
from edgegossip.training.task import Task

NUM_ROUNDS = 12
FASTEST = 1000.0
Run = tuple[AccuracyAware, dict[str, float]]
"""Choice of samples, and other arguments of `balanced`."""
RUNS: Mapping[str, Run] = {
    "random": (PLAIN, {}),
    "random, no limit": (PLAIN, {"max_mean_factor": math.inf}),
    "random, no correction": (PLAIN, {"correction": 0.0}),
    "focused": (ACCURACY_AWARE, {}),
    "focused, no limit": (ACCURACY_AWARE, {"max_mean_factor": math.inf}),
    "random, controlled": (PLAIN, {"control": 1.0}),
    "random, control 0.3": (PLAIN, {"control": 0.3}),
    "focused, controlled": (ACCURACY_AWARE, {"control": 1.0}),
    "focused, control 0.3": (ACCURACY_AWARE, {"control": 0.3}),
}


def few(dataset: Dataset) -> Dataset:
    """The first pictures of each split."""
    train, test = (
        ArraySplit(*split.batch(torch.arange(size)))
        for split, size in ((dataset.train, 12_000), (dataset.test, 2_000))
    )
    return replace(dataset, train=train, test=test)


def drawn(seed: int) -> dict[str, Any]:
    """The set-up of `seed`."""
    draw = random.Random(f"{seed} stability")
    spread = 2 ** draw.uniform(3, 6)
    others = [spread ** draw.random() for _ in range(draw.randint(1, 6))]
    return {
        "speeds": [FASTEST, *(FASTEST / each for each in others), FASTEST / spread],
        "lr": 10 ** draw.uniform(-2.5, -1),
        "momentum": draw.choice([0.0, 0.5, 0.9]),
        "batch_size": draw.choice([16, 32, 64]),
    }


def train(set_up: Mapping[str, Any], name: str, dataset: Dataset, folder: Path) -> Any:  # noqa: ANN401
    """Train one run of a set-up; gives its accuracy, or None if it diverged."""
    accuracy_aware, settings = RUNS[name]
    inner = EpochGossip(topology=complete(len(set_up["speeds"])), num_rounds=NUM_ROUNDS)
    task = Task(
        dataset=dataset,
        model=partial(mlp, (1, 28, 28), 10, hidden=(64,)),
        optimizer=SGD(lr=set_up["lr"], momentum=set_up["momentum"]),
        batch_size=set_up["batch_size"],
        accuracy_aware=accuracy_aware,
    )
    round_seconds = len(dataset.train) / len(set_up["speeds"]) / FASTEST
    experiment = Experiment(
        task=task,
        algorithm=balanced(inner, **settings),
        platforms=tuple(Platform(throughput=speed) for speed in set_up["speeds"]),
        evaluation_interval=round_seconds,
    )
    try:
        history = run(experiment, out=folder).history
    except EdgeGossipError:
        return None
    is_finite = all(math.isfinite(each.loss) for each in history)
    if not is_finite or history[-1].loss > history[0].loss:
        return None
    return statistics.fmean(each.accuracy for each in history[-3:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set-ups", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    origin = about(options)
    dataset = few(mnist(default_data_dir()))
    found = []
    for seed in range(options.set_ups):
        set_up = drawn(seed)
        with tempfile.TemporaryDirectory() as folder:
            accuracies = {
                name: train(set_up, name, dataset, Path(folder, str(number)))
                for number, name in enumerate(RUNS)
            }
        found.append({**set_up, "accuracies": accuracies})
        print(seed, accuracies, file=sys.stderr)
    summary = {
        name: {
            "diverged": sum(each["accuracies"][name] is None for each in found),
            "median accuracy": statistics.median(
                each["accuracies"][name] or 0.0 for each in found
            ),
        }
        for name in RUNS
    }
    if options.json:
        print(json.dumps({**origin, "summary": summary, "set_ups": found}))
        return 0
    for name, values in summary.items():
        print(f"{name:24} {values['diverged']:>3} diverged, {values['median accuracy']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
