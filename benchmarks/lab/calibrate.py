"""How many samples per second does this host train?

    python -m benchmarks.lab.calibrate RECIPE --rank R --only NAME --go FILE [recipe's options]

Says "ready", waits until FILE exists, so that all hosts begin together, and trains as a worker
of the algorithm does: GoSGD a step at a time, the others many. Prints the throughput.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from edgegossip.algorithms.gosgd import GoSGD
from edgegossip.cli.recipe import parse_recipe, pick
from edgegossip.core.protocol import Rank, Seconds, Steps
from edgegossip.experiments.experiment import Experiment
from edgegossip.experiments.runner import one_intra_op_thread
from edgegossip.learning.task import Workload


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
        rank: Of the worker.
        only: The algorithm.
        go: Begins when this file exists.
        seconds: How long to train.
    """

    rank: Rank
    only: str | None = None
    go: Path
    seconds: Seconds = 8.0


def throughput(experiment: Experiment, options: Options) -> float:
    """Samples per second of one worker."""
    workload = Workload(experiment.task, experiment.data_ranks, experiment.seed)
    trainer, params = workload.make_trainer(options.rank), workload.initial_params
    work = Steps(1 if isinstance(experiment.algorithm, GoSGD) else 20)
    params = trainer.train(params, work, {}).params  # the first is slower
    print("ready", flush=True)
    while not options.go.exists():
        time.sleep(0.01)
    num_samples, started = 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < options.seconds:
        result = trainer.train(params, work, {})
        params, num_samples = result.params, num_samples + result.num_samples
    return num_samples / seconds


def main() -> None:
    name, options, chosen = parse_recipe("worker", Options, sys.argv[1:])
    with one_intra_op_thread():
        print(throughput(pick(name, chosen, options.only), options))


if __name__ == "__main__":
    main()
