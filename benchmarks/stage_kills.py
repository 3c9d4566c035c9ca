"""Does a model in stages survive the loss of a machine, and how well does it learn?

    python -m benchmarks.stage_kills [--seeds 20] [--only greedy pipelined] [--json]

Three processes of this machine hold a stage each of a small MLP, and meet over zenoh on
loopback, with certificates. They do what `edgegossip worker` does, with four checkpoints a
second, and train on MNIST (from $EDGEGOSSIP_DATA), its pictures at half of their side. Each
seed runs twice: undisturbed, and with SIGKILL to one stage, each in its turn, at a random
moment: when the first stage's log, written once a second, says that it has trained on a random
share of its batches. The killed stage is started again at once, with the same folder; under
`--forgets` with an empty one, so without a checkpoint.

Measured are the accuracy of the joined model on the test pictures, how long it took from the
kill until the killed stage trained again, and the longest time since then between two pieces of
training of any stage. Processes are forked, so starting Python and importing PyTorch take no
time.

Exits with 1 if a run does not end, or its accuracy is not within a point of the undisturbed
one's.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import about
from torch import nn
from torch.nn.functional import avg_pool2d

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.data.dataset import ArraySplit, Dataset, Split
from edgegossip.data.readers import mnist
from edgegossip.models import mlp
from edgegossip.net.address import Address
from edgegossip.net.identity.certificates import issue, make_authority
from edgegossip.real.gather import gather
from edgegossip.real.gathering import WORKERS
from edgegossip.real.join import Connection, join
from edgegossip.real.launch import free_ports
from edgegossip.real.worker import WorkerSettings
from edgegossip.recipes.staged_training import StageSettings, stage_run
from edgegossip.recipes.tasks import default_data_dir
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.results import Results
from edgegossip.training.optimizer import Cosine

NUM_STAGES = 3
NUM_SAMPLES = 60_000
SIDE = 14
HIDDEN = (64, 32)
NUM_ROUNDS = 20
SETTINGS = StageSettings(num_epochs=1, num_stages=NUM_STAGES, lr=0.02, bandwidth=1e9)
METHODS = ("greedy", "local-losses", "synthetic-gradients", "pipelined")
CHECKPOINT: Seconds = 0.25
LIMIT: Seconds = 240.0
"""A run that has not ended by then never will."""
ALLOWED = 1.0
"""Percentage points."""
PROCESSES = multiprocessing.get_context("fork")  # importing PyTorch again would take longest


@dataclass(frozen=True)
class Setting:
    """The values that all processes of a run know."""

    experiment: Experiment
    out: Path
    certificates: Path
    endpoints: tuple[str, ...]
    checkpoint_seconds: Seconds


def work(setting: Setting, rank: Rank) -> None:
    """Be a worker, in a process of its own."""
    log = os.open(setting.out / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    endpoint = setting.endpoints[rank]
    others = tuple(each for each in setting.endpoints if each != endpoint)
    join(
        setting.experiment,
        rank,
        out=folder(setting.out, rank),
        connection=Connection(
            address=Address(listen=(endpoint,), connect=others), tls=setting.certificates
        ),
        settings=WorkerSettings(
            checkpoint_seconds=setting.checkpoint_seconds, snapshots=False, meet_seconds=20.0
        ),
    )


def folder(out: Path, rank: Rank) -> Path:
    return out / WORKERS / str(rank)


def certificates(folder: Path, num_workers: int) -> None:
    make_authority(folder)
    issue(folder, [*range(num_workers)])


class Run:
    """The processes of a run, and what is done to them."""

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        certificates: Path,
        checkpoint_seconds: Seconds = CHECKPOINT,
    ) -> None:
        ports = free_ports(experiment.num_workers)
        endpoints = tuple(f"tls/127.0.0.1:{port}" for port in ports)
        self.setting = Setting(experiment, out, certificates, endpoints, checkpoint_seconds)
        self.ranks = range(experiment.num_workers)
        self.processes: dict[Rank, Any] = {}
        out.mkdir()

    def start(self, rank: Rank) -> None:
        process = PROCESSES.Process(target=work, args=(self.setting, rank), daemon=True)
        process.start()
        self.processes[rank] = process

    def kill(self, rank: Rank) -> None:
        self.processes[rank].kill()
        self.processes[rank].join()

    def events(self, rank: Rank) -> list[dict[str, Any]]:
        path = folder(self.setting.out, rank) / "events.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def num_trained(self, rank: Rank) -> int:
        """Batches that it has trained on, as far as it has said."""
        path = folder(self.setting.out, rank) / "events.jsonl"
        return path.read_bytes().count(b'"type":"trained"') if path.exists() else 0

    def wait(self, limit: Seconds = LIMIT) -> bool:
        """Wait until all have ended, and say whether they have."""
        deadline = time.monotonic() + limit
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        return all(process.exitcode == 0 for process in self.processes.values())

    def stop(self) -> None:
        for rank in self.processes:
            self.kill(rank)

    def said(self) -> str:
        files = (self.setting.out / f"{rank}.txt" for rank in self.ranks)
        return "\n".join(each.read_text()[-1000:] for each in files)


def one_run(
    experiment: Experiment,
    certificates: Path,
    killed: Rank | None = None,
    share: float = 0.0,
    forgets: bool = False,
) -> dict[str, Any]:
    """Run once, and say how it ended."""
    with tempfile.TemporaryDirectory() as place:
        run = Run(experiment, Path(place) / "run", certificates)
        try:
            for rank in run.ranks:
                run.start(rank)
            while not all(run.num_trained(rank) for rank in run.ranks):
                time.sleep(0.02)
            began = time.monotonic()
            killed_at = 0.0
            if killed is not None:
                num_batches = share * SETTINGS.num_epochs * NUM_SAMPLES / SETTINGS.batch_size
                while run.num_trained(0) < num_batches:
                    time.sleep(0.02)
                killed_at = kill_and_start(run, killed, forgets)
            is_well = run.wait()
            seconds = time.monotonic() - began
        finally:
            run.stop()
        if not is_well:
            return {"is_well": False, "killed": killed, "said": run.said()}
        results, _ = gather(experiment, run.setting.out)
        assert isinstance(results, Results)
        found = {"is_well": True, "accuracy": results.final_accuracy, "seconds": seconds}
        if killed is None:
            return found
        return found | {"killed": killed, "share": share, **pauses(run, killed, killed_at)}


def kill_and_start(run: Run, rank: Rank, forgets: bool) -> Seconds:
    """Kill a stage and start it again; say when in the run that was."""
    run.kill(rank)
    killed_at = max(each["time"] for r in run.ranks for each in run.events(r) if "time" in each)
    if forgets:
        shutil.rmtree(folder(run.setting.out, rank))
    run.start(rank)
    return float(killed_at)


def pauses(run: Run, killed: Rank, killed_at: Seconds) -> dict[str, Any]:
    """How long stages did not train since one was killed."""
    longest: dict[Rank, Seconds] = {}
    back = None
    for rank in run.ranks:
        trained = [each for each in run.events(rank) if each["type"] == "trained"]
        later = [each for each in trained if each["time"] > killed_at]
        if rank == killed:
            back = later[0]["start"] - killed_at if later else None
        near = [each for each in trained if each["time"] > killed_at - 1.0]
        gaps = (b["start"] - a["time"] for a, b in pairwise(near))
        longest[rank] = max(gaps, default=0.0)
    return {"away": back, "longest_pauses": [longest[rank] for rank in run.ranks]}


def model(width: float, **shapes: Any) -> nn.Module:  # noqa: ANN401
    return mlp(hidden=HIDDEN, **shapes)


def dataset() -> Dataset:
    data = mnist(default_data_dir())
    return replace(
        data,
        train=_small(data.train, NUM_SAMPLES),
        test=_small(data.test, len(data.test)),
        input_shape=(1, SIDE, SIDE),
    )


def _small(split: Split, num_samples: int) -> Split:
    """The first samples, at half of their side."""
    x, y = split.batch(torch.arange(num_samples))
    return ArraySplit(avg_pool2d(x.float(), 2).round().to(torch.uint8), y)


def staged(method: str, data: Dataset, seed: int) -> Experiment:
    """A run whose learning rate falls to nothing, so that runs differ by little besides."""
    made = stage_run(method, data, model, replace(SETTINGS, seed=seed))
    steps = SETTINGS.num_epochs * NUM_SAMPLES // SETTINGS.batch_size
    alone = Alone(num_rounds=NUM_ROUNDS, local_steps=steps // NUM_ROUNDS)
    assert isinstance(made.algorithm, Stages)
    return replace(
        made,
        algorithm=replace(made.algorithm, inner=alone),
        task=replace(made.task, schedule=Cosine()),
    )


def measure(method: str, seeds: Sequence[int], forgets: bool, keys: Path) -> dict[str, Any]:
    """All seeds of a method, with and without a loss."""
    data, rows = dataset(), list[dict[str, Any]]()
    for seed in seeds:
        experiment = staged(method, data, seed)
        alone = one_run(experiment, keys)
        row: dict[str, Any] = {"seed": seed, "undisturbed": alone}
        if alone["is_well"]:
            share = random.Random(seed).uniform(0.05, 0.8)
            lost = one_run(experiment, keys, seed % NUM_STAGES, share, forgets)
            row["killed"] = lost
            if lost["is_well"]:
                row["percentage_points"] = 100 * (lost["accuracy"] - alone["accuracy"])
        row["is_kept"] = abs(row.get("percentage_points", math.inf)) <= ALLOWED
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    kept = [row for row in rows if "percentage_points" in row]
    points = [row["percentage_points"] for row in kept]
    return {
        "method": method,
        "forgets": forgets,
        "num_ended": len(kept),
        "lowest_points": min(points, default=None),
        "highest_points": max(points, default=None),
        "mean_points": sum(points) / len(points) if points else None,
        "longest_away": max((row["killed"]["away"] or 0.0 for row in kept), default=None),
        "longest_pause": max(
            (max(row["killed"]["longest_pauses"]) for row in kept), default=None
        ),
        "is_kept": all(row["is_kept"] for row in rows),
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=["greedy"])
    parser.add_argument("--forgets", action="store_true", help="the folder is lost, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    options = parser.parse_args()
    origin = about(options)
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as keys:
        certificates(Path(keys), NUM_STAGES)
        found = [
            measure(method, range(options.seeds), options.forgets, Path(keys))
            for method in options.only
        ]
    if options.json:
        kept = {
            **origin,
            "seeds": [*range(options.seeds)],
            "settings": {
                "num_stages": NUM_STAGES,
                "num_samples": NUM_SAMPLES,
                "num_epochs": SETTINGS.num_epochs,
                "num_rounds": NUM_ROUNDS,
                "schedule": "cosine",
                "hidden": HIDDEN,
                "lr": SETTINGS.lr,
                "batch_size": SETTINGS.batch_size,
                "checkpoint_seconds": CHECKPOINT,
                "allowed_points": ALLOWED,
            },
            "runs": found,
        }
        print(json.dumps(kept, indent=1))
    else:
        for each in found:
            print(*(f"{k}: {v}" for k, v in each.items() if k != "rows"), sep="\n  ")
    return not all(each["is_kept"] for each in found)


if __name__ == "__main__":
    sys.exit(main())
