"""Workers' folders written by hand, read and measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from tests.small_runs import NUM_WORKERS, small_run

from edgegossip.experiments.gathering import WORKERS, Gathering, WorkerFolder
from edgegossip.experiments.snapshots import snapshot_path
from edgegossip.learning.task import Workload

EXPERIMENT = small_run("epoch-gossip", evaluation_interval=None)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run folder with folders of workers."""
    for rank in range(NUM_WORKERS):
        (tmp_path / WORKERS / str(rank) / "snapshots").mkdir(parents=True)
    return tmp_path


def write_lines(out: Path, rank: int, *lines: dict[str, Any]) -> None:
    with (out / WORKERS / str(rank) / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def trained(time: float, num_samples: int) -> dict[str, Any]:
    return {"type": "trained", "time": time, "num_samples": num_samples}


def sent(time: float, round: int, num_bytes: int) -> dict[str, Any]:
    return {"type": "sent", "time": time, "round": round, "num_bytes": num_bytes}


class Unread(list[dict[str, Any]]):
    """Lines that nobody may look at again."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        raise AssertionError("all lines are read again")


def test_moments_are_measured_without_another_look_at_all_lines(out: Path) -> None:
    params = Workload(EXPERIMENT.task, EXPERIMENT.data_ranks, EXPERIMENT.seed).initial_params
    for rank in range(NUM_WORKERS):
        write_lines(out, rank, trained(0.2, 8), sent(0.3, 0, 100), trained(0.7, 8))
        for index in range(3):  # at 0, 0.5 and 1 s
            path = snapshot_path(out / WORKERS / str(rank) / "snapshots", index)
            safetensors.torch.save_file({"params": params}, path)
    gathering = Gathering(EXPERIMENT, out)
    gathering.read()
    for worker in gathering.workers:
        worker.lines = Unread(worker.lines)
    while gathering.measure_next():
        pass
    assert [each.samples_processed for each in gathering.history] == [0, 32, 64]
    assert [each.bytes_sent for each in gathering.history] == [0, 400, 400]


def test_totals_grow_with_the_lines_that_come(out: Path) -> None:
    worker = WorkerFolder(out / WORKERS / "0", 0)
    write_lines(out, 0, trained(1.0, 5), sent(1.5, 4, 70))
    worker.read()
    assert (worker.samples.until(2.0), worker.num_rounds) == (5, 5)
    write_lines(out, 0, trained(2.0, 7))
    worker.read()
    assert [worker.samples.until(time) for time in (0.9, 1.0, 1.9, 2.0)] == [0, 5, 5, 12]


def test_what_a_worker_does_again_counts_again(out: Path) -> None:
    worker = WorkerFolder(out / WORKERS / "0", 0)
    again = {"type": "worker", "rank": 0}
    write_lines(out, 0, trained(1.0, 5), trained(3.0, 5), again, trained(2.0, 5))
    worker.read()
    assert worker.samples.until(2.5) == 5
    assert worker.samples.until(3.0) == 15


def test_a_line_that_is_not_whole_yet_is_read_later(out: Path) -> None:
    worker = WorkerFolder(out / WORKERS / "0", 0)
    text = json.dumps(trained(1.0, 5)) + "\n"
    path = out / WORKERS / "0" / "events.jsonl"
    path.write_text(text + text[:10])
    worker.read()
    assert worker.samples.until(1.0) == 5
    path.write_text(text + text)
    worker.read()
    assert worker.samples.until(1.0) == 10


def test_a_worker_that_never_was_there_has_done_nothing(tmp_path: Path) -> None:
    worker = WorkerFolder(tmp_path / "0", 0)
    worker.read()
    assert (worker.samples.until(1.0), worker.num_rounds, worker.throughput) == (0, 0, 0.0)
    assert worker.snapshots == []
