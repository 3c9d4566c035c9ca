"""Executors as processes: started by a worker or by torchrun, killed, refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from tests.complaints import complaint
from tests.small_runs import small_run, tensors
from tests.stage_runs import KINDS, run_of_kind
from tests.unit.test_launch import (
    PATIENCE,
    PROGRAM,
    folder,
    rounds,
    start as start,  # a fixture
    wait_until,
    workers,
)

from edgegossip.algorithms.server.methods import BSP
from edgegossip.cli.main import main
from edgegossip.contract.errors import UsageError
from edgegossip.real.executors import (
    ExecutorProcesses,
    Started,
    follow,
    leading,
    on_device,
    require_sharing,
)
from edgegossip.real.launch import LOG, free_ports
from edgegossip.runs.experiment import Experiment
from edgegossip.training.learner import Learner

Start = Callable[..., subprocess.Popen[str]]


def executors(worker: psutil.Process) -> list[psutil.Process]:
    return [each for each in worker.children() if "--executors" in each.cmdline()]


def said(out: Path, rank: int) -> str:
    return (folder(out, rank) / LOG).read_text()


@pytest.mark.slow
def test_a_worker_ends_where_one_executor_would(tmp_path: Path, start: Start) -> None:
    options = ["--num-epochs", "5", "--num-workers", "2", "--only", "epoch-gossip"]
    out = tmp_path / "real"
    process = start("launch", "quickstart", *options, "--executors", "2", "--out", str(out))
    assert process.wait(PATIENCE) == 0, process.communicate()[1]
    assert "worker 0 has 2 executors" in said(out, 0)
    simulated = ["run", "quickstart", *options, "--out", str(tmp_path / "simulated")]
    subprocess.run([*PROGRAM, *simulated], check=True, stderr=subprocess.DEVNULL)
    for name, expected in tensors(tmp_path / "simulated").items():
        torch.testing.assert_close(tensors(out)[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_killed_executor_ends_nothing(tmp_path: Path, start: Start) -> None:
    out = tmp_path / "out"
    options = ["-n", "2", "--num-epochs", "60", "--only", "epoch-gossip", "--out", str(out)]
    process = start("launch", "quickstart", *options, "--executors", "2")
    wait_until(lambda: min(rounds(out, 0), rounds(out, 1)) >= 3, process)
    [killed] = executors(workers(process)[0])
    [other] = executors(workers(process)[1])
    killed.kill()
    assert process.wait(PATIENCE) == 0, process.communicate()[1]
    assert "executor 1 is lost: its process has ended" in said(out, 0)
    assert "lost: " not in said(out, 1)
    assert rounds(out, 0) == rounds(out, 1) == 60
    assert not other.is_running()


@pytest.mark.slow
def test_executors_end_with_their_worker(tmp_path: Path, start: Start) -> None:
    out = tmp_path / "out"
    options = ["-n", "2", "--num-epochs", "100000", "--out", str(out)]
    process = start("launch", "quickstart", *options, "--executors", "2")
    wait_until(lambda: min(rounds(out, 0), rounds(out, 1)) >= 3, process)
    first, second = workers(process)[0], workers(process)[1]
    [orphan], [other] = executors(first), executors(second)
    first.kill()  # says nothing to its executor
    orphan.wait(30.0)
    process.terminate()
    assert process.wait(PATIENCE) == 130
    assert not other.is_running()


@pytest.mark.slow
def test_torchrun_starts_the_executors(tmp_path: Path) -> None:
    [port] = free_ports(1)
    common = ["-m", "edgegossip", "worker", "quickstart", "--num-workers", "2"]
    common += ["--num-epochs", "3", "--only", "epoch-gossip", "--meet-seconds", "200"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*common, "--rank", "0", "--out", str(tmp_path / "0")]
    with subprocess.Popen(
        [sys.executable, *torchrun, *command, "--listen", f"tcp/127.0.0.1:{port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as first:
        command = [*common, "--rank", "1", "--out", str(tmp_path / "1")]
        second = [sys.executable, *command, "--connect", f"tcp/127.0.0.1:{port}"]
        subprocess.run(second, check=True, timeout=PATIENCE, capture_output=True)
        output, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == 0, output
    assert output.count("worker 0: finished") == 1
    assert "worker 0 has 2 executors" in output
    assert not (tmp_path / "1" / "checkpoint.safetensors").exists()


# The environment.


def torchrun(monkeypatch: pytest.MonkeyPatch, run_id: str = "none", **changes: str) -> None:
    """Set what torchrun sets in the second of three processes on this machine."""
    values = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": run_id}
    for name, value in {**values, **changes}.items():
        monkeypatch.setenv(name, value)


def test_only_torchrun_and_workers_make_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Started.found() is None
    torchrun(monkeypatch)
    assert Started.found() == Started(1, 1, 3, is_ours=False)
    torchrun(monkeypatch, "edgegossip")
    assert Started.found() == Started(1, 1, 3, is_ours=True)
    torchrun(monkeypatch, WORLD_SIZE="1")
    assert Started.found() is None
    # Other schedulers set the same variables for all processes of a job.
    torchrun(monkeypatch)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert Started.found() is None


def test_each_executor_has_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    some = small_run()
    assert on_device(some, ExecutorProcesses(devices="2")) is some
    assert on_device(some, ExecutorProcesses(devices="meta,cpu")).task.torch_device == "meta"
    torchrun(monkeypatch, "edgegossip")
    assert on_device(some, ExecutorProcesses(devices="cpu,meta")).task.torch_device == "meta"
    torchrun(monkeypatch)
    assert on_device(some, ExecutorProcesses()) is some
    with pytest.raises(UsageError, match="torchrun has started 3 executors; leave out"):
        on_device(some, ExecutorProcesses(devices="2"))


def test_a_number_of_executors_on_gpus_takes_one_each() -> None:
    two = ExecutorProcesses(devices="2")
    assert [two.torch_device("cuda", index) for index in (0, 1)] == ["cuda:0", "cuda:1"]
    assert two.torch_device("cuda:1", 0) == "cuda:1"
    assert ExecutorProcesses().torch_device("cuda", 0) == "cuda"


# Refusals.


@pytest.mark.parametrize(
    ("executors", "what"),
    [
        ("0", "executors must be at least 1, got 0"),
        ("-2", "executors must be at least 1, got -2"),
        ("cpu,gpu", "or devices such as cuda:0,cuda:1, got 'cpu,gpu'; 'gpu' is no device"),
        ("", "got ''; '' is no device"),
        ("1.5", "'1.5' is no device"),
    ],
)
@pytest.mark.parametrize("command", [["worker", "--rank", "0", "--multicast"], ["launch"]])
def test_executors_that_cannot_be_are_refused(
    command: list[str], executors: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command
    assert main([name, "quickstart", *options, f"--executors={executors}"]) == 2
    assert what in complaint(capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_device_that_is_not_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rank", "0", "--multicast", "--executors", "cuda:0,cuda:1"]
    assert main(["worker", "quickstart", *options]) == 2
    assert "torch_device 'cuda:0' cannot be used" in complaint(capsys)


def without_data() -> Experiment:
    return replace(small_run(), algorithm=BSP(num_workers=3, num_rounds=2))


def own_trainer() -> Experiment:
    some = small_run()
    return replace(some, task=replace(some.task, trainer=partial(Learner)))


@pytest.mark.parametrize(
    ("some", "what"),
    [
        (without_data, "worker 0 is a server without data, which 2 executors cannot train"),
        (own_trainer, "worker 0 has a trainer of its own, and 2 executors share only"),
        (lambda: run_of_kind(next(iter(KINDS))), "worker 0 holds a part of a model"),
    ],
    ids=["server", "trainer", "stage"],
)
def test_workers_that_executors_cannot_share_are_refused(
    some: Callable[[], Experiment], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        require_sharing(some(), 0, 2)


def test_more_executors_than_cores_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgegossip.real.executors.num_cores", lambda: 1)
    processes = ExecutorProcesses(devices="2", command=("-c", ""))  # which ends at once
    with leading(small_run(), 0, processes) as together:
        assert together is not None
        assert together.members == [0]
    assert "2 executors need as many cores, but this process may use 1" in caplog.text
    assert "executor 1 is lost: its process ended while it started" in caplog.text


def test_one_executor_needs_no_process() -> None:
    assert not follow(small_run(), 0)
    with leading(small_run(), 0) as together:
        assert together is None
