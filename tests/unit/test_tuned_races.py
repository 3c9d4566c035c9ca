"""Races with tuned learning rates: what is tried, on which data, and what is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from studies.problems import DIGITS_MLP
from studies.race import BASELINE, CONTROLS
from studies.speedup import TARGET_GAP, uneven_setup
from studies.tuned_races import TunedRace
from tests.tiers import thorough

from edgegossip.contract.errors import TrainingError
from edgegossip.models import mlp
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.study import Row, Study, run_study
from edgegossip.runs.tuning import TUNING_SEED

pytestmark = thorough

NOWHERE = Path("nowhere")  # digits need no file
TINY = replace(
    DIGITS_MLP,
    num_train=120,
    num_test=40,
    model=partial(mlp, hidden=(8,)),
    settings=replace(DIGITS_MLP.settings, num_epochs=6, batch_size=10, lr=0.1),
)
SEEDS = (0, 1)


CONTEST = TunedRace(
    problem=TINY,
    setup=uneven_setup(TINY, 4.0, {"gosgd": CONTROLS["gosgd"]}),
    seeds=SEEDS,
    max_work=None,
    factors=(1e-6, 1.0, 1e20),  # the last one diverges, so its trials have no rows
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Row]:
    study = Study(
        name="test/tuned-race",
        title="",
        printed=(),
        settings={},
        cells=tuple(CONTEST.cells(NOWHERE)),
        exhibit=lambda rows: Exhibits(),
    )
    return run_study(study, out=tmp_path_factory.mktemp("tuned"), num_threads=0)


def test_results_have_the_rate_that_learns(rows: Mapping[str, Row]) -> None:
    results = [row for row in rows.values() if not row["is_tuning"]]
    assert {(row["run"], row["seed"]) for row in results} == {
        (run, seed) for run in (BASELINE, "gosgd") for seed in SEEDS
    }
    assert {row["lr"] for row in results} == {TINY.settings.lr}


def test_each_tries_all_rates_and_gosgd_its_exchanges_too(rows: Mapping[str, Row]) -> None:
    tried = [row for row in rows.values() if row["is_tuning"]]
    assert [row["run"] for row in tried].count(BASELINE) == 2
    pairs = {(row["lr"], row["exchange_probability"]) for row in tried if row["run"] == "gosgd"}
    assert pairs == {(lr, p) for lr in (1e-7, 0.1) for p in (0.02, 0.1, 0.4, 1.0)}
    assert {row["seed"] for row in tried} == {TUNING_SEED}


def test_trials_hold_samples_out_and_results_train_on_all(rows: Mapping[str, Row]) -> None:
    trained = {
        row["is_tuning"]: row["num_train"] for row in rows.values() if row["run"] == BASELINE
    }
    assert trained == {True: 108, False: 120}


def test_the_best_trial_is_the_soonest_of_the_same_run(rows: Mapping[str, Row]) -> None:
    tried = [row for row in rows.values() if row["is_tuning"] and row["run"] == "gosgd"]
    seconds = [row["held_out_seconds"] for row in tried if row["held_out_seconds"]]
    best = CONTEST.best(rows.values(), "gosgd")
    assert best["run"] == "gosgd"
    assert best["held_out_seconds"] == min(seconds)


def test_the_target_of_trials_is_near_the_best_accuracy_of_epoch_gossips_trials(
    rows: Mapping[str, Row],
) -> None:
    tried = [row for row in rows.values() if row["is_tuning"]]
    best = max(row["held_out_accuracy"] for row in tried if row["run"] == BASELINE)
    there = [row for row in tried if row["held_out_seconds"]]
    assert there
    assert all(row["held_out_accuracy"] >= best - TARGET_GAP for row in there)
    others = [row for row in tried if row["run"] == "gosgd" and not row["held_out_seconds"]]
    assert others
    assert all(row["held_out_accuracy"] < best - TARGET_GAP for row in others)


def test_a_trial_ends_when_it_can_no_longer_be_the_soonest(rows: Mapping[str, Row]) -> None:
    tried = [row for row in rows.values() if row["is_tuning"] and row["run"] == "gosgd"]
    best = math.inf
    for row in tried:
        assert row["times"][-1] <= best
        best = min(best, row["held_out_seconds"] or math.inf)
    assert tried[-1]["times"][-1] < tried[0]["times"][-1]


def test_without_a_trial_nothing_is_tuned(rows: Mapping[str, Row]) -> None:
    tried = [row for row in rows.values() if row["run"] != "gosgd"]
    with pytest.raises(TrainingError, match=f"no trial of gosgd on {TINY.name} finished"):
        CONTEST.best(tried, "gosgd")
