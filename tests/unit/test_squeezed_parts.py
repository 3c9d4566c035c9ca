"""The study of EdgeSqueeze's parts: each run differs from the whole in one part alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.contest import Attempt, StudySettings
from studies.squeezed_parts import PARTS, WHOLE, PartsContest, parts
from tests.tiers import thorough

import edgegossip as eg
from edgegossip.contract import Predicted, Started
from edgegossip.recipes.problems import Problem
from edgegossip.runs.describe import describe
from edgegossip.runs.study import run_study

CONTEST = PartsContest(
    problem=Problem(name="one-slow", dataset="digits", model=eg.mlp),
    setting="digits",
    task="digits",
    names=tuple(PARTS),
    num_trials=8,
    tuning_share=0.5,
    arguments={"num_workers": 3},
    seeds=(0,),
)


@pytest.mark.parametrize("run", [run for run in PARTS if run != WHOLE])
def test_a_run_differs_from_the_whole_in_one_setting(run: str) -> None:
    attempt = Attempt(run, {"lr": 0.3, "value": 5}, seed=3, is_tuning=False)
    experiments = CONTEST.comparison(Path(), attempt).experiments
    whole, changed = experiments[WHOLE], experiments[run]
    assert replace(changed, algorithm=whole.algorithm, name=whole.name) == whole
    first, second = described(whole), described(changed)
    differ = [name for name in first if first[name] != second[name]]
    forecasts = (["block_share"], ["type", "block_share"])
    assert differ in (["inner.outer_momentum"], ["inner.compressor"], *forecasts)
    assert first["inner.local_steps"] == 5


def described(experiment: eg.Experiment) -> dict[str, Any]:
    """All settings of EdgeGossip, and of the exchange within it."""
    whole: dict[str, Any] = describe(experiment.algorithm)
    inner = whole.pop("inner")
    return {**whole, **{f"inner.{name}": value for name, value in inner.items()}}


def test_shares_that_are_fixed_ignore_every_forecast_but_the_first() -> None:
    algorithm = PARTS["fixed-shares"](eg.edge_squeeze(2, num_rounds=9, local_steps=8))
    state = algorithm.init(0, torch.zeros(4))
    algorithm.handle(state, Started(epoch_cost=64.0), 0.0)
    for throughput in (3.0, 5.0):
        algorithm.handle(state, Predicted(throughput), 1.0)
        assert state.throughput == 3.0


@thorough
def test_the_short_form_runs_and_every_part_matters(tmp_path: Path) -> None:
    study = parts(StudySettings(short=True, seeds=(0,)), drift=4.0)
    rows = run_study(study, out=tmp_path, num_threads=0)
    results = [row for row in rows.values() if not row["is_tuning"]]
    assert [row["run"] for row in results] == [*PARTS]
    assert len({tuple(row["losses"]) for row in results}) == len(PARTS)
