"""EdgeSqueeze's loss on machines that differ by 8 times, and on equal ones, at equal samples.

    python -m benchmarks.uneven_loss [--seeds 0 1 2 3 4]

A perceptron on MNIST, four machines, 100 Mbit/s (`environments/own-machines`). A round has
about as many samples in all runs. Data are in equal shards, in shards in proportion to the
machines' speeds, or all machines claim units of them (`ClaimedWork`). A run's figure is its
mean test loss over the last fifth of its evaluations; all runs process equally many samples,
but for claimed work, which comes to 4 % fewer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.kept import about, rounded

import edgegossip as eg
from edgegossip.recipes.call import RecipeCall

SPEEDS = (1.0, 0.5, 0.25, 0.125)
EQUAL = "equal machines"
DATA = ("equal shards", "shards by speed", "claimed work")
"""How uneven machines divide the data."""


def experiment(kind: str, seed: int) -> eg.Experiment:
    """The run of EdgeSqueeze on equal machines, or on uneven ones with data so divided."""
    is_equal = kind == EQUAL
    given: dict[str, Any] = {
        "lr": 0.15,
        "local_steps": 16 if is_equal else 34,
        "speeds": (1.0,) * 4 if is_equal else SPEEDS,
        "seed": seed,
    }
    made = RecipeCall("environments/own-machines", given).make()
    assert isinstance(made, eg.Comparison)
    found = made.experiments["edge-squeeze"]
    if kind == "shards by speed":
        return replace(found, task=replace(found.task, partition=eg.Proportional(SPEEDS)))
    if kind == "claimed work":
        assert isinstance(found.algorithm, eg.EdgeGossip)
        claimed = eg.ClaimedWork(inner=found.algorithm.inner)
        return replace(
            found,
            task=replace(found.task, partition=eg.Shared(units=64)),
            algorithm=claimed,
        )
    return found


def row(kind: str, seed: int) -> dict[str, Any]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        results = eg.run(experiment(kind, seed), out=Path(folder) / "run", num_threads=1)
    history = results.history
    last = history[-(len(history) // 5) :]
    return {
        "kind": kind,
        "seed": seed,
        "samples": history[-1].samples_processed,
        "loss": statistics.fmean(each.loss for each in last),
        "accuracy": statistics.fmean(each.accuracy for each in last),
        "time to 97 %": results.time_to(0.97),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    kept: dict[str, Any] = {**about(options), "rows": []}
    equal: dict[int, float] = {}
    for kind in (EQUAL, *DATA):
        rows = [row(kind, seed) for seed in options.seeds]
        kept["rows"] += rows
        equal = equal or {each["seed"]: each["loss"] for each in rows}
        losses = [each["loss"] for each in rows]
        ratios = [each["loss"] / equal[each["seed"]] for each in rows]
        print(
            f"{kind}: loss {statistics.median(losses):.4f}, "
            f"{statistics.median(ratios):.3f} times that on equal machines "
            f"({min(ratios):.3f} to {max(ratios):.3f}), "
            f"accuracy {statistics.median(each['accuracy'] for each in rows):.2%}",
            file=sys.stderr,
        )
    print(json.dumps(rounded(kept), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
