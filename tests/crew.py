"""All workers of a run as processes of this machine, to be killed, paused and cut off."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Protocol

import torch
from lab.lab import HostSpec, Lab

from edgegossip.cli.main import main
from edgegossip.contract.metrics import consensus_distance
from edgegossip.real.gathering import WORKERS
from edgegossip.real.launch import free_ports
from edgegossip.real.worker_files import read_params
from edgegossip.recipes.call import pick
from edgegossip.recipes.registry import load_recipe
from edgegossip.training.task import Workload

NUM_WORKERS = 8
RECIPE = "quickstart"
LEASE = 1.5
EXPECTED = (
    r"INFO ",
    r"WARNING nothing is encrypted",
    r"WARNING beginning without workers? [\d, ]+: absent",
    r"WARNING waiting for worker",
    r"WARNING link with worker \d+(, which was started again,)? is (lost|back)",
    # Between two processes of which one was killed or asleep.
    r"WARNING dropped input from worker \d+: (missing|a piece without those before it)",
    r"WARNING worker \d+: (nothing was heard|a message was lost) for [\d.]+ s: going on",
    # A session that ended while a neighbor connected to it; see net/dead_links.py.
    r"WARNING the link with worker \d+ is dead; all links are reopened",
    r"worker \d+: (finished|time limit|interrupted)",
    r"edgegossip: stopped; the same command goes on",
)
"""What a worker may say, after the time."""
_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")

# Processes of their own, with all that is real about them; only the seconds that each would
# take to import PyTorch are spent once, in the server that they are forked from. The first
# optimizer of a process imports torch._dynamo.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__, "edgegossip.cli.worker_command", "torch._dynamo"])


class Process(Protocol):
    """The part of a worker's process that a crew needs; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    def wait(self) -> object: ...
    def poll(self) -> int | None: ...


class Forked(ForkServerProcess):
    """A command of the program that does not import everything anew.

    Args:
        command: With its arguments.
        log: Takes what it prints.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        super().__init__()
        self._command = list(command)
        self._log = log

    def run(self) -> None:
        # Linux shares processors between sessions: as if each had its own machine.
        os.setsid()
        with self._log.open("ab") as log:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log.fileno(), stream.fileno())
        sys.exit(main(self._command))

    @property
    def pid(self) -> int:
        assert self.ident is not None, "it has not been started"
        return self.ident

    def wait(self) -> None:
        self.join()

    def poll(self) -> int | None:
        return self.exitcode


class Crew:
    """All workers of a run, each a process.

    Args:
        out: Run folder.
        arguments: The recipe and its options.
        seconds: How long the run lasts.
    """

    def __init__(self, out: Path, arguments: Sequence[str], seconds: float) -> None:
        self.processes: dict[int, Process] = {}
        self._out = out
        self._arguments = [*arguments, "--num-workers", str(NUM_WORKERS)]
        self._arguments += ["--max-seconds", str(seconds), "--checkpoint-seconds", "10"]
        # Short, so that pauses of some seconds break links.
        self._arguments += ["--lease", str(LEASE)]
        # Nothing is left if this is killed.
        self._arguments += ["--parent", str(os.getpid())]
        self._endpoints = self._make_endpoints()

    def _make_endpoints(self) -> list[str]:
        return [f"tcp/127.0.0.1:{port}" for port in free_ports(NUM_WORKERS)]

    def _start(self, rank: int, command: Sequence[str], log: Path) -> Process:
        process = Forked(command, log)
        process.start()
        return process

    def folder(self, rank: int) -> Path:
        return self._out / WORKERS / str(rank)

    def start(self, rank: int) -> None:
        """Start a worker, or start it again."""
        folder = self.folder(rank)
        folder.mkdir(parents=True, exist_ok=True)
        others = self._endpoints[:rank] + self._endpoints[rank + 1 :]
        whose = ["--rank", str(rank), "--out", str(folder)]
        network = ["--listen", self._endpoints[rank], "--connect", *others]
        command = ["worker", *self._arguments, *whose, *network]
        self.processes[rank] = self._start(rank, command, folder / "log.txt")

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].wait()

    def is_running(self, rank: int) -> bool:
        return self.processes[rank].poll() is None

    def num_trained(self, rank: int) -> int:
        """How often a worker has trained, as far as its log has it."""
        path = self.folder(rank) / "events.jsonl"
        return path.read_bytes().count(b'{"type":"trained"') if path.exists() else 0

    def wait_until_begun(self) -> None:
        while not all(self.num_trained(rank) for rank in range(NUM_WORKERS)):
            ended = [rank for rank in self.processes if not self.is_running(rank)]
            if ended:
                logs = {rank: self.log(rank)[-1:] for rank in ended}
                raise RuntimeError(f"workers ended too early, and said last: {logs}")
            time.sleep(0.1)

    def join(self, seconds: float) -> list[int]:
        """Wait for all; returns the ranks of those that hang."""
        deadline = time.monotonic() + seconds
        while any(map(self.is_running, self.processes)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [rank for rank in self.processes if self.is_running(rank)]

    def log(self, rank: int) -> list[str]:
        return (self.folder(rank) / "log.txt").read_text(errors="replace").splitlines()

    @property
    def unexplained(self) -> list[str]:
        """The lines in the workers' logs that are not expected."""
        said = [_TIME.sub("", line) for rank in self.processes for line in self.log(rank)]
        return [line for line in said if not any(re.match(each, line) for each in EXPECTED)]

    def events(self, rank: int, kind: str) -> list[dict[str, Any]]:
        """Entries of one kind in a worker's log."""
        text = (self.folder(rank) / "events.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if line["type"] == kind]

    @property
    def estimates(self) -> torch.Tensor:
        """[num_workers left, num_params] where the workers have ended."""
        paths = [self.folder(rank) / "params.safetensors" for rank in self.processes]
        return torch.stack([read_params(path) for path in paths if path.exists()])


class LabCrew(Crew):
    """Each worker on a host of a lab."""

    def __init__(
        self, out: Path, arguments: Sequence[str], seconds: float, *, lab: Lab
    ) -> None:
        self._lab = lab
        super().__init__(out, [*arguments, "--insecure"], seconds)

    def _make_endpoints(self) -> list[str]:
        return [f"tcp/{address}:7447" for address in self._lab.addresses]

    def _start(self, rank: int, command: Sequence[str], log: Path) -> Process:
        module = [sys.executable, "-m", "edgegossip"]
        with log.open("ab") as output:
            return self._lab.start(rank, [*module, *command], output=output)


@contextmanager
def crew(arguments: Sequence[str], seconds: float, lab: Lab | None = None) -> Iterator[Crew]:
    """A crew that has begun, of which nothing is left afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if lab is None:
            workers = Crew(out, arguments, seconds)
        else:
            workers = LabCrew(out, arguments, seconds, lab=lab)
        try:
            for rank in range(NUM_WORKERS):
                workers.start(rank)
            workers.wait_until_begun()
            yield workers
        finally:
            for rank in workers.processes:
                workers.kill(rank)


def make_lab() -> Lab:
    """A lab with a host for each worker, as fast as this machine lets them be."""
    return Lab([HostSpec()] * NUM_WORKERS)


def relative_distance(estimates: torch.Tensor) -> float:
    """How far models are from their mean, of its length."""
    length = float(torch.linalg.vector_norm(estimates.mean(0)))
    return consensus_distance(estimates) / length


def accuracy(params: torch.Tensor, seed: int) -> float:
    """Measure the recipe's model on the test data."""
    experiment = pick(RECIPE, load_recipe(RECIPE)(), None)
    workload = Workload(experiment.task, experiment.data_ranks, seed)
    return workload.evaluate(params)[1]["accuracy"]
