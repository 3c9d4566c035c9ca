"""Folders that can be resumed, and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.small_runs import ALGORITHMS, ctrl_c_at, small_run, small_task
from tests.stopped_runs import faulty, left, whole

from edgegossip.contract.errors import Interrupted, RunFolderError
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run


def test_a_finished_run_is_read_and_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(faulty("gossip"), out=tmp_path, num_threads=0)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.delattr(Experiment, "workload")
    again = run(faulty("gossip"), out=tmp_path, num_threads=0, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert again.history == first.history
    assert again.summary() == first.summary()
    assert again.params.keys() == first.params.keys()
    assert all(torch.equal(again.params[name], first.params[name]) for name in first.params)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    with ctrl_c_at(9, ALGORITHMS["gossip"]), pytest.raises(Interrupted):
        run(faulty("gossip"), out=folder, num_threads=0)
    return folder


def test_a_run_at_its_time_limit_is_finished(tmp_path: Path) -> None:
    experiment = small_run(max_seconds=0.3)
    run(experiment, out=tmp_path, num_threads=0)
    assert run(experiment, out=tmp_path, resume=True).reason == "time limit"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: replace(e, seed=4), "its seed is 3, now 4"),
        (lambda e: replace(e, algorithm=ALGORITHMS["gosgd"]), "its name is"),
        (lambda e: replace(e, max_seconds=1.0), "its max_seconds is null, now 1.0"),
        (lambda e: replace(e, evaluation_interval=1.0), "its evaluation_interval is 0.1"),
        (
            lambda e: replace(e, task=small_task(batch_size=4)),
            r"its task.batch_size is 8, now 4",
        ),
    ],
)
def test_another_experiment_is_refused_and_nothing_touched(
    stopped: Path, change: Callable[[Experiment], Experiment], message: str
) -> None:
    before = {path: path.read_bytes() for path in stopped.iterdir()}
    with pytest.raises(RunFolderError, match=f"holds another experiment: {message}"):
        run(change(faulty("gossip")), out=stopped, num_threads=0, resume=True)
    assert {path: path.read_bytes() for path in stopped.iterdir()} == before


def test_another_commit_may_resume_and_the_folder_names_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = faulty("gossip")
    monkeypatch.setattr("edgegossip.runs.describe.source_commit", lambda: "first")
    with ctrl_c_at(9, experiment.algorithm), pytest.raises(Interrupted):
        run(experiment, out=tmp_path, num_threads=0)
    monkeypatch.setattr("edgegossip.runs.describe.source_commit", lambda: "second")
    run(experiment, out=tmp_path, num_threads=0, resume=True)
    assert json.loads((tmp_path / "experiment.json").read_text())["commit"] == "first"


def test_a_folder_that_is_not_there_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"there is no folder .* to resume"):
        run(faulty("gossip"), out=tmp_path / "tpyo", resume=True)
    assert not (tmp_path / "tpyo").exists()


def test_a_folder_with_nothing_in_it_yet_is_begun(tmp_path: Path) -> None:
    run(faulty("gossip"), out=tmp_path, num_threads=0, resume=True)
    assert left(tmp_path) == whole("gossip")


def test_a_damaged_checkpoint_is_refused_and_without_it_all_begins_anew(
    tmp_path: Path,
) -> None:
    experiment = faulty("gossip")
    with ctrl_c_at(20, experiment.algorithm), pytest.raises(Interrupted):
        run(experiment, out=tmp_path, num_threads=0)
    checkpoint = tmp_path / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    with pytest.raises(RunFolderError, match=r"not a checkpoint .* delete it, and --resume"):
        run(experiment, out=tmp_path, num_threads=0, resume=True)
    checkpoint.unlink()
    run(experiment, out=tmp_path, num_threads=0, resume=True)
    assert left(tmp_path) == whole("gossip")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    def experiment(width: int) -> Experiment:
        def model() -> torch.nn.Module:
            layers = torch.nn.Linear(36, width), torch.nn.Linear(width, 3)
            return torch.nn.Sequential(torch.nn.Flatten(), *layers)

        return small_run(task=small_task(model=model))

    with ctrl_c_at(20, ALGORITHMS["gossip"]), pytest.raises(Interrupted):
        run(experiment(5), out=tmp_path, num_threads=0)
    with pytest.raises(RunFolderError, match="does not fit this experiment"):
        run(experiment(6), out=tmp_path, num_threads=0, resume=True)
