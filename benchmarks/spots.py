"""Systems on machines that come and go as spot machines did: how much of their time is useful.

    python -m benchmarks.spots --traces FILE [--hours 24] [--seeds 0 1 2 3 4] [--json FILE]

`environments/churn` on MNIST: eight equal machines are there while those of a trace were
(github.com/skypilot-org/spot-traces; see `edgegossip.availability`). A run of 58 seconds stands
for so many hours, so that a machine is there for some seconds at a time. One that comes back
has forgotten everything. A run's figure is its share of the samples that the machines could
have processed while they were there; samples whose results a crash has lost do not count.
`claimed` systems divide shared data (`ClaimedWork`).
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
from edgegossip.runs.files import write_json

SYSTEMS = (
    "edge-squeeze",
    "edge-gossip-diloco",
    "gosgd",
    "gosgd, claimed",
    "swift",
    "swift, claimed",
    "ad-psgd",
    "diloco",
    "all-reduce",
    "async-local-sgd",
    "adsp",
)


def experiment(
    system: str, seed: int, hours: float, options: argparse.Namespace
) -> eg.Experiment:
    """The run of a system in the environment."""
    given = {
        "seed": seed,
        "hours": hours,
        "availability": options.traces,
        "local_steps": options.local_steps,
    }
    made = RecipeCall("environments/churn", given).make()
    assert isinstance(made, eg.Comparison)
    name, _, is_claimed = system.partition(", ")
    found = made.experiments[name]
    if not is_claimed:
        return found
    task = replace(found.task, partition=eg.Shared())
    return replace(found, task=task, algorithm=eg.ClaimedWork(inner=found.algorithm))


def row(system: str, seed: int, hours: float, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    chosen = experiment(system, seed, hours, options)
    with tempfile.TemporaryDirectory() as folder:
        results = eg.run(chosen, out=Path(folder) / "run", num_threads=1)
    use = results.history[-1].use
    assert use is not None
    # Servers are always on, and equal machines are as fast as they are long there.
    trains = [chosen.algorithm.role(rank).has_data for rank in range(len(chosen.platforms))]
    seconds = use.node_seconds - trains.count(False) * results.virtual_seconds
    present = seconds / trains.count(True) / results.virtual_seconds
    return {
        "system": system,
        "seed": seed,
        "hours": hours,
        "crashes": sum(isinstance(each, eg.Crash) for each in chosen.faults.script),
        "present": present,
        "goodput": use.goodput,
        "of what is present": use.goodput / present,
        "compute_used": use.compute_used,
        "accuracy": results.final_accuracy,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--hours", type=float, nargs="+", default=[24.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--local-steps", type=int, help="by default, each system's own")
    parser.add_argument("--systems", nargs="+", default=[*SYSTEMS], choices=SYSTEMS)
    parser.add_argument("--json", type=Path, help="file of the figures")
    options = parser.parse_args()
    kept: dict[str, Any] = {**about(options), "rows": []}
    for hours in options.hours:
        for system in options.systems:
            rows = [row(system, seed, hours, options) for seed in options.seeds]
            kept["rows"] += rows
            shares = [each["of what is present"] for each in rows]
            middle = statistics.median(shares)
            print(
                f"{hours:g} h, {system}: {middle:.3f} ({min(shares):.3f} to {max(shares):.3f})"
            )
            if options.json:
                write_json(options.json, rounded(kept))
    if not options.json:
        print(json.dumps(rounded(kept)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
