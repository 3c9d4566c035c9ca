"""Contests of stages: the rates that each method tries, and modules of the published size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from studies.stages import (
    DIGITS,
    FULL_SIZE,
    FULL_SIZE_RATES,
    RATES,
    TEACHER_RATE,
    WHOLE,
    StageContest,
)
from tests.small_runs import quick
from tests.tiers import thorough

from edgegossip.contract.errors import TrainingError
from edgegossip.recipes.staged_training import METHODS, StageSettings, adapted
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.study import Row, Session
from edgegossip.training.stages.teachers import Both, SyntheticGradients

CONTEST = StageContest(
    problem=DIGITS,
    stages=StageSettings(width=0.1, num_stages=2, cut_at=(4,)),
    methods=(WHOLE, FULL_SIZE),
    rates=FULL_SIZE_RATES,
    seeds=(0,),
)


def test_a_method_tries_its_own_rates_and_those_of_its_modules() -> None:
    trials = CONTEST.trials()
    assert [each["lr"] for each in trials[WHOLE].values()] == [*RATES]
    assert {each["teacher_lr"] for each in trials[WHOLE].values()} == {TEACHER_RATE}
    pairs = [(each["lr"], each["teacher_lr"]) for each in trials[FULL_SIZE].values()]
    assert pairs == [*FULL_SIZE_RATES[FULL_SIZE]]
    assert min(lr for lr, _ in pairs) == 0.0003
    assert len({own for _, own in pairs}) > 1


@thorough
def test_the_best_pair_of_rates_is_taken_and_failed_trials_are_the_worst(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen, experiment = list[StageSettings](), quick(evaluation_interval=None)

    def stage_run(name: str, dataset: Any, model: Any, settings: StageSettings) -> Experiment:  # noqa: ANN401
        seen.append(settings)
        return experiment

    def run(session: Session, experiment: Experiment) -> Any:  # noqa: ANN401
        lr, own = seen[-1].lr, seen[-1].teacher_lr
        if lr == 0.01:
            raise TrainingError("the loss became nan")
        look = SimpleNamespace(time=1.0, accuracy=1 - lr - own, bytes_sent=0)
        return SimpleNamespace(history=[look])

    monkeypatch.setattr("studies.stages.stage_run", stage_run)
    monkeypatch.setattr("studies.stages.staleness", lambda folder: None)
    monkeypatch.setattr(Session, "run", run)
    rows: dict[str, Row] = {}
    for cell in CONTEST.cells(tmp_path):
        if cell.run != WHOLE:
            rows[cell.name] = cell.work(Session(folder=tmp_path, rows=rows))
    failed = [row for row in rows.values() if row.get("error")]
    assert [row["lr"] for row in failed] == [0.01]
    assert (seen[-1].lr, seen[-1].teacher_lr) == min(FULL_SIZE_RATES[FULL_SIZE])
    published = SyntheticGradients()
    for each in seen:
        assert (each.num_hidden, each.channels) == (published.num_hidden, published.channels)


def test_settings_change_the_modules_that_predict_gradients_alone() -> None:
    settings = StageSettings(num_hidden=2, channels=32, teacher_lr=0.5)
    full = SyntheticGradients(lr=0.5)
    assert adapted(METHODS["synthetic-gradients"], settings) == full
    both = adapted(METHODS["greedy, gradients"], settings)
    assert isinstance(both, Both)
    assert both.gradients == full
    for name, method in METHODS.items():
        usual = adapted(method, StageSettings(teacher_lr=1e-3))
        assert usual == method, name
