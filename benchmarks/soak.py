"""Does a run survive what machines do to it? Workers as processes, killed, paused, restarted.

    python benchmarks/soak.py [--minutes 10] [--json]     disturbed all the time
    python benchmarks/soak.py --kills [--seeds 3] [--json]
                                            two of eight killed, one of them restarted

The soak: at random moments a worker gets SIGKILL and is started again by the same command, or
two workers are paused with SIGSTOP, for longer than their silence is tolerated, and wake up
later: what a broken link does to all that they are connected to. Wanted: memory that does not
grow, models that agree in the end, no process left, and no line in a log that is not expected.

The kills: the same run with and without them, for each seed. Wanted: an accuracy within 0.5
percentage points, and that the others notice within 3 s that a worker is lost: nobody who is
left pauses for longer between two pieces of training.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from edgegossip.cli.recipe import pick
from edgegossip.core.metrics import consensus_distance
from edgegossip.experiments.gathering import WORKERS
from edgegossip.experiments.launch import free_ports
from edgegossip.experiments.registry import load_recipe
from edgegossip.experiments.snapshots import read_params
from edgegossip.learning.task import Workload

NUM_WORKERS = 8
LONGEST_PAUSE = 6.0
EXPECTED = (
    r"INFO ",
    r"WARNING nothing from worker \d+ for [\d.]+ s: going on",
    r"worker \d+: (finished|time limit|interrupted)",
    r"edgegossip: stopped; the same command goes on",
)
"""What a worker may say, after the time."""
_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")


# Workers.


@dataclass
class Crew:
    """All workers of a run, each a process.

    Args:
        out: Run folder.
        arguments: The recipe and its options.
        seconds: How long the run lasts.
    """

    out: Path
    arguments: Sequence[str]
    seconds: float
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._endpoints = [f"tcp/127.0.0.1:{port}" for port in free_ports(NUM_WORKERS)]

    def folder(self, rank: int) -> Path:
        return self.out / WORKERS / str(rank)

    def start(self, rank: int) -> None:
        """Start a worker, or start it again."""
        folder = self.folder(rank)
        folder.mkdir(parents=True, exist_ok=True)
        others = self._endpoints[:rank] + self._endpoints[rank + 1 :]
        options = ["--rank", str(rank), "--num-workers", str(NUM_WORKERS)]
        options += ["--max-seconds", str(self.seconds), "--checkpoint-seconds", "10"]
        options += ["--parent", str(os.getpid())]  # nothing is left if this is killed
        network = ["--listen", self._endpoints[rank], "--connect", *others]
        module = [sys.executable, "-m", "edgegossip.cli.main", "worker"]
        command = [*module, *self.arguments, *options, "--out", str(folder), *network]
        with (folder / "log.txt").open("ab") as log:
            self.processes[rank] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Linux shares processors between sessions: as if each had its own machine.
                start_new_session=True,
            )

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].wait()

    def is_running(self, rank: int) -> bool:
        return self.processes[rank].poll() is None

    def num_trained(self, rank: int) -> int:
        """How often a worker has trained."""
        path = self.folder(rank) / "events.jsonl"
        return path.read_bytes().count(b'{"type":"trained"') if path.exists() else 0

    def wait_until_begun(self) -> None:
        while not all(self.num_trained(rank) for rank in range(NUM_WORKERS)):
            self.complain_if_ended()
            time.sleep(0.1)

    def complain_if_ended(self) -> None:
        ended = [rank for rank in self.processes if not self.is_running(rank)]
        if ended:
            raise RuntimeError(f"workers {ended} ended too early; see {self.out}/*/*/log.txt")

    def join(self, seconds: float) -> list[int]:
        """Wait for all; returns the ranks of those that hang."""
        deadline = time.monotonic() + seconds
        hanging = []
        for rank, process in self.processes.items():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                hanging.append(rank)
        return hanging

    def log(self, rank: int) -> list[str]:
        return (self.folder(rank) / "log.txt").read_text(errors="replace").splitlines()

    def estimates(self) -> torch.Tensor:
        """[num_workers left, num_params] where the workers have ended."""
        folders = [self.folder(rank) for rank in range(NUM_WORKERS)]
        paths = [each / "params.safetensors" for each in folders]
        return torch.stack([read_params(path) for path in paths if path.exists()])


@contextmanager
def crew(arguments: Sequence[str], seconds: float) -> Iterator[Crew]:
    """A crew that has begun, of which nothing is left afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        workers = Crew(Path(folder), arguments, seconds)
        try:
            for rank in range(NUM_WORKERS):
                workers.start(rank)
            workers.wait_until_begun()
            yield workers
        finally:
            for process in workers.processes.values():
                process.kill()
                process.wait()


def unexplained(lines: Sequence[str]) -> list[str]:
    """The lines of a log that are not expected."""
    said = [_TIME.sub("", line) for line in lines]
    return [line for line in said if not any(re.match(each, line) for each in EXPECTED)]


# The soak.


class Disturber:
    """Kills, restarts and pauses workers at random; knows what is to be done when.

    Args:
        workers: Whom.
        seed: Of what happens.
    """

    def __init__(self, workers: Crew, seed: int) -> None:
        self._workers = workers
        self._random = random.Random(seed)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._away: set[int] = set()
        self.counts = {"kills": 0, "pauses": 0}

    def disturb(self, now: float) -> None:
        """Kill one worker or pause two; at least half of them are left alone."""
        there = [rank for rank in range(NUM_WORKERS) if rank not in self._away]
        if len(there) <= NUM_WORKERS // 2 + 2:
            return
        if self._random.random() < 0.6:
            self._kill(self._random.choice(there), now)
        else:
            self._pause(self._random.sample(there, 2), now)

    def _kill(self, rank: int, now: float) -> None:
        self.counts["kills"] += 1
        self._workers.kill(rank)

        def restart() -> None:
            self._workers.start(rank)
            self._away.discard(rank)

        self._away.add(rank)
        self._later.append((now + self._random.uniform(0, LONGEST_PAUSE), restart))

    def _pause(self, ranks: Sequence[int], now: float) -> None:
        self.counts["pauses"] += 1
        pids = [self._workers.processes[rank].pid for rank in ranks]
        for pid in pids:
            psutil.Process(pid).send_signal(signal.SIGSTOP)

        def wake() -> None:
            for pid in pids:
                psutil.Process(pid).send_signal(signal.SIGCONT)
            self._away.difference_update(ranks)

        self._away.update(ranks)
        self._later.append((now + self._random.uniform(1, LONGEST_PAUSE), wake))

    def catch_up(self, now: float) -> None:
        """Do what is due; with infinity, all that is left."""
        for due, action in [*self._later]:
            if due <= now:
                self._later.remove((due, action))
                action()


@dataclass
class Memory:
    """What workers hold, over time, each of their processes by itself."""

    megabytes: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def sample(self, workers: Crew, now: float) -> None:
        for process in workers.processes.values():
            if process.poll() is None:
                num_bytes = psutil.Process(process.pid).memory_info().rss
                self.megabytes.setdefault(process.pid, []).append((now, num_bytes / 1e6))

    def growth(self, warm_up: float = 30.0) -> list[float]:
        """MB per minute, of each process that was watched for a minute after warming up."""
        slopes = []
        for samples in self.megabytes.values():
            late = [(t, mb) for t, mb in samples if t >= samples[0][0] + warm_up]
            if late and late[-1][0] - late[0][0] >= 60:
                slopes.append(60 * statistics.linear_regression(*zip(*late, strict=True)).slope)
        return slopes


def soak(arguments: Sequence[str], minutes: float, seed: int) -> dict[str, Any]:
    """Disturb a run for so long, leave it alone for two minutes, and see what is left."""
    seconds, memory = 60 * minutes, Memory()
    with crew(arguments, seconds) as workers:
        started = time.monotonic()
        disturber, moments = Disturber(workers, seed), random.Random(seed)
        quiet_from, next_at = max(0.5 * seconds, seconds - 120), 5.0
        while (now := time.monotonic() - started) < quiet_from:
            disturber.catch_up(now)
            memory.sample(workers, now)
            if now >= next_at:
                disturber.disturb(now)
                next_at = now + moments.expovariate(1 / 6)
            time.sleep(0.5)
        disturber.catch_up(math.inf)
        hanging = workers.join(seconds + 60)
        logs = [line for rank in range(NUM_WORKERS) for line in workers.log(rank)]
        estimates = workers.estimates()
        trained = [workers.num_trained(rank) for rank in range(NUM_WORKERS)]
        pids = [*memory.megabytes, *(p.pid for p in workers.processes.values())]
    strange, growth = unexplained(logs), memory.growth()
    return {
        "minutes": minutes,
        **disturber.counts,
        "pieces_trained": trained,
        "workers_with_a_model": len(estimates),
        "relative_consensus_distance": relative_distance(estimates),
        "mb_per_minute_median": statistics.median(growth) if growth else None,
        "mb_per_minute_largest": max(growth, default=None),
        "largest_mb": max(mb for each in memory.megabytes.values() for _, mb in each),
        "hanging": hanging,
        "stray_processes": sum(psutil.pid_exists(pid) for pid in pids),
        "unexplained_lines": strange,
        "is_kept": not (hanging or strange) and len(estimates) == NUM_WORKERS,
    }


def relative_distance(estimates: torch.Tensor) -> float:
    """How far models are from their mean, of its length."""
    length = float(torch.linalg.vector_norm(estimates.mean(0)))
    return consensus_distance(estimates) / length


# The kills.


def one_run(arguments: Sequence[str], num_epochs: int, seed: int, kills: int) -> dict[str, Any]:
    """Run once; kill so many workers on the way, and restart the last of them."""
    moments = random.Random(seed)
    arguments = [*arguments, "--num-epochs", str(num_epochs), "--seed", str(seed)]
    with crew(arguments, seconds=3600) as workers:
        killed = moments.sample(range(NUM_WORKERS), kills)
        others = [rank for rank in range(NUM_WORKERS) if rank not in killed]
        when = sorted(moments.uniform(0.05, 0.5) * num_epochs for _ in killed)
        for rank, moment in zip(killed, when, strict=True):
            while workers.num_trained(others[0]) < moment:
                time.sleep(0.05)
            workers.kill(rank)
        for rank in killed[-1:]:
            time.sleep(moments.uniform(0, 3))
            workers.start(rank)
        hanging = workers.join(600)
        lines = [line for rank in range(NUM_WORKERS) for line in workers.log(rank)]
        return {
            "accuracy": accuracy(workers.estimates().mean(0), seed),
            "longest_pause": max(longest_pause(workers.folder(rank)) for rank in others),
            "hanging": hanging,
            "unexplained_lines": unexplained(lines),
        }


def accuracy(params: torch.Tensor, seed: int) -> float:
    """Of the recipe's model, on the test data."""
    experiment = pick("quickstart", load_recipe("quickstart")(), None)
    workload = Workload(experiment.task, experiment.data_ranks, seed)
    return float(workload.evaluate(params)[1])


def longest_pause(folder: Path) -> float:
    """Seconds between two pieces of training: what noticing a loss takes is part of it."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["type"] == "trained"]
    return float(max(after["start"] - before["time"] for before, after in pairwise(trained)))


def check_kills(arguments: Sequence[str], num_epochs: int, num_seeds: int) -> dict[str, Any]:
    """Runs with and without kills, seed by seed."""
    pairs = [
        [one_run(arguments, num_epochs, seed, kills) for kills in (0, 2)]
        for seed in range(num_seeds)
    ]
    points = [100 * (disturbed["accuracy"] - alone["accuracy"]) for alone, disturbed in pairs]
    pauses = [disturbed["longest_pause"] for _, disturbed in pairs]
    hanging = [rank for pair in pairs for each in pair for rank in each["hanging"]]
    strange = [line for pair in pairs for each in pair for line in each["unexplained_lines"]]
    return {
        "num_epochs": num_epochs,
        "accuracy": [[each["accuracy"] for each in pair] for pair in pairs],
        "percentage_points": points,
        "longest_pause_undisturbed": [alone["longest_pause"] for alone, _ in pairs],
        "longest_pause": pauses,
        "hanging": hanging,
        "unexplained_lines": strange,
        "is_kept": min(points) >= -0.5 and max(pauses) < 3 and not (hanging or strange),
    }


# For people and machines.


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default="epoch-gossip", help="the algorithm")
    parser.add_argument("--kills", action="store_true", help="two kills instead of a soak")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-epochs", type=int, default=200, help="of each run with kills")
    parser.add_argument("--seed", type=int, default=0, help="of what happens in a soak")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    recipe = ["quickstart", "--only", options.only]
    if options.kills:
        found = check_kills(recipe, options.num_epochs, options.seeds)
    else:
        found = soak([*recipe, "--num-epochs", "20000"], options.minutes, options.seed)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:30}{value}")
    return not found["is_kept"]


if __name__ == "__main__":
    sys.exit(main())
