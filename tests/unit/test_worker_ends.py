"""Which ends of workers make a run: not of those that failed, or were in another one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.small_runs import NUM_WORKERS
from tests.tiers import thorough
from tests.unit.test_worker import (
    ENDLESS,
    LONG,
    SHORT,
    before_each_event,
    crew,
)
from tests.worker_threads import WITHIN, Crew

from edgegossip.contract.errors import RunFolderError, TrainingError
from edgegossip.contract.protocol import Event
from edgegossip.real import record
from edgegossip.real.gathering import Gathering
from edgegossip.real.worker_folder import goes_on_at
from edgegossip.runs.files import save_checkpoint, write_json

__all__ = ["crew"]


def test_folders_of_which_none_has_come_to_its_end_are_no_run(crew: Crew) -> None:
    crew.folder(0).mkdir(parents=True)
    (crew.folder(0) / "events.jsonl").write_text(json.dumps({"type": "worker"}) + "\n")
    with pytest.raises(RunFolderError, match=r"no worker in .* has finished"):
        Gathering(SHORT, crew.out).finish()


@thorough
def test_the_model_of_one_that_failed_is_not_averaged_in(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(state: Any, event: Event) -> None:  # noqa: ANN401
        if state.rank == 1 and state.round == 2:
            raise TrainingError("the loss became nan")

    before_each_event(monkeypatch, fail)
    crew.all(SHORT)
    results = Gathering(SHORT, crew.out).finish()
    assert results.reason == "failed"
    assert len(results.worker_accuracies) == NUM_WORKERS - 1


@thorough
def test_workers_of_other_settings_are_not_gathered(crew: Crew) -> None:
    crew.all(SHORT)
    slower = replace(SHORT, platforms=SHORT.platforms[::-1])
    assert Gathering(slower, crew.out).finish().reason == "finished"  # those are imitations
    with pytest.raises(RunFolderError, match="gather with the recipe and the options"):
        Gathering(replace(SHORT, algorithm=LONG.algorithm), crew.out).finish()


@thorough
def test_an_end_counts_no_more_once_a_worker_goes_on(crew: Crew) -> None:
    folder = crew.folder(0)
    crew.start(ENDLESS, *range(NUM_WORKERS), settings=replace(WITHIN, max_seconds=0.3))
    crew.join(*range(NUM_WORKERS))
    ends = [folder / "summary.json", folder / "params.safetensors"]
    assert all(end.exists() for end in ends)
    ends[0].write_text(ends[0].read_text().replace("time limit", "interrupted"))
    # As far as one comes that is killed at once.
    record._make(folder, {})
    assert not any(end.exists() for end in ends)
    assert Gathering(ENDLESS, crew.out).finish().reason == "time limit"


def test_a_worker_goes_on_at_its_checkpoint_or_has_come_to_its_end(tmp_path: Path) -> None:
    assert goes_on_at(tmp_path) == 0
    end = {"seconds": 9.0, "wall_seconds": 9.0, "mean_staleness": 0.0}
    write_json(tmp_path / "summary.json", {"reason": "interrupted", **end})
    assert goes_on_at(tmp_path) == 0  # it could not keep a checkpoint
    save_checkpoint(tmp_path / "checkpoint.safetensors", {"now": 3.5, "incarnation": 0})
    assert goes_on_at(tmp_path) == 3.5
    write_json(tmp_path / "summary.json", {"reason": "finished", **end})
    assert goes_on_at(tmp_path) == 9


@pytest.mark.parametrize("kept", [7, {"now": 1.0}, {"now": math.inf, "incarnation": 0}])
def test_a_checkpoint_of_something_else_is_reported_and_done_without(
    tmp_path: Path, kept: object, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path / "checkpoint.safetensors", kept)
    assert goes_on_at(tmp_path) == 0
    assert "checkpoint.safetensors is not a worker's checkpoint" in caplog.text


@pytest.mark.parametrize(
    "text", ['{"reason": "finished", "seconds": Infinity}', '{"reason": "tired"}', "[" * 10**5]
)
def test_a_damaged_end_of_a_worker_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"summary\.json"):
        goes_on_at(tmp_path)


def test_a_folder_in_place_of_a_checkpoint_is_reported_and_ends_no_worker(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    (crew.folder(0) / "checkpoint.safetensors").mkdir(parents=True)
    crew.start(
        ENDLESS, 0, settings=replace(WITHIN, meet_seconds=0.01, max_seconds=0.05, min_workers=1)
    )
    assert crew.join(0) == ["time limit"]
    assert "beginning without it" in caplog.text
    assert "cannot delete" in caplog.text


def test_a_checkpoint_that_does_not_fit_the_worker_is_named(crew: Crew) -> None:
    crew.folder(0).mkdir(parents=True)
    path = crew.folder(0) / "checkpoint.safetensors"
    save_checkpoint(path, {"now": 1.0, "incarnation": 0, "state": None})
    crew.start(ENDLESS, 0)
    [error] = crew.join(0)
    assert isinstance(error, RunFolderError)
    assert f"{path} does not fit this worker (KeyError" in str(error)
