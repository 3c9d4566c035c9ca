"""BatchTune: with batches by speed, workers behind a barrier do not wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgegossip.algorithms.server.methods import BSP
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.wrappers.batch_tune import BatchTune
from edgegossip.contract.algorithm import Algorithm
from edgegossip.data.readers import digits
from edgegossip.models import mlp
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Crash, Faults
from edgegossip.sim.platform import Platform
from edgegossip.training.optimizer import SGD
from edgegossip.training.task import Task

SPEEDS = (100.0, 200.0, 300.0)
BATCH_SIZE = 24


def trainings(
    algorithm: Algorithm[Any], out: Path, faults: Faults = Faults()
) -> list[dict[str, Any]]:
    """Facts about each step from the events of a run, in order."""
    dataset = digits()
    task = Task(
        dataset=dataset,
        model=lambda: mlp(input_shape=dataset.input_shape, num_classes=10, hidden=(8,)),
        optimizer=SGD(lr=0.1, momentum=0.0),
        batch_size=BATCH_SIZE,
    )
    experiment = Experiment(
        task=task,
        algorithm=algorithm,
        platforms=tuple(Platform(throughput=each) for each in (1000.0, *SPEEDS)),
        faults=faults,
        evaluation_interval=1e3,
    )
    run(experiment, out=out, num_threads=0)
    lines = (out / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["type"] == "trained"]


def bsp(num_rounds: int = 10) -> ParameterServer:
    return BSP(num_workers=3, num_rounds=num_rounds)


def test_batches_are_as_unequal_as_the_speeds_and_as_many_samples_in_all(
    tmp_path: Path,
) -> None:
    events = trainings(BatchTune(inner=bsp()), tmp_path)
    last = {e["rank"]: e["num_samples"] for e in events}
    assert last == {1: 12, 2: 24, 3: 36}


def test_steps_take_all_workers_equally_long(tmp_path: Path) -> None:
    plain = trainings(bsp(), tmp_path / "plain")
    tuned = trainings(BatchTune(inner=bsp()), tmp_path / "tuned")
    slowest = BATCH_SIZE / min(SPEEDS)
    assert plain[-1]["time"] == pytest.approx(10 * slowest)
    # The first step is taken before speeds are known.
    assert tuned[-1]["time"] == pytest.approx(slowest + 9 * 3 * BATCH_SIZE / sum(SPEEDS))


def test_those_that_are_left_share_the_samples_of_those_that_are_left(tmp_path: Path) -> None:
    faults = Faults(script=(Crash(at=0.5, rank=3),), detection_time=0.1)
    events = trainings(BatchTune(inner=bsp(20)), tmp_path, faults)
    last = {e["rank"]: e["num_samples"] for e in events}
    assert (last[1], last[2]) == (16, 32)
