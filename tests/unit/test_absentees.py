"""Workers of a launched run that are killed: told at once, counted, and started again."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.small_runs import events, summary

from edgegossip.real.gather import make_gathering
from edgegossip.real.gathering import Gathering
from edgegossip.real.launch import (
    LOG,
    LostWorkers,
    WorkerProcesses,
    has_finished,
    killed_by,
    worker_processes,
)
from edgegossip.recipes.call import pick
from edgegossip.recipes.registry import load_recipe
from edgegossip.runs.files import LOCK

SLEEP = ["-c", "import time; time.sleep(600)"]
PATIENCE = 240.0


@pytest.fixture
def gathering(tmp_path: Path) -> Gathering:
    experiment = pick("quickstart", load_recipe("quickstart")(), None)
    found = make_gathering(experiment, tmp_path, "quickstart", None)
    for worker in found.workers:
        worker.path.mkdir(parents=True)
        (worker.path / LOG).write_text("samples/s 12\n")
    return found


@pytest.fixture
def sleeping() -> Iterator[WorkerProcesses]:
    with worker_processes() as workers:
        for rank in range(4):
            workers.start(rank, [*SLEEP, "worker", "--rank", str(rank), "a b"], None)
        yield workers


def kill(workers: WorkerProcesses, *ranks: int, by: int = signal.SIGKILL) -> None:
    for rank in ranks:
        workers.processes[rank].send_signal(by)
        workers.processes[rank].wait()


def test_a_killed_worker_is_told_once_with_the_command_that_starts_it_again(
    gathering: Gathering, sleeping: WorkerProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    lost = LostWorkers(gathering, sleeping)
    lost.report()
    assert caplog.messages == []
    kill(sleeping, 2)
    lost.report()
    lost.report()
    assert caplog.messages == [
        "worker 2 was killed (signal 9); the others go on; start it again with: "
        "edgegossip worker --rank 2 'a b'"
    ]
    assert lost.lost == lost.failed == [2]
    assert "was killed (signal 9) and did not come back" in lost.how(2)
    assert killed_by(sleeping.processes[0]) is None


def test_a_worker_that_was_started_again_is_not_lost_and_is_waited_for(
    gathering: Gathering, sleeping: WorkerProcesses
) -> None:
    lost = LostWorkers(gathering, sleeping)
    kill(sleeping, 1, 2)
    folder = gathering.workers[2].path
    (folder / LOCK).write_text(f"{os.getpid()}\n")
    (gathering.workers[1].path / LOCK).write_text(f"{sleeping.processes[1].pid}\n")
    assert lost.is_anyone_back
    assert lost.lost == [1]
    (folder / LOCK).unlink()
    assert not lost.is_anyone_back
    assert lost.failed == [1, 2]
    end = '{"reason": "finished", "seconds": 1, "wall_seconds": 1, "mean_staleness": 0}'
    (folder / "summary.json").write_text(end)
    assert has_finished(folder)
    assert lost.failed == [1]


def test_workers_that_were_asked_to_stop_are_not_told(
    gathering: Gathering, sleeping: WorkerProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    sleeping.stop()
    for process in sleeping.processes.values():
        process.wait()
    LostWorkers(gathering, sleeping).report()
    assert caplog.messages == []


def test_a_worker_that_starts_while_all_are_asked_to_stop_stops() -> None:
    with worker_processes() as workers:
        workers.stop()
        workers.start(0, SLEEP, None)
        assert workers.processes[0].wait(timeout=PATIENCE) == -signal.SIGTERM


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def launched(out: Path, seconds: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A launch whose workers have begun to train."""
    words = ["launch", "quickstart", "--only", "gosgd", "-n", "3", "--num-epochs", "100000"]
    words += ["--max-seconds", str(seconds), "--out", str(out)]
    with log.open("wb") as file:
        command = [sys.executable, "-m", "edgegossip", *words]
        launcher = subprocess.Popen(command, stderr=file, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: all(_has_trained(out, rank) for rank in range(3)))
        yield launcher
    finally:
        launcher.kill()  # its workers then stop by themselves
        launcher.wait()


def _has_trained(out: Path, rank: int) -> bool:
    path = out / "workers" / str(rank) / "events.jsonl"
    return path.exists() and b'"trained"' in path.read_bytes()


def kill_worker(out: Path, rank: int) -> None:
    os.kill(int((out / "workers" / str(rank) / LOCK).read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_launch_tells_of_a_killed_worker_at_once_and_at_the_end(tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    told = "worker 2 was killed (signal 9); the others go on; start it again with: edgegossip "
    with launched(out, 6, log) as launcher:
        kill_worker(out, 2)
        wait_until(lambda: told in log.read_text())
        assert launcher.poll() is None
        assert launcher.wait(PATIENCE) == 1
    said = log.read_text()
    assert "alive 2 of 3" in said
    assert "worker 2 was killed (signal 9) and did not come back" in said
    assert [each["rank"] for each in events(out, "crashed")] == [2]
    assert "Worker 2 crashed at" in (out / "report.html").read_text()
    assert summary(out)["reason"] == "time limit"


@pytest.mark.slow
def test_the_told_command_starts_the_killed_worker_again(tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    # On a busy machine, a worker needs half a minute to start.
    with launched(out, 90, log) as launcher:
        kill_worker(out, 2)
        wait_until(lambda: "start it again with: " in log.read_text())
        [line] = [each for each in log.read_text().splitlines() if "start it again" in each]
        _, again = line.split("start it again with: edgegossip ")
        command = [sys.executable, "-m", "edgegossip", *shlex.split(again)]
        assert subprocess.run(command, check=False).returncode == 0
        assert launcher.wait(PATIENCE) == 0
    assert [each["rank"] for each in events(out, "recovered")] == [2]
