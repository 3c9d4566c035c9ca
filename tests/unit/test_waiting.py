"""Waiting: counted to the end of the run, also if the run is cut off during the wait."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run_folders import comparison, ended, header, rounds, write_run
from tests.small_runs import small_run
from tests.tiers import first, thorough

from edgegossip.plan.ranking import use_of_machines
from edgegossip.report.folder import read_folder
from edgegossip.report.log import (
    RunLog,
    Spans,
    activities,
    clipped,
    mean_waiting,
    read_log,
    total,
)
from edgegossip.report.page import write_report
from edgegossip.report.prose import highlights, story
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Crash, Faults, Recover
from edgegossip.sim.platform import Platform

SPEEDS = (6000.0, 100.0, 60.0, 60.0)


def uneven(name: str, seconds: float | None, faults: Faults | None = None) -> Experiment:
    """A run with a worker that is a hundred times faster than the slowest."""
    experiment = small_run(name, platforms=tuple(Platform(throughput=v) for v in SPEEDS))
    algorithm: Any = experiment.algorithm
    algorithm = replace(algorithm, timeout=None)
    faults = faults or Faults()
    return replace(experiment, algorithm=algorithm, max_seconds=seconds, faults=faults)


def log_of_run(experiment: Experiment, out: Path) -> RunLog:
    run(experiment, out=out, num_threads=0)
    return read_log(out / "events.jsonl")


def until(spans: Spans, end: float) -> float:
    return total(clipped(spans, end))


@pytest.mark.parametrize("seconds", first(1, [0.2, 0.33, 0.45]))
@pytest.mark.parametrize("name", ["epoch-gossip", "gossip"])
def test_a_run_that_is_cut_off_divides_its_time_as_the_whole_run_did_until_then(
    name: str, seconds: float, tmp_path: Path
) -> None:
    whole = activities(log_of_run(uneven(name, None), tmp_path / "whole"))
    log = log_of_run(uneven(name, seconds), tmp_path / "cut")
    assert log.ended is not None
    assert log.ended.reason == "time limit"
    for worker, same in zip(activities(log), whole, strict=True):
        busy = np.concatenate([same.training, same.sending])
        waiting = until(same.present, seconds) - until(busy, seconds)
        assert worker.shares["waiting"] == pytest.approx(waiting / seconds, abs=1e-6)
        training = until(same.training, seconds) / seconds
        assert worker.shares["training"] == pytest.approx(training, abs=1e-6)
        assert worker.shares["unfinished"] == 0


def test_a_wait_that_is_open_at_the_end_is_told_on_the_page_and_in_the_plan(
    tmp_path: Path,
) -> None:
    # The fast worker trains for 16 / 6000 s; the slowest has not finished its first epoch.
    run(uneven("epoch-gossip", 0.2), out=tmp_path, num_threads=0)
    folder = read_folder(tmp_path)
    [worker, *_] = folder.runs[0].workers
    assert worker.shares["waiting"] > 0.9
    waiting = mean_waiting(folder.runs[0].workers)
    assert waiting is not None
    assert (
        "of the workers\u2019 time spent waiting",
        f"{waiting:.0%}".replace("%", "\xa0%"),
    ) in [(label, value) for value, label in highlights(folder)]
    assert use_of_machines(tmp_path, SPEEDS)["idle"] > 0.9 * SPEEDS[0] / sum(SPEEDS)


def test_absence_and_the_time_after_a_finish_are_no_waiting(tmp_path: Path) -> None:
    script = (Crash(at=0.0, rank=0), Recover(at=0.1, rank=0), Crash(at=0.15, rank=0))
    log = log_of_run(
        uneven("epoch-gossip", 0.2, Faults(script=script, detection_time=0.01)), tmp_path
    )
    [worker, *_] = activities(log)
    assert worker.shares["crashed"] == pytest.approx(0.75)
    assert worker.shares["waiting"] <= 0.25
    events = [*rounds(5, has_barrier=False), ended(10.0, "time limit") | {"cut_off": []}]
    finished = activities(
        read_log(write_run(tmp_path / "f", [header("f"), *events]) / "events.jsonl")
    )
    assert finished[0].shares["waiting"] == pytest.approx(0)
    assert finished[0].shares["finished"] > 0.8


def test_a_log_that_does_not_tell_who_was_training_states_no_waiting(tmp_path: Path) -> None:
    events = [*rounds(5, has_barrier=True, end=4.0), ended(20.0, "time limit")]
    folder = read_folder(write_run(tmp_path, [header("old"), *events]))
    assert mean_waiting(folder.runs[0].workers) is None
    assert not [label for _, label in highlights(folder) if "waiting" in label]
    assert "waiting or cut off" in " ".join(story(folder))


def test_finished_runs_keep_their_figures(tmp_path: Path) -> None:
    folder = read_folder(comparison(tmp_path))
    shares = {run.name: mean_waiting(run.workers) for run in folder.runs}
    assert shares == pytest.approx({"all-reduce": 0.48295455, "gossip": 0.0}, abs=1e-6)
    log = log_of_run(uneven("epoch-gossip", None), tmp_path / "whole")
    last = json.loads((tmp_path / "whole" / "events.jsonl").read_text().splitlines()[-1])
    assert set(last) == {"type", "time", "reason", "error", "wall_seconds"}
    assert log.ended is not None
    assert log.ended.cut_off is None


@thorough
@pytest.mark.parametrize(
    "damage", first(1, [7, [[0]], [[9, 0.1]], [[0, "early"]], [[0, 1e300]]])
)
def test_a_damaged_end_is_skipped(
    damage: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = [*rounds(2, has_barrier=True), ended(9.0, "time limit") | {"cut_off": damage}]
    write_report(write_run(tmp_path, [header("old"), *events]))
    assert "is damaged and skipped" in caplog.text
