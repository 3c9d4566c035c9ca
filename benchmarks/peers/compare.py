"""edgegossip beside gossipy and Flower: samples per second, and workers per GiB.

    benchmarks/peers/set_up.sh FOLDER
    EDGEGOSSIP_DATA=data python -m benchmarks.peers.compare FOLDER [--json FILE]

All train the same layers on the same pictures of MNIST, in as many passes of as many workers,
with the same batch size and optimizer (`same_task.py`); nothing is evaluated. Each gets its
best settings: gossipy's threads and the peers' memory format are measured first. Each turn is a
process of its own, and all systems take turns; ratios are medians of those within a turn. What
it takes to start is not counted: imports (also PyTorch's at the first optimizer), data,
gossipy's nodes and their first epoch, Flower's first round, in which Ray starts its actors.

Workers per GiB: proportional set size of all processes of a system (shared pages count once),
at its peak, with many and with few workers; their difference over that of the workers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil
from benchmarks.kept import about, rounded
from benchmarks.peers.same_task import Job

from edgegossip.runs.files import write_json

SAMPLES = 32_768
ROUNDS = {"lenet5": 2, "mlp": 10}
"""Passes; more of the faster model, so that a turn takes a second and more."""
SPEEDS = [
    ("lenet5", 64, 32),
    ("lenet5", 256, 32),
    ("mlp", 64, 32),
    ("mlp", 256, 32),
    ("mlp", 256, 8),
]
FEW, MANY = 64, 512
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class System:
    """A system, and the settings of its jobs."""

    name: str
    script: str
    settings: Mapping[str, Any]
    rival: str = ""
    """The peer that it does the same as."""


SYSTEMS = [
    System("gossipy", "gossipy_peer", {}),
    System("ours, gossip", "ours", {"kind": "gosgd"}, "gossipy"),
    System("ours, gossip, unbatched", "ours", {"kind": "gosgd", "batched": "off"}, "gossipy"),
    System("Flower", "flower_peer", {}),
    System("ours, FedAvg", "ours", {"kind": "fedavg"}, "Flower"),
]


class Stage:
    """Where turns are run.

    Args:
        folder: With an environment for each peer.
    """

    def __init__(self, folder: Path) -> None:
        self._pythons = {
            "ours": sys.executable,
            "gossipy_peer": str(folder.absolute() / "gossipy/bin/python"),
            "flower_peer": str(folder.absolute() / "flower/bin/python"),
        }
        self._environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}

    def start(self, script: str, job: Job) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                self._pythons[script],
                "-m",
                f"benchmarks.peers.{script}",
                json.dumps(asdict(job)),
            ],
            env=self._environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self, process: subprocess.Popen[str]) -> dict[str, float]:
        out, err = process.communicate()
        if process.returncode:
            raise SystemExit(f"a turn failed:\n{out[-2000:]}\n{err[-2000:]}")
        found: dict[str, float] = json.loads(out.rstrip().rpartition("\n")[2])
        print(json.dumps(found), file=sys.stderr)
        return found

    def turn(self, script: str, job: Job) -> dict[str, float]:
        print(script, job, file=sys.stderr)
        return self.result(self.start(script, job))

    def peak(self, script: str, job: Job) -> int:
        """Most bytes that the processes of a turn held together."""
        print("memory of", script, job, file=sys.stderr)
        process = self.start(script, job)
        most = 0
        while process.poll() is None:
            most = max(most, proportional_set(process.pid))
            time.sleep(0.2)
        self.result(process)
        return most

    def version(self, script: str) -> str:
        listed = subprocess.check_output(
            [self._pythons[script], "-m", "pip", "list"], text=True
        )
        names = ("torch ", "numpy ", "gossipy", "flwr ", "ray ")
        return ", ".join(
            " ".join(line.split()) for line in listed.splitlines() if line.startswith(names)
        )


def proportional_set(pid: int) -> int:
    """Bytes of a process and of all below it; pages that several share are divided."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += each.memory_full_info().pss
    return total


# What is measured.


def best_settings(stage: Stage, repeats: int) -> dict[str, dict[str, Any]]:
    """Find the threads and memory format with which gossipy is fastest, for each model.

    Flower has one thread for each of its clients, as many at once as there are cores, and the
    format that is the best for gossipy's single thread.
    """
    best: dict[str, dict[str, Any]] = {}
    for model, formats in {"lenet5": (False, True), "mlp": (False,)}.items():
        job = Job(
            model=model,
            workers=64,
            samples=SAMPLES // 4,
            rounds=ROUNDS[model],
            batch_size=32,
        )
        runs: dict[tuple[int, bool], list[float]] = defaultdict(list)
        for _ in range(repeats):
            for threads, is_last in product((1, 2), formats):
                turn = replace(job, threads=threads, is_channels_last=is_last)
                found = stage.turn("gossipy_peer", turn)
                runs[threads, is_last].append(found["samples_per_second"])
        medians = {choice: statistics.median(each) for choice, each in runs.items()}
        threads, is_last = max(medians, key=lambda choice: medians[choice])
        single = max((medians[1, each], each) for each in formats)[1]
        best[f"gossipy_peer {model}"] = {"threads": threads, "is_channels_last": is_last}
        best[f"flower_peer {model}"] = {"threads": 1, "is_channels_last": single}
    return best


def job_of(system: System, model: str, best: Mapping[str, Any], **size: int) -> Job:
    settings: dict[str, Any] = {**system.settings, **best.get(f"{system.script} {model}", {})}
    return Job(model=model, samples=SAMPLES, rounds=ROUNDS[model], **{**size, **settings})


def speeds(stage: Stage, best: Mapping[str, Any], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for model, workers, batch_size in SPEEDS:
        systems = [each for each in SYSTEMS if model == "mlp" or "batched" not in each.settings]
        runs: dict[str, list[dict[str, float]]] = defaultdict(list)
        load = os.getloadavg()[0]
        for _ in range(repeats):
            for system in systems:
                job = job_of(system, model, best, workers=workers, batch_size=batch_size)
                runs[system.name].append(stage.turn(system.script, job))
        rows += [
            {
                "model": model,
                "workers": workers,
                "batch_size": batch_size,
                "load": load,
                **measured(system, runs),
            }
            for system in systems
        ]
    return rows


def measured(system: System, runs: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"system": system.name}
    for figure in ("samples_per_second", "samples_per_processor_second"):
        own = [run[figure] for run in runs[system.name]]
        row[figure] = statistics.median(own)
        row[f"{figure}_runs"] = own
        if system.rival:
            pairs = zip(own, (run[figure] for run in runs[system.rival]), strict=True)
            ratios = sorted(mine / theirs for mine, theirs in pairs)
            row[f"{figure}_ratio"] = statistics.median(ratios)
            row[f"{figure}_ratios"] = ratios
    row["loss"] = runs[system.name][-1]["loss"]
    return row


def memory(stage: Stage, best: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for model in ("lenet5", "mlp"):
        for system in SYSTEMS:
            if "batched" in system.settings:
                continue
            few, many = (
                stage.peak(system.script, job_of(system, model, best, workers=n, batch_size=32))
                for n in (FEW, MANY)
            )
            each = max(1.0, (many - few) / (MANY - FEW))
            rows.append(
                {
                    "model": model,
                    "system": system.name,
                    f"gib_{FEW}_workers": few / 2**30,
                    f"gib_{MANY}_workers": many / 2**30,
                    "kib_per_worker": each / 2**10,
                    "workers_per_gib": 2**30 / each,
                }
            )
    return rows


# What is told.


def tables(found: Mapping[str, Any]) -> str:
    lines = [
        "| model, workers, batch | system | samples/s | ratio | samples/CPU s | ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in found["speed"]:
        cells = [f"{row['model']}, {row['workers']}, {row['batch_size']}", row["system"]]
        for figure in ("samples_per_second", "samples_per_processor_second"):
            ratios = row.get(f"{figure}_ratios")
            cells.append(f"{row[figure]:,.0f}")
            cells.append(
                f"{row[f'{figure}_ratio']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                if ratios
                else ""
            )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| model | system | KiB a worker | workers per GiB |",
        "| --- | --- | ---: | ---: |",
    ]
    lines += [
        f"| {row['model']} | {row['system']} | {row['kib_per_worker']:,.0f} "
        f"| {row['workers_per_gib']:,.0f} |"
        for row in found["memory"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the peers' environments")
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    origin = about(options)
    stage = Stage(options.folder)
    before = os.getloadavg()[0]
    best = best_settings(stage, options.repeats)
    found = {
        "speed": speeds(stage, best, options.repeats),
        "memory": memory(stage, best),
    }
    print(tables(found))
    peers = {name: stage.version(name) for name in ("gossipy_peer", "flower_peer")}
    kept: dict[str, object] = {
        **origin,
        "load_before_and_after": [before, os.getloadavg()[0]],
        "versions": {**origin["versions"], **peers},
        "settings": {"samples": SAMPLES, "rounds": ROUNDS, "best": best},
        **found,
    }
    if options.json:
        write_json(options.json, rounded(kept))


if __name__ == "__main__":
    main()
