"""`edgegossip worker` and `gather`: wrong usage, and what is said at the end."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.complaints import complaint
from tests.tiers import thorough
from tests.unit.test_worker import EPOCHS, SHORT
from tests.worker_threads import WITHIN, Crew

from edgegossip.cli import worker_command
from edgegossip.cli.main import main
from edgegossip.cli.worker_command import _say_what_came_out
from edgegossip.contract.errors import NetworkError, RunFolderError
from edgegossip.data.hold_out import hold_out
from edgegossip.real.gathering import Gathering


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (
            ["--rank", "5", "--num-workers", "2", "--listen", "tcp/127.0.0.1:0"],
            "in 0..1, got 5",
        ),
        (["--rank", "1"], "no way to any other worker; give an endpoint"),
        (["--rank", "1", "--connect", "7447"], "an endpoint is tcp/HOST:PORT"),
        (["--rank", "1", "--multicast", "--lease", "0"], "lease must be"),
        (
            ["--rank", "1", "--multicast", "--min-workers", "0"],
            "min_workers must be at least 1",
        ),
    ],
    ids=["rank", "no way", "endpoint", "lease", "min-workers"],
)
def test_wrong_usage_of_a_worker_is_code_2(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", "quickstart", *arguments]) == 2
    assert what in complaint(capsys)


def test_a_worker_that_is_stopped_early_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_command, "join", stop)
    out = str(tmp_path / "w1")
    given = ["worker", "quickstart", "--rank", "1", "--multicast"]
    assert main([*given, "--out", out]) == 130
    assert f"to continue: edgegossip {' '.join(given)} --out {out}" in complaint(capsys)


def test_those_who_measure_are_named_by_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker_command._say_who_measures(tmp_path, ["measure", "mine"], [2])
    assert "worker 2 has models to measure, on its own data" in capsys.readouterr().out
    worker_command._say_who_measures(tmp_path, ["measure", "mine"], [0, 2])
    assert "workers 0, 2 have models to measure, on their own data" in capsys.readouterr().out


@thorough
def test_a_worker_says_what_it_reached_and_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crew = Crew(tmp_path)
    held_out = replace(SHORT.task, dataset=hold_out(SHORT.task.dataset, 0.25, seed=0))
    crew.all(replace(SHORT, task=held_out))
    _say_what_came_out(crew.folder(2), ["gather", "mine", "--lr", "0.1"])
    said = capsys.readouterr().out
    assert said.startswith("3 rounds in ")
    assert "sent, validation accuracy " in said
    assert f"%; its model and log are in {crew.folder(2)}" in said
    assert f"to {tmp_path}/workers/0, {tmp_path}/workers/1, ... and run" in said
    assert f"  edgegossip gather mine --lr 0.1 --out {tmp_path}\n" in said


@thorough
def test_workers_that_are_missing_are_named_when_gathered(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    crew.all(SHORT)
    shutil.rmtree(crew.folder(1))
    (crew.folder(3) / "summary.json").unlink()
    (tmp_path / "workers" / "4").mkdir()
    gathering = Gathering(SHORT, tmp_path)
    gathering.finish()
    missing, killed, strange = gathering.left_out
    assert missing.startswith(f"{crew.folder(1)} is missing: copy the folder of worker 1 there")
    assert killed.startswith("worker 3 left no summary in")
    assert strange.startswith(f"{tmp_path}/workers/4 is not of a worker of this run, which has")


@thorough
def test_workers_of_another_experiment_are_named_when_gathered(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    crew.all(SHORT)
    faster = replace(SHORT, task=replace(SHORT.task, batch_size=16))
    with pytest.raises(RunFolderError, match=r"workers/0 .*: its task.batch_size is 8, now 16"):
        Gathering(faster, tmp_path).finish()


@pytest.mark.slow
def test_a_run_with_fewer_workers_than_it_must_have_ends_with_a_checkpoint(
    tmp_path: Path,
) -> None:
    crew = Crew(tmp_path)
    endless = replace(SHORT, algorithm=replace(EPOCHS, num_rounds=100_000))
    settings = replace(WITHIN, min_workers=4)
    crew.start(endless, 0, 1, 2, settings=replace(settings, meet_seconds=3.0))
    crew.start(replace(endless, max_seconds=0.5), 3, settings=settings)
    *left, first = crew.join(0, 1, 2, 3)
    assert first == "time limit"
    for rank, error in enumerate(left):
        assert isinstance(error, NetworkError)
        assert "fewer than 4 workers were left for 3 s: worker" in str(error)
        assert (crew.folder(rank) / "checkpoint.safetensors").exists()
