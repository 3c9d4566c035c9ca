"""Does a mesh lose anything when all its workers are restarted, one after another?

    sudo python -m benchmarks.rolling_restart [--algorithm gosgd] [--seeds 0 1 2] [--json FILE]

Four hosts of the lab, with 0.55 to 0.4 of a core and links of 2 Mbit/s, train a small MLP on
16,000 pictures of MNIST (from $EDGEGOSSIP_DATA), each with an `edgegossip worker`. As in a
rolling restart of a StatefulSet, the worker with the highest rank comes first. It gets SIGTERM,
ends, and is started again with its folder; the next one follows as soon as /readyz of this one
answers 200. The undisturbed run of the same seed is simulated, with speeds in the ratio of the
quotas, which do not matter for EpochGossip. For GoSGD it is in the lab, too: what arrives when
depends on the links.

Measured are exit codes, seconds until a worker is ready again, and the accuracy of the averaged
model on the test pictures, in percentage points relative to the undisturbed run. Exits with 1
if a code is wrong or a run loses more than half a point.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import about, rounded
from lab.lab import HostSpec, Lab, Process
from lab.machine import missing

import edgegossip as eg
from edgegossip.models import mlp
from edgegossip.real.gather import gather
from edgegossip.real.gathering import WORKERS
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.tasks import Settings, default_data_dir
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import write_json
from edgegossip.training.optimizer import Cosine

CORES = (0.55, 0.5, 0.45, 0.4)
NUM_WORKERS = len(CORES)
BANDWIDTH = 2e6 / 8
NUM_TRAIN = 16_000
NUM_EPOCHS = {"epoch-gossip": 36, "gosgd": 1080}
"""GoSGD waits for no link, so it needs more to be at work until the last restart."""
PROBLEM = Problem(
    name="rolling",
    dataset="mnist",
    model=partial(mlp, hidden=(32,)),
    num_train=NUM_TRAIN,
    settings=Settings(lr=0.02, batch_size=64),
    schedule=Cosine(),
)
STOPPED = 130
ALLOWED = 0.5
"""Percentage points."""
LIMIT = 240.0
"""A run that has not ended by then never will."""
PROBE = """
import sys, time, urllib.error, urllib.request
refusals = 0
while True:
    try:
        urllib.request.urlopen(sys.argv[1], timeout=5)
        break
    except urllib.error.HTTPError:
        refusals += 1
    except OSError:
        pass
    time.sleep(0.3)
print(refusals)
"""
"""Asks until the answer is 200, as a kubelet does; prints how often it was 503."""


def rolling(algorithm: str = "epoch-gossip", seed: int = 0) -> Experiment:
    """The run of a seed."""
    everyone = eg.complete(NUM_WORKERS)
    chosen: Any = eg.EpochGossip(topology=everyone, num_rounds=NUM_EPOCHS[algorithm])
    if algorithm == "gosgd":
        steps = NUM_EPOCHS[algorithm] * NUM_TRAIN // NUM_WORKERS // PROBLEM.settings.batch_size
        chosen = eg.GoSGD(
            topology=everyone, num_rounds=steps, exchange_probability=0.005, seed=seed
        )
    return Experiment(
        task=PROBLEM.task(default_data_dir()),
        algorithm=chosen,
        platforms=tuple(eg.Platform(throughput=3000 * each) for each in CORES),
        evaluation_interval=1e6,  # only at the end
        seed=seed,
    )


class Mesh:
    """The workers of a run in a lab."""

    def __init__(self, lab: Lab, algorithm: str, seed: int, out: Path) -> None:
        self._lab, self._out = lab, out
        self._arguments = [f"{__file__}:rolling", "--algorithm", algorithm, "--seed", str(seed)]
        self._workers: dict[int, Process] = {}

    def start(self, rank: int) -> None:
        endpoints = [f"tcp/{address}:7447" for address in self._lab.addresses]
        endpoint = endpoints.pop(rank)
        folder = self._out / WORKERS / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "edgegossip", "worker", *self._arguments]
        words += ["--rank", str(rank), "--out", str(folder), "--no-snapshots", "--insecure"]
        words += ["--listen", endpoint, "--connect", *endpoints, "--metrics", "9464"]
        with (folder / "log.txt").open("ab") as log:
            self._workers[rank] = self._lab.start(rank, words, output=log)

    def stop(self, rank: int) -> int:
        """Ask one to stop, as Kubernetes does; its exit code."""
        self._workers[rank].terminate()
        return self._workers[rank].wait(LIMIT)

    def until_ready(self, rank: int) -> int:
        """Wait until a worker is ready; how often it said before that it was not."""
        words = [sys.executable, "-S", "-c", PROBE, "http://127.0.0.1:9464/readyz"]
        probe = self._lab.start(rank, words, output=subprocess.PIPE)
        while probe.poll() is None:
            if self._workers[rank].poll() is not None:
                raise RuntimeError(f"worker {rank} has ended; see {self._out / WORKERS}")
            time.sleep(0.1)
        said, _ = probe.communicate()
        return int(said)

    def codes(self) -> list[int]:
        """Wait for the end of all; their exit codes."""
        return [self._workers[rank].wait(LIMIT) for rank in range(NUM_WORKERS)]


def trained(algorithm: str, seed: int, out: Path, *, restarting: bool) -> dict[str, Any]:
    """Run in the lab, and restart each worker once if asked to."""
    restarts = []
    began = time.monotonic()
    with Lab([HostSpec(cpu=each, bandwidth=BANDWIDTH) for each in CORES]) as lab:
        mesh = Mesh(lab, algorithm, seed, out)
        for rank in range(NUM_WORKERS):
            mesh.start(rank)
        for rank in range(NUM_WORKERS):
            mesh.until_ready(rank)
        for rank in reversed(range(NUM_WORKERS)) if restarting else ():
            asked = time.monotonic()
            code = mesh.stop(rank)
            stopped = time.monotonic()
            mesh.start(rank)
            refusals = mesh.until_ready(rank)
            ready = time.monotonic()
            times = {"stopping": stopped - asked, "until ready": ready - stopped}
            restarts.append({"rank": rank, "code": code, "not ready": refusals, **times})
        codes = mesh.codes()
    seconds = time.monotonic() - began
    results, _ = gather(rolling(algorithm, seed), out)
    assert isinstance(results, eg.Results)
    accuracy = results.final_accuracy
    return {"accuracy": accuracy, "seconds": seconds, "codes": codes, "restarts": restarts}


def pair(algorithm: str, seed: int, out: Path) -> dict[str, Any]:
    """The undisturbed run of a seed and the one with restarts."""
    if algorithm == "epoch-gossip":
        alone = eg.run(rolling(algorithm, seed), out=out / "undisturbed").final_accuracy
    else:
        undisturbed = trained(algorithm, seed, out / "undisturbed", restarting=False)
        alone = undisturbed["accuracy"]
    restarted = trained(algorithm, seed, out / "restarted", restarting=True)
    points = 100 * (restarted["accuracy"] - alone)
    return {"seed": seed, "undisturbed": alone, **restarted, "percentage_points": points}


def is_kept(row: dict[str, Any]) -> bool:
    stopped = all(each["code"] == STOPPED for each in row["restarts"])
    return stopped and not any(row["codes"]) and row["percentage_points"] >= -ALLOWED


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithm", choices=["epoch-gossip", "gosgd"], default="epoch-gossip"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(10)])
    parser.add_argument("--out", type=Path, help="kept there; by default, a folder that goes")
    parser.add_argument("--json", type=Path, help="file of the figures")
    options = parser.parse_args()
    if lacks := missing():
        print(f"a lab needs what is missing here: {', '.join(lacks)}")
        return 0
    torch.set_num_threads(1)
    num_epochs = NUM_EPOCHS[options.algorithm]
    found = {**about(options), "cores": CORES, "num_epochs": num_epochs, "rows": []}
    with tempfile.TemporaryDirectory() as place:
        out = (options.out or Path(place)).absolute()
        for seed in options.seeds:
            found["rows"].append(pair(options.algorithm, seed, out / str(seed)))
            print(json.dumps(rounded(found["rows"][-1])), flush=True)
            if options.json:
                write_json(options.json, rounded(found | {"load": os.getloadavg()[0]}))
    points = [each["percentage_points"] for each in found["rows"]]
    middle = statistics.median(points)
    print(f"points: median {middle:.2f}, {min(points):.2f} to {max(points):.2f}")
    return not all(map(is_kept, found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
