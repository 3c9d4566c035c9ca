"""Does a run with `Standby` survive the loss of its server, and how soon does it go on?

    python -m benchmarks.standby [--seeds 20] [--only asp bsp adsp] [--json]

A server and four workers train a small MLP on handwritten digits, as processes of this machine
that meet over zenoh on loopback (`edgegossip launch`). Each seed runs twice: undisturbed, and
with SIGKILL to the server at a random moment. Measured is, for each worker that is left, the
longest time between two pieces of training in the five seconds after its last message to the
lost server: it holds noticing, the election, taking up the newest model, and the answer to what
it had committed; all five processes share this machine. The accuracies are those of
the model that `launch` reports, on the test split (one sample is 0.28 percentage points).

Exits with 1 if a worker waits longer than 3 s, a run does not end well, or the accuracy with
losses is on average over the seeds 0.5 percentage points lower.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from benchmarks.kept import about

from edgegossip.algorithms.server.adsp import ADSP
from edgegossip.algorithms.server.methods import ASP, BSP
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.data.hold_out import hold_out
from edgegossip.data.readers import digits
from edgegossip.models import mlp
from edgegossip.real.gathering import WORKERS
from edgegossip.recipes.parameter_servers import ServerSettings
from edgegossip.recipes.tasks import make_task
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.platform import Platform

NUM_WORKERS = 4
SERVERS: dict[str, ParameterServer] = {
    "asp": ASP(num_workers=NUM_WORKERS, num_rounds=1000),
    "bsp": BSP(num_workers=NUM_WORKERS, num_rounds=600),
    "adsp": ADSP(num_workers=NUM_WORKERS, num_rounds=50, window=1.0, min_interval=0.1, rate=4),
}
ALGORITHMS = {name: Standby(inner=server) for name, server in SERVERS.items()}
ALLOWED: Seconds = 3.0
SOON: Seconds = 5.0
LIMIT: Seconds = 300.0
MAX_LOSS = 0.5
"""Percentage points."""


def standby(method: str = "asp", seed: int = 0) -> Experiment:
    """A server and four workers on handwritten digits.

    Args:
        method: Which of `ALGORITHMS`.
        seed: Of everything random.
    """
    settings = ServerSettings(batch_size=16, seed=seed)
    data = hold_out(digits(), settings.validation_share, seed=seed)
    task = make_task(data, partial(mlp, hidden=(64,)), settings, batch_size=16)
    platforms = (Platform(throughput=1000.0),) * (NUM_WORKERS + 1)
    return Experiment(task=task, algorithm=ALGORITHMS[method], platforms=platforms, seed=seed)


def one_run(method: str, seed: int, kills: bool) -> dict[str, Any]:
    """Run once; say how well, and how long workers waited for another server."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = ["launch", f"{__file__}:standby", "--method", method, "--seed", str(seed)]
        command = [sys.executable, "-m", "edgegossip", *words, "--out", str(out)]
        with (Path(folder) / "log.txt").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                if kills:
                    kill_server(process.pid, out, random.Random(seed).uniform(0.2, 4.0))
                code = process.wait(LIMIT)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60.0)
        if code != 0:
            return {"is_well": False, "said": (Path(folder) / "log.txt").read_text()[-500:]}
        summary = json.loads((out / "summary.json").read_text())
        ranks = range(1, NUM_WORKERS + 1)
        summaries = {
            rank: json.loads((out / WORKERS / str(rank) / "summary.json").read_text())
            for rank in ranks
        }
        ends = {each["rounds"] for each in summaries.values()}
        return {
            "is_well": ends == {SERVERS[method].num_rounds},
            "accuracy": summary["final_accuracy"],
            "served_at_the_end": [r for r, each in summaries.items() if each["is_evaluated"]],
            "waited": [waited(events(out, rank)) for rank in ranks] if kills else [],
        }


def kill_server(launcher: int, out: Path, after: Seconds) -> None:
    """Wait until all train, and `after` seconds more, and end rank 0."""
    while not all(has_trained(out, rank) for rank in range(1, NUM_WORKERS + 1)):
        time.sleep(0.05)
    time.sleep(after)
    for child in psutil.Process(launcher).children(recursive=True):
        words = child.cmdline()
        if "--rank" in words and words[words.index("--rank") + 1] == "0":
            child.kill()


def has_trained(out: Path, rank: Rank) -> bool:
    path = out / WORKERS / str(rank) / "events.jsonl"
    return path.exists() and b'"type":"trained"' in path.read_bytes()


def events(out: Path, rank: Rank) -> list[dict[str, Any]]:
    text = (out / WORKERS / str(rank) / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def waited(lines: Sequence[dict[str, Any]]) -> Seconds:
    """The longest seconds without training soon after the last message to rank 0."""
    last = max(e["time"] for e in lines if e["type"] == "sent" and 0 in e["receivers"])
    trained = [each for each in lines if each["type"] == "trained"]
    near = ((a, b) for a, b in pairwise(trained) if last - 1.0 < a["time"] < last + SOON)
    return max((b["start"] - a["time"] for a, b in near), default=0.0)


def measure(method: str, num_seeds: int) -> dict[str, Any]:
    """All seeds of a method, with and without a loss."""
    pairs = [
        [one_run(method, seed, kills) for kills in (False, True)] for seed in range(num_seeds)
    ]
    is_well = all(each["is_well"] for pair in pairs for each in pair)
    if not is_well:
        wrong = [each for pair in pairs for each in pair if not each["is_well"]]
        return {"method": method, "is_kept": False, "wrong": wrong}
    points = [100 * (lost["accuracy"] - alone["accuracy"]) for alone, lost in pairs]
    longest = [max(lost["waited"]) for _, lost in pairs]
    return {
        "method": method,
        "seeds": num_seeds,
        "waited_median": statistics.median(longest),
        "waited_longest": max(longest),
        "percentage_points": points,
        "mean_percentage_points": statistics.mean(points),
        "served_at_the_end": [lost["served_at_the_end"] for _, lost in pairs],
        "is_kept": max(longest) < ALLOWED and statistics.mean(points) >= -MAX_LOSS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=[*ALGORITHMS])
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    options = parser.parse_args()
    origin = about(options)
    found = [measure(method, options.seeds) for method in options.only]
    if options.json:
        print(json.dumps({**origin, "runs": found}))
    else:
        for each in found:
            print(*(f"{name}: {value}" for name, value in each.items()), sep="\n  ")
    return not all(each["is_kept"] for each in found)


if __name__ == "__main__":
    sys.exit(main())
