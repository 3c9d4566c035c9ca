"""Whatever goes wrong in a run leaves what was computed, and is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from tests.small_runs import (
    NUM_WORKERS,
    events,
    quick,
    small_model,
    small_run,
    small_task,
    summary,
    tensors,
)
from torch import Tensor, nn

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.errors import LocalProtocolError, RunFolderError, TrainingError
from edgegossip.contract.topology import ring
from edgegossip.report.folder import read_folder
from edgegossip.runs.folder import load_results
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Drop, Faults
from edgegossip.sim.platform import Platform
from edgegossip.training.optimizer import SGD


def strict_json(path: Path) -> list[Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_loss_that_explodes_is_told_and_what_was_computed_is_kept(tmp_path: Path) -> None:
    experiment = small_run(task=small_task(optimizer=SGD(lr=1e20), augmentation=None))
    with pytest.raises(TrainingError, match=r"worker \d became (nan|inf) in its step \d"):
        run(experiment, out=tmp_path, num_threads=0)
    kept = summary(tmp_path)
    assert kept["reason"] == "failed"
    assert "try a smaller learning rate" in kept["error"]
    last = strict_json(tmp_path / "events.jsonl")[-1]
    assert (last["type"], last["reason"], last["error"]) == ("ended", "failed", kept["error"])
    strict_json(tmp_path / "summary.json")
    assert events(tmp_path, "evaluated")
    assert tensors(tmp_path).keys() == small_model().state_dict().keys()
    assert load_results(tmp_path).reason == "failed"
    assert not read_folder(tmp_path).runs[0].is_complete


def test_the_worker_and_its_step_are_named(tmp_path: Path) -> None:
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += len(targets) == 8  # and not evaluations, of 24
        value = F.cross_entropy(outputs, targets)
        return value * float("nan") if calls == 6 else value

    # Alone, so that the sixth batch is its sixth step.
    alone = replace(
        quick(task=small_task(loss=loss)),
        platforms=(Platform(throughput=100.0),),
        algorithm=Gossip(topology=ring(1), num_rounds=9),
    )
    with pytest.raises(TrainingError, match="worker 0 became nan in its step 6;"):
        run(alone, out=tmp_path, num_threads=0)
    assert len(events(tmp_path, "trained")) == 5


def test_an_error_in_a_users_model_keeps_what_was_computed(tmp_path: Path) -> None:
    class Moody(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Moody.calls += 1
            if Moody.calls > 12:
                raise RuntimeError("not today")
            return super().forward(x.flatten(1))

    experiment = quick(task=small_task(model=lambda: Moody(36, 3)))
    with pytest.raises(RuntimeError, match="not today"):
        run(experiment, out=tmp_path, num_threads=0)
    assert len(events(tmp_path, "trained")) > 3


def test_workers_that_wait_for_ever_are_told_and_kept(tmp_path: Path) -> None:
    waiting = Gossip(topology=ring(NUM_WORKERS), num_rounds=3)
    lossy = Faults(script=(Drop(probability=1.0),))
    experiment = replace(small_run(faults=lossy), algorithm=waiting)
    with pytest.raises(LocalProtocolError, match=r"workers \[0, 1, 2, 3\] have not finished"):
        run(experiment, out=tmp_path, num_threads=0)
    assert "give the algorithm a timeout" in summary(tmp_path)["error"]


def test_more_workers_than_samples_are_refused(tmp_path: Path) -> None:
    many = 65
    experiment = replace(
        quick(),
        platforms=(Platform(throughput=1.0),) * many,
        algorithm=Gossip(topology=ring(many), num_rounds=1),
    )
    with pytest.raises(ValueError, match=r"num_workers must be in 1 \.\. 64, .* got 65"):
        run(experiment, out=tmp_path, num_threads=0)
    run(quick(), out=tmp_path / "after", num_threads=0)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nothing", "x" * 300])
def test_a_folder_that_cannot_be_made_is_an_error_for_people(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(RunFolderError, match=r"cannot make .*; choose another --out"):
        run(quick(), out=tmp_path / place, num_threads=0)


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path: Path) -> None:
    run(quick(), out=tmp_path, num_threads=0)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RunFolderError, match="already holds a run; choose another --out"):
        run(quick(), out=tmp_path, num_threads=0)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_of_a_run_that_failed_before_anything_was_measured_is_used_again(
    tmp_path: Path,
) -> None:
    wrong = quick(task=small_task(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(35, 3))))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run(wrong, out=tmp_path, num_threads=0)
    assert run(quick(), out=tmp_path, num_threads=0).reason == "finished"
    assert len(events(tmp_path, "experiment")) == 1


def _cut_params(folder: Path) -> None:
    path = folder / "params.safetensors"
    path.write_bytes(path.read_bytes()[:50])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no parameters": lambda folder: (folder / "params.safetensors").unlink(),
    "torn parameters": _cut_params,
    "no events": lambda folder: (folder / "events.jsonl").unlink(),
    "torn events": lambda folder: (folder / "events.jsonl").write_text('{"type":'),
    "other events": lambda folder: (folder / "events.jsonl").write_text('{"type":"evaluated"}'),
    "an empty summary": lambda folder: (folder / "summary.json").write_text("{}"),
    "a list": lambda folder: (folder / "summary.json").write_text("[]"),
    "a torn summary": lambda folder: (folder / "summary.json").write_text('{"name'),
    "no summary": lambda folder: (folder / "summary.json").unlink(),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(quick(), out=folder, num_threads=0)
    return folder


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_an_error_for_people(
    tmp_path: Path, finished: Path, damage: Callable[[Path], object]
) -> None:
    for path in finished.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path)
    with pytest.raises(RunFolderError, match=r"is missing|cannot read|damaged|no JSON object"):
        load_results(tmp_path)
