"""Processes that train over the loopback network: killed, stopped, resumed, out of space."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.small_runs import events, summary, tensors
from tests.tiers import thorough
from tests.unit.test_full_disk import fill_up

from edgegossip.cli.worker_command import EXIT_APART
from edgegossip.contract.errors import NetworkError, RunFolderError
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real import launch as launching
from edgegossip.real.launch import free_ports, launch
from edgegossip.real.worker import take_part
from edgegossip.recipes.call import pick
from edgegossip.recipes.registry import load_recipe
from edgegossip.runs.tracking import Silent

PROGRAM = (sys.executable, "-m", "edgegossip")
PATIENCE = 240.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts commands of the program, and leaves none of them behind."""
    started = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([*PROGRAM, *arguments], stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.communicate()


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def folder(out: Path, rank: int) -> Path:
    return out / "workers" / str(rank)


def rounds(out: Path, rank: int) -> int:
    """How often a worker has trained, as far as its log has it."""
    path = folder(out, rank) / "events.jsonl"
    return path.read_bytes().count(b'{"type":"trained"') if path.exists() else 0


def workers(launcher: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The processes of a launcher, by rank."""
    children = psutil.Process(launcher.pid).children()
    return {int(_option(each.cmdline(), "--rank")): each for each in children}


def _option(command: Sequence[str], name: str) -> str:
    return command[command.index(name) + 1]


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[k]) for k, x in one.items())


def simulated(tmp_path: Path, num_epochs: int) -> dict[str, torch.Tensor]:
    """The parameters that a run of two workers ends with in the simulator."""
    options = ["--num-workers", "2", "--num-epochs", str(num_epochs)]
    out = ["--out", str(tmp_path / "simulated")]
    command = [*PROGRAM, "run", "quickstart", *options, *out]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return tensors(tmp_path / "simulated")


@pytest.mark.slow
def test_n_says_how_many_stages_a_model_is_cut_into(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    options = ["-n", "2", "--only", "greedy", "--num-epochs", "1", "--out", str(out)]
    process = start("launch", "synthetic-gradients/quickstart", *options)
    assert process.wait(PATIENCE) == 0
    assert [each.name for each in sorted((out / "workers").glob("[0-9]*"))] == ["0", "1"]
    assert summary(out)["reason"] == "finished"


# As the simulator.


@pytest.mark.slow
def test_a_run_interrupted_by_ctrl_c_and_resumed_ends_where_the_simulator_does(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    arguments = ["launch", "quickstart", "-n", "2", "--num-epochs", "150", "--out", str(out)]
    first = start(*arguments)
    wait_until(lambda: min(rounds(out, 0), rounds(out, 1)) >= 5, first)
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=PATIENCE)[1]
    assert first.returncode == 130, said
    assert "--resume" in said
    assert "Traceback" not in said
    assert rounds(out, 0) < 150
    assert not (out / "summary.json").exists()
    measured = json.loads((out / "workers" / "evaluations.json").read_text())
    second = start(*arguments, "--resume")
    assert second.wait(PATIENCE) == 0
    history = [event for event in events(out) if event["type"] == "evaluated"]
    assert history[0]["time"] == 0
    for kept, event in zip(measured.values(), history, strict=False):
        assert kept.pop("ranks") == [0, 1]
        assert {"type": "evaluated", **kept} == event
    assert rounds(out, 0) == rounds(out, 1) == 150
    assert are_equal(tensors(out), simulated(tmp_path, 150))
    assert (out / "report.html").exists()
    assert summary(out)["reason"] == "finished"


@pytest.mark.slow
def test_who_has_not_finished_goes_on_at_once_without_those_who_have(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    arguments = ["launch", "quickstart", "-n", "3", "--num-epochs", "150", "--out", str(out)]
    first = start(*arguments)
    wait_until(lambda: min(rounds(out, rank) for rank in range(3)) >= 5, first)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=PATIENCE)
    path = folder(out, 0) / "summary.json"
    path.write_text(path.read_text().replace("interrupted", "finished"))
    log = (folder(out, 0) / "log.txt").read_bytes()
    second = start(*arguments, "--resume")
    said = second.communicate(timeout=PATIENCE)[1]
    # Worker 0 has kept its model of an early round, so not all have the same model.
    assert second.returncode == EXIT_APART, said
    assert "failed" not in said
    assert (folder(out, 0) / "log.txt").read_bytes() == log
    for rank in (1, 2):
        assert rounds(out, rank) == 150
        assert "beginning without" not in (folder(out, rank) / "log.txt").read_text()


@pytest.mark.slow
def test_neither_a_second_launch_nor_a_closed_terminal_nor_a_damaged_log_ends_a_run(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    arguments = ["launch", "quickstart", "-n", "2", "--num-epochs", "150", "--out", str(out)]
    first = start(*arguments)
    wait_until(lambda: min(rounds(out, 0), rounds(out, 1)) >= 3, first)
    experiment = pick("quickstart", load_recipe("quickstart")(), None)
    with pytest.raises(RunFolderError, match=f"{out} is in use by process {first.pid}; wait"):
        launch(experiment, lambda *arguments: ["--version"], out=out)
    second = f"{folder(out, 1)} is in use by process {workers(first)[1].pid}; wait"
    with pytest.raises(RunFolderError, match=second):
        take_part(experiment, 1, MemoryNetwork().transport(1), out=folder(out, 1))
    first.send_signal(signal.SIGHUP)
    assert first.wait(PATIENCE) == 130
    path = folder(out, 0) / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"\0\0\0\0\n", *lines[3:]]))
    resumed = start(*arguments, "--resume")
    said = resumed.communicate(timeout=PATIENCE)[1]
    assert resumed.returncode == 0, said
    assert f"{path}, line 4 is damaged and skipped" in said
    assert are_equal(tensors(out), simulated(tmp_path, 150))


# Killed.


@pytest.mark.slow
def test_a_killed_worker_ends_nothing_and_comes_back_by_the_same_command(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    options = ["--num-workers", "3", "--num-epochs", "20000", "--max-seconds", "3000"]
    launcher = start("launch", "quickstart", *options, "--out", str(out))
    wait_until(lambda: min(rounds(out, rank) for rank in range(3)) >= 3, launcher)
    processes = workers(launcher)
    again = processes[1].cmdline()[len(PROGRAM) :]
    for rank in (1, 2):
        processes[rank].kill()
    then = rounds(out, 0)
    wait_until(lambda: rounds(out, 0) >= then + 3, launcher)
    back = start(*again)
    wait_until(lambda: "recovered" in _kinds(folder(out, 1)), launcher)
    then = rounds(out, 0)
    wait_until(lambda: rounds(out, 0) >= then + 3, launcher)
    for process in (back, launcher):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
    gathered = start("gather", "quickstart", *options[:4], "--out", str(out))
    said = gathered.communicate(timeout=PATIENCE)[1]
    assert gathered.returncode == 0, said
    changes = [(e["type"], e["rank"]) for e in events(out) if e["type"] in CHANGES]
    assert [change for change in changes if change[1] == 1] == [
        ("crashed", 1),
        ("recovered", 1),
    ]
    assert [change for change in changes if change[1] != 1] == [("crashed", 2)]
    assert summary(out)["reason"] == "interrupted"
    assert (out / "report.html").exists()


STANDBY = """
from dataclasses import replace
from edgegossip import Experiment, Standby
from edgegossip.algorithms.server.methods import ASP
from edgegossip.recipes.call import pick
from edgegossip.recipes.registry import load_recipe

def standby() -> Experiment:
    run = pick("quickstart", load_recipe("quickstart")(), "gosgd")
    served = ASP(num_workers=len(run.platforms) - 1, num_rounds=1500)
    algorithm = Standby(inner=served)
    return replace(run, algorithm=algorithm)
"""


@pytest.mark.slow
def test_a_run_whose_server_is_killed_goes_on_with_another_one(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out, recipe = tmp_path / "out", tmp_path / "own.py"
    recipe.write_text(STANDBY)
    launcher = start("launch", f"{recipe}:standby", "--out", str(out))
    wait_until(lambda: min(rounds(out, rank) for rank in (1, 2, 3)) >= 20, launcher)
    workers(launcher)[0].kill()
    said = launcher.communicate(timeout=PATIENCE)[1]
    assert launcher.returncode == 1, said
    assert "was killed (signal 9); the others go on; start it again with: " in said
    ends = [json.loads((folder(out, r) / "summary.json").read_text()) for r in (1, 2, 3)]
    assert [end["rounds"] for end in ends] == [1500] * 3
    assert sum(end["is_evaluated"] for end in ends) == 1
    assert summary(out)["final_accuracy"] > 0.8


CHANGES = ("crashed", "recovered")


def _kinds(path: Path) -> set[str]:
    return set(re.findall(r'^{"type":"(\w+)"', (path / "events.jsonl").read_text(), re.M))


@pytest.mark.slow
def test_workers_whose_launcher_is_killed_stop_by_themselves(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    options = ["-n", "2", "--num-epochs", "20000", "--out", str(out)]
    launcher = start("launch", "quickstart", *options)
    wait_until(lambda: min(rounds(out, 0), rounds(out, 1)) >= 2, launcher)
    processes = list(workers(launcher).values())
    launcher.kill()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    assert [summary(folder(out, rank))["reason"] for rank in (0, 1)] == ["interrupted"] * 2
    assert (folder(out, 0) / "checkpoint.safetensors").exists()


# Out of space.


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_worker_whose_disk_becomes_full_keeps_its_model_and_the_others_do_not_notice(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    options = ["-n", "2", "--num-epochs", "30", "--checkpoint-seconds", "0.5"]
    with small_disk(folder(out, 1)):
        launcher = start("launch", "quickstart", *options, "--out", str(out))
        wait_until(lambda: min(rounds(out, 0), rounds(out, 1)) >= 2, launcher)
        fill_up(folder(out, 1) / "filler")
        said = launcher.communicate(timeout=PATIENCE)[1]
        assert launcher.returncode == 0, said
        log = (folder(out, 1) / "log.txt").read_text()
        assert summary(folder(out, 1))["rounds"] == 30
    assert "training continues" in log
    assert "Traceback" not in log
    assert summary(folder(out, 0))["rounds"] == 30
    torch.testing.assert_close(tensors(out), simulated(tmp_path, 30))


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """A file system of 2 MB at `path`."""
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_free_ports_are_different() -> None:
    assert len(set(free_ports(20))) == 20


def test_a_port_that_is_listened_at_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = free_ports(2)
    monkeypatch.setattr("edgegossip.real.launch._PORTS", [first, second])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first))
        assert free_ports(1) == [second]
        with pytest.raises(NetworkError, match=r"only 1 free ports of 2 from .*; stop other"):
            free_ports(2)


@thorough
def test_measuring_takes_little_time_from_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring, seconds = [], 0.02
    experiment = pick("quickstart", load_recipe("quickstart")(), None)

    class Measured:
        """One whose snapshots never end."""

        workers = ()

        def measure_next(self) -> bool:
            measuring.append(time.monotonic())
            time.sleep(seconds)
            return True

    class NoneLost:
        """Workers of which none is lost."""

        lost = failed = ()
        is_anyone_back = False

        def report(self) -> None:
            pass

    class Shown:
        """An overview of nobody."""

        def status(self, *arguments: object) -> None:
            pass

    class Working:
        """A worker that takes a while."""

        until = time.monotonic() + 1.0

        def poll(self) -> int | None:
            return None if time.monotonic() < self.until else 0

    monkeypatch.setattr(launching, "_LOOK", 0.01)
    monkeypatch.setattr(launching, "Overview", lambda *arguments: Shown())
    working: Any = {0: Working()}
    launching._watch(experiment, Measured(), working, Silent(), NoneLost())  # type: ignore[arg-type]
    gaps = [after - before for before, after in pairwise(measuring)]
    assert gaps
    assert min(gaps) > 19 * seconds
