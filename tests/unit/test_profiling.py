"""How a profile is measured: on a clock of ours, with a trainer that takes known time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.counted import Counted

from edgegossip.contract.protocol import Steps, Train
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.machine.contention import Contention
from edgegossip.machine.counters import Usage
from edgegossip.machine.loads import Load
from edgegossip.machine.monitor import Monitor
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.machine.profile import Profile
from edgegossip.machine.profiling import (
    Row,
    TimedTraining,
    choose_loads,
    measure,
    profile_of,
)

BATCH = 10
STEP = 0.01


class SlowedDown(Trainer):
    """Each step takes 10 ms alone, and up to twice as long under the load that runs.

    While a load begins, a step takes five times as long.
    """

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self.load: Load | None = None
        self.load_began = 0.0
        self.num_calls = 0

    @property
    def num_samples(self) -> int:
        return 1000

    def cost(self, request: Train) -> float:
        assert isinstance(request.work, Steps)
        return BATCH * request.work.num_steps

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        params, work = request.params, request.work
        assert isinstance(work, Steps)
        self.num_calls += 1
        share = 0.0 if self.load is None else self.load.share
        seconds = work.num_steps * STEP * (1 + share)
        if self.load is not None and self._counted.now < self.load_began + 0.5:
            seconds *= 5
        self._counted.pass_by(seconds, machine=Usage(2 * share * seconds))
        return TrainingResult(params + 1, BATCH * work.num_steps, work.num_steps, 0.0)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def rows_of(loads: list[Load | None], rows_per_load: int = 3) -> list[Row]:
    counted = Counted(num_cores=2)
    trainer = SlowedDown(counted)
    training = TimedTraining(trainer, torch.zeros(3), counted.clock)
    monitor = Monitor(PerformancePredictor(), counters=counted, clock=counted.clock)

    @contextmanager
    def run(load: Load) -> Iterator[None]:
        trainer.load, trainer.load_began = load, counted.now
        yield
        trainer.load = None

    return list(measure(training, monitor, loads, rows_per_load, run))


def sort(share: float) -> Load:
    return Load(kind="sort", num_bytes=1000, share=share)


def test_rows_tell_what_was_used_and_what_a_sample_took() -> None:
    rows = rows_of([None, sort(0.5), sort(1.0)])
    assert [row.load for row in rows] == [None] * 3 + [sort(0.5)] * 3 + [sort(1.0)] * 3
    for row in rows:
        share = 0.0 if row.load is None else row.load.share
        assert row.contention.cores == pytest.approx(share)
        assert row.seconds == pytest.approx(STEP * (1 + share) / BATCH)


def test_a_predictor_learns_from_it() -> None:
    rows = rows_of([sort(share / 10) if share else None for share in range(11)])
    predictor = PerformancePredictor().fit(profile_of(rows))
    for share in (0.0, 0.25, 0.95):
        found = predictor.forecast([Contention(cores=share)]).throughput
        assert found == pytest.approx(BATCH / STEP / (1 + share), rel=0.01)


def test_training_goes_on_for_the_time_asked_for_in_turns_of_a_tenth_of_a_second() -> None:
    counted = Counted()
    trainer = SlowedDown(counted)
    training = TimedTraining(trainer, torch.zeros(3), counted.clock)
    start, end, cost = training.run(5.0)
    assert start == 0.0
    assert cost == pytest.approx(end * BATCH / STEP)
    assert 5.0 <= end < 5.1
    assert 50 <= trainer.num_calls <= 100
    assert training.run(1.0)[0] == end


def test_loads_ask_for_anything_up_to_more_than_all_cores() -> None:
    for num_cores in (1, 2, 16):
        loads = choose_loads(600.0, num_cores)
        assert loads[0] is None
        assert loads[::4] == [None] * loads.count(None)
        demands = [load.num_processes * load.share / num_cores for load in loads if load]
        assert min(demands) < 0.2
        assert max(demands) > 1.1
        assert max(b - a for a, b in pairwise(sorted(demands))) < 0.15
        assert {load.kind for load in loads if load} == {"wordcount", "sort"}


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    profile = profile_of(rows_of([None, sort(0.3)], rows_per_load=5))
    profile.write(tmp_path / "profile.csv")
    assert Profile.read(tmp_path / "profile.csv") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["profile.csv"]
