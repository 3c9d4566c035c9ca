"""A run folder with the folders of workers, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
from tests.small_runs import NUM_WORKERS, small_run

from edgegossip.real.gathering import WORKERS
from edgegossip.real.worker_files import snapshot_path

EXPERIMENT = small_run("epoch-gossip", evaluation_interval=None)


def make_folders(out: Path) -> None:
    for rank in range(NUM_WORKERS):
        (out / WORKERS / str(rank) / "snapshots").mkdir(parents=True)


def write_lines(out: Path, rank: int, *lines: dict[str, Any]) -> None:
    with (out / WORKERS / str(rank) / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def trained(time: float, num_samples: int) -> dict[str, Any]:
    times = {"time": time, "start": time - 0.1}
    return {"type": "trained", **times, "num_samples": num_samples, "cost": num_samples}


def write_snapshots(out: Path, *snapshots: int) -> None:
    params = EXPERIMENT.workload().initial_params()
    for rank in range(NUM_WORKERS):
        for index in snapshots:
            path = snapshot_path(out / WORKERS / str(rank) / "snapshots", index)
            safetensors.torch.save_file({"params": params}, path)
