"""How much time does a robust rule take if nobody lies?

    python -m benchmarks.robust_time [--rules NNA SCC] [--turns 5] [--json]

Crews of 5 and 10 workers on the complete graph train MNIST (from $EDGEGOSSIP_DATA) with gossip
every 8 steps, in the simulator, with the plain mean and with each rule, which allows for 1 and
3 liars. Measured is the processor time of whole runs, which depends less on other work than
their duration. All take turns; the first turn is not counted, and ratios to the mean are
medians of the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.kept import about, rounded
from studies.problems import MNIST_LENET5, MNIST_MLP
from studies.robustness import GOSSIP, LOCAL_STEPS, Crew

import edgegossip as eg
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.tasks import default_data_dir
from edgegossip.runs.process import one_intra_op_thread
from edgegossip.runs.runner import run

EPOCHS = {"mnist-mlp": 4, "mnist-lenet5": 1}
CREWS = (Crew(5, 1), Crew(10, 3))


def processor_seconds(problem: Problem, crew: Crew, rule: str) -> float:
    """Processor time of a run without liars."""
    epochs = EPOCHS[problem.name]
    task = problem.task(default_data_dir())
    steps = epochs * len(task.dataset.train) / task.batch_size
    experiment = eg.Experiment(
        task=task,
        algorithm=GOSSIP[rule](crew, round(steps / crew.num_workers / LOCAL_STEPS)),
        platforms=(eg.Platform(throughput=problem.settings.throughput),) * crew.num_workers,
        links=eg.Links(default=eg.Link(latency=0.005, bandwidth=12.5e6)),
        evaluation_epochs=float(epochs),
        name=rule,
    )
    with tempfile.TemporaryDirectory() as folder, one_intra_op_thread():
        began = time.process_time()
        run(experiment, out=Path(folder) / "run", num_threads=0)
        return time.process_time() - began


def measure(problem: Problem, crew: Crew, rules: list[str], turns: int) -> dict[str, Any]:
    """Seconds of the mean, and each rule's over these."""
    names = ["mean", *rules]
    found = [
        {name: processor_seconds(problem, crew, name) for name in names}
        for _ in range(turns + 1)
    ][1:]
    ratios = {name: sorted(turn[name] / turn["mean"] for turn in found) for name in rules}
    return {
        "problem": problem.name,
        "crew": str(crew),
        "mean_seconds": statistics.median(turn["mean"] for turn in found),
        **{
            name: {"median": statistics.median(each), "least": each[0], "most": each[-1]}
            for name, each in ratios.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rules", nargs="+", default=["NNA", "SCC"], choices=[*GOSSIP])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    origin = about(options)
    rows = [
        measure(problem, crew, options.rules, options.turns)
        for problem in (MNIST_MLP, MNIST_LENET5)
        for crew in CREWS
    ]
    if options.json:
        print(json.dumps(rounded({**origin, "rows": rows}), indent=1))
        return
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
