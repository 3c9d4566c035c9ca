"""Runs of a recipe on the hosts of a lab, and the same runs simulated."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from lab.calibrate import Calibration
from lab.lab import GOODPUT, HostSpec, Lab, Process
from lab.machine import share_out
from lab.pace import Pace

from edgegossip.cli.command import parse_recipe
from edgegossip.cli.commands import RunOptions
from edgegossip.real.gathering import WORKERS, Gathering
from edgegossip.runs.experiment import Comparison, Experiment
from edgegossip.runs.process import one_intra_op_thread
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform


@dataclass(frozen=True)
class Setting:
    """The settings that runs have in common.

    Attributes:
        arguments: Name of a recipe that is a comparison, and its options, on the command line.
        hosts: One for each rank.
        target: Accuracy to which the time is taken.
        out: Folder of everything.
        num_epochs: Slow ones that algorithms without an end of their own get; None if the
            recipe says how many seconds they get.
    """

    arguments: tuple[str, ...]
    hosts: tuple[HostSpec, ...]
    target: float
    out: Path
    num_epochs: int | None = None

    @cached_property
    def cores(self) -> list[int]:
        """The core of each host."""
        return [core or 0 for core in share_out([host.cpu for host in self.hosts])]

    @cached_property
    def experiments(self) -> Mapping[str, Experiment]:
        """The runs that the recipe compares."""
        chosen = parse_recipe("compare", RunOptions, self.arguments).call.make()
        assert isinstance(chosen, Comparison)
        return chosen.experiments


def calibrate(setting: Setting, algorithm: str, pace: Pace) -> Calibration:
    """Let all hosts train without the network."""
    go = setting.out / f"{algorithm}.go"
    go.unlink(missing_ok=True)
    module = [sys.executable, "-m", "lab.calibrate", *setting.arguments]
    with Lab(setting.hosts) as lab:
        children = []
        for rank in range(len(setting.hosts)):
            options = ["--rank", str(rank), "--only", algorithm, "--go", str(go)]
            children.append(lab.start(rank, [*module, *options], output=subprocess.PIPE))
        for child in children:
            _read_until(child, "ready")
        go.touch()
        began = time.time()
        found = [float(_read_until(child, None)) for child in children]
        paces = [pace.mean(core, began, time.time()) for core in setting.cores]
    go.unlink()
    return Calibration(found, paces)


def _read_until(child: Process, expected: str | None) -> str:
    """Read lines until the one expected, or the last."""
    assert child.stdout is not None
    said = ""
    for line in child.stdout:
        said = str(line.decode())
        if said.strip() == expected:
            return said
    child.stdout.close()
    if child.wait() or expected is not None:
        raise RuntimeError(f"a host failed; the last that it said: {said}")
    return said


def run_in_lab(
    setting: Setting, algorithm: str, max_seconds: float | None
) -> tuple[Results, int, float]:
    """Run an algorithm on the hosts, and gather what they leave.

    Returns:
        The results, the bytes that all hosts' network cards have sent, and the time of day when
        the run began.
    """
    out, num_bytes, began = work_in_lab(setting, algorithm, max_seconds)
    gathering = Gathering(setting.experiments[algorithm], out, setting.arguments[0])
    with one_intra_op_thread():
        return gathering.finish(), num_bytes, began


def work_in_lab(
    setting: Setting, algorithm: str, max_seconds: float | None
) -> tuple[Path, int, float]:
    """Run an algorithm on the hosts.

    Returns:
        The run folder, with what each worker left, and the others as `run_in_lab`.
    """
    out = setting.out / algorithm / "lab"
    module = [sys.executable, "-m", "edgegossip", "worker", *setting.arguments]
    limit = [] if max_seconds is None else ["--max-seconds", str(max_seconds)]
    with Lab(setting.hosts) as lab:
        endpoints = [f"tcp/{address}:7447" for address in lab.addresses]
        children = []
        for rank, endpoint in enumerate(endpoints):
            folder = out / WORKERS / str(rank)
            folder.mkdir(parents=True)
            others = endpoints[:rank] + endpoints[rank + 1 :]
            options = ["--only", algorithm, "--rank", str(rank), "--out", str(folder)]
            network = ["--insecure", "--listen", endpoint, "--connect", *others]
            command = [*module, *options, *network, "--meet-seconds", "300", *limit]
            with (folder / "log.txt").open("wb") as log:
                children.append(lab.start(rank, command, output=log))
        codes = [child.wait() for child in children]
        num_bytes = sum(lab.traffic(rank)[0] for rank in range(len(setting.hosts)))
    if any(codes):
        raise RuntimeError(f"workers ended with {codes}; see {out / WORKERS}/*/log.txt")
    first = out / WORKERS / "0"  # which writes its parameters when its run has ended
    seconds = json.loads((first / "summary.json").read_text())["seconds"]
    began = (first / "params.safetensors").stat().st_mtime - seconds
    return out, num_bytes, began


def run_simulated(
    setting: Setting,
    algorithm: str,
    platforms: Sequence[Platform],
    max_seconds: float | None,
) -> Results:
    """Simulate an algorithm on platforms as fast as the hosts were found to be."""
    experiment = replace(
        setting.experiments[algorithm],
        platforms=tuple(map(_connected, platforms, setting.hosts)),
        links=Links(),
        max_seconds=max_seconds,
        evaluation_interval=0.5,
    )
    return run(experiment, out=setting.out / algorithm / "simulated")


def _connected(platform: Platform, host: HostSpec) -> Platform:
    """A platform behind the cable of `host`."""
    bandwidth = math.inf if host.bandwidth is None else GOODPUT * host.bandwidth
    return replace(platform, uplink=bandwidth, downlink=bandwidth)


def time_limit(
    experiment: Experiment, num_epochs: int | None, throughputs: Sequence[float]
) -> float | None:
    """Seconds that an algorithm without an end of its own gets: what slow epochs take."""
    if experiment.max_seconds is None or num_epochs is None:
        return experiment.max_seconds
    shard = len(experiment.task.dataset.train) / len(throughputs)
    return round(num_epochs * shard / min(throughputs), 1)
