"""A run that was stopped goes on to the very result that an uninterrupted one gives."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from tests.every_word import EveryWord
from tests.small_runs import (
    ALGORITHMS,
    FAULTS,
    NUM_WORKERS,
    Recorder,
    ctrl_c_at,
    dataset,
    events,
    small_disk,
    small_run,
    small_task,
    summary,
    tensors,
)
from tests.stopped_runs import faulty, left, whole
from tests.tiers import first, thorough

from edgegossip.contract.errors import Interrupted, RunFolderError, TrainingError
from edgegossip.data.hold_out import hold_out
from edgegossip.report.folder import read_folder
from edgegossip.runs import runner
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.folder import load_results
from edgegossip.runs.runner import run
from edgegossip.runs.tracking import Status
from edgegossip.sim.fault import Faults


@thorough
@pytest.mark.parametrize(
    ("name", "at"),
    first(3, [("gosgd", 1), ("difference-push", 1), *((name, 20) for name in ALGORITHMS)]),
)
def test_a_run_stopped_by_ctrl_c_and_resumed_is_the_whole_run(
    tmp_path: Path, name: str, at: int
) -> None:
    experiment = faulty(name)
    with ctrl_c_at(at, experiment.algorithm), pytest.raises(Interrupted, match="--resume"):
        run(experiment, out=tmp_path, num_threads=2)
    results = run(experiment, out=tmp_path, num_threads=1, resume=True)
    assert left(tmp_path) == whole(name)
    assert results.reason == "finished"
    assert not (tmp_path / "checkpoint.safetensors").exists()


def evaluating() -> Experiment:
    task = small_task(dataset=hold_out(dataset(), 0.2))
    return replace(small_run(task=task, faults=FAULTS), algorithm=EveryWord(NUM_WORKERS))


@lru_cache
def whole_evaluating() -> tuple[bytes, bytes]:
    with TemporaryDirectory() as folder:
        run(evaluating(), out=folder, num_threads=0)
        return left(Path(folder))


@thorough
@pytest.mark.parametrize("at", first(1, [23, 9, 40, 71]))
def test_a_run_stopped_while_a_worker_evaluates_is_the_whole_run(
    tmp_path: Path, at: int
) -> None:
    experiment = evaluating()
    with ctrl_c_at(at, experiment.algorithm), pytest.raises(Interrupted):
        run(experiment, out=tmp_path, num_threads=2)
    content = (tmp_path / "checkpoint.safetensors").read_bytes()
    assert b"edgegossip.sim.agenda:Evaluating" in content
    run(experiment, out=tmp_path, num_threads=1, resume=True)
    assert left(tmp_path) == whole_evaluating()


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("faults", [Faults(), FAULTS], ids=["calm", "faulty"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_stopped_at_many_events_and_resumed_is_the_whole_run(
    tmp_path: Path, name: str, faults: Faults, num_threads: int
) -> None:
    experiment = small_run(name, faults=faults)
    for at in range(1, 10_000, 5):
        out = tmp_path / str(at)
        try:
            with ctrl_c_at(at, experiment.algorithm):
                run(experiment, out=out, num_threads=num_threads)
        except Interrupted:
            run(experiment, out=out, num_threads=num_threads, resume=True)
            assert left(out) == whole(name, faults), f"stopped at event {at}"
        else:
            break
    assert at > 40


@thorough
def test_a_run_stopped_again_and_again_is_the_whole_run(tmp_path: Path) -> None:
    experiment = faulty("gosgd")
    num_stops = 0
    while True:
        try:
            with ctrl_c_at(16, experiment.algorithm):
                run(experiment, out=tmp_path, num_threads=2, resume=num_stops > 0)
        except Interrupted:
            num_stops += 1
        else:
            break
    assert num_stops > 2
    assert left(tmp_path) == whole("gosgd")


class SignalAtUpdate:
    """A live view that sends this process a signal at its n-th update."""

    def __init__(self, at: int, number: int = signal.SIGINT) -> None:
        self._left, self._number = at, number

    def update(self, status: Status) -> None:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(self._number)


@pytest.mark.parametrize("at", first(1, [1, 8, 9]))
def test_a_run_stopped_while_it_evaluates_is_the_whole_run(tmp_path: Path, at: int) -> None:
    experiment = faulty("gosgd")
    num_evaluations = whole("gosgd")[0].count(b'"type":"evaluated"')
    assert num_evaluations == 8
    if at > num_evaluations:
        run(experiment, out=tmp_path, num_threads=0, progress=SignalAtUpdate(at))
    else:
        with pytest.raises(Interrupted):
            run(experiment, out=tmp_path, num_threads=0, progress=SignalAtUpdate(at))
        run(experiment, out=tmp_path, num_threads=0, resume=True)
    assert left(tmp_path) == whole("gosgd")


def test_a_termination_stops_as_gently_as_ctrl_c(tmp_path: Path) -> None:
    experiment = faulty("gosgd")
    with pytest.raises(Interrupted):
        run(
            experiment,
            out=tmp_path,
            num_threads=0,
            progress=SignalAtUpdate(3, signal.SIGTERM),
        )
    run(experiment, out=tmp_path, num_threads=0, resume=True)
    assert left(tmp_path) == whole("gosgd")


def test_an_interrupted_folder_is_valid(tmp_path: Path) -> None:
    experiment = faulty("gossip")
    with ctrl_c_at(40, experiment.algorithm), pytest.raises(Interrupted) as error:
        run(experiment, out=tmp_path, num_threads=0)
    assert str(tmp_path) in str(error.value)
    lines = events(tmp_path)
    assert lines[0]["type"] == "experiment"
    assert lines[-1]["reason"] == summary(tmp_path)["reason"] == "interrupted"
    assert tensors(tmp_path)["0.weight"].shape == (4, 1, 3, 3)
    assert load_results(tmp_path).reason == "interrupted"
    assert not read_folder(tmp_path).runs[0].is_complete
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint.safetensors",
        "events.jsonl",
        "experiment.json",
        "params.safetensors",
        "summary.json",
    }


def test_asked_twice_a_run_stops_at_once_and_goes_on_from_its_last_checkpoint(
    tmp_path: Path,
) -> None:
    experiment = faulty("gossip")
    with ctrl_c_at(50, experiment.algorithm, times=2), pytest.raises(Interrupted):
        run(experiment, out=tmp_path, num_threads=0, checkpoint_seconds=0)
    assert summary(tmp_path)["reason"] == "interrupted"
    run(experiment, out=tmp_path, num_threads=0, resume=True)
    assert left(tmp_path) == whole("gossip")


class Killed(BaseException):
    """Nobody catches it, as nobody catches SIGKILL."""


class KillAtUpdate(SignalAtUpdate):
    def update(self, status: Status) -> None:
        self._left -= 1
        if self._left == 0:
            raise Killed


@pytest.mark.parametrize(
    ("checkpoint_seconds", "tail"),
    [
        (0.0, b""),
        (0.0, b'{"type":"tra'),
        (0.0, b'{"type":"finished"}\n'),
        (1e3, b'{"type":"tra'),
    ],
    ids=["kept", "half a line", "a line too many", "nothing kept"],
)
def test_a_killed_run_goes_on_from_its_last_checkpoint_or_from_the_start(
    tmp_path: Path, checkpoint_seconds: float, tail: bytes
) -> None:
    experiment = faulty("gossip")
    with pytest.raises(Killed):
        run(
            experiment,
            out=tmp_path,
            num_threads=0,
            checkpoint_seconds=checkpoint_seconds,
            progress=KillAtUpdate(4),
        )
    assert (tmp_path / "checkpoint.safetensors").exists() == (checkpoint_seconds == 0)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(tail)
    (tmp_path / "summary.json.part").write_bytes(b'{"rea')
    run(experiment, out=tmp_path, num_threads=0, resume=True)
    assert left(tmp_path) == whole("gossip")


def test_checkpoints_change_nothing(tmp_path: Path) -> None:
    run(faulty("gosgd"), out=tmp_path, num_threads=2, checkpoint_seconds=0)
    assert left(tmp_path) == whole("gosgd")


def test_wall_seconds_add_up_over_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()  # a second at each look
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    experiment = faulty("gosgd")
    with ctrl_c_at(30, experiment.algorithm), pytest.raises(Interrupted):
        run(experiment, out=tmp_path, num_threads=0)
    before = summary(tmp_path)["wall_seconds"]
    start = next(clock)
    results = run(experiment, out=tmp_path, num_threads=0, resume=True)
    # Looks between the checkpoint and the summary are counted once more.
    assert results.wall_seconds == pytest.approx(before + next(clock) - start, abs=5)


# Stopped by what goes wrong.


@thorough
def test_a_disk_that_fills_up_costs_no_more_than_since_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    experiment = faulty("all-reduce")
    recorder = Recorder()
    size = len(whole("all-reduce")[0])
    with (
        small_disk(size * 2 // 3),
        pytest.raises(RunFolderError, match="File too large; free some space or choose"),
    ):
        run(experiment, out=tmp_path, num_threads=0, checkpoint_seconds=0, progress=recorder)
    for path in tmp_path.iterdir():
        assert path.suffix != ".part"
    run(experiment, out=tmp_path, num_threads=0, resume=True)
    assert left(tmp_path) == whole("all-reduce")


def test_work_that_will_fail_does_not_keep_a_run_from_being_stopped(tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.sum() * float("nan")

    experiment = small_run(task=small_task(loss=loss))
    with ctrl_c_at(4, experiment.algorithm), pytest.raises(Interrupted):
        run(experiment, out=tmp_path, num_threads=0)
    with pytest.raises(TrainingError, match="of worker 0 became nan in its step 1;"):
        run(experiment, out=tmp_path, num_threads=0, resume=True)
