"""The study of the environments: equal trials, a target fixed before the results, bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from studies.contest import Attempt, StudySettings
from studies.waiting import TASKS, WaitingContest, waiting
from tests.tiers import thorough

import edgegossip as eg
from edgegossip.contract.errors import TrainingError, UsageError
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.registry import RECIPES
from edgegossip.recipes.systems import BASELINE, SYSTEMS
from edgegossip.report.study_page import write_study_report
from edgegossip.runs.exhibits import Exhibits, Table
from edgegossip.runs.study import Row, Session, run_study
from edgegossip.runs.tuning import TUNING_SEED

CONTEST = WaitingContest(
    problem=Problem(name="churn", dataset="digits", model=eg.mlp),
    setting="digits",
    task="digits",
    names=tuple(SYSTEMS),
    num_trials=12,
    tuning_share=0.25,
    arguments={"num_workers": 3},
    seeds=(0, 1),
)


def test_every_system_tries_as_many_settings_with_a_seed_that_no_result_has() -> None:
    study = waiting(StudySettings(seeds=(0, 1)))
    assert {f"environments/{name}" for name in TASKS} <= RECIPES.keys()
    number = sum(map(len, TASKS.values()))
    for name in SYSTEMS:
        mine = [cell.name for cell in study.cells if cell.run == name]
        assert len([cell for cell in mine if "/tuning/" in cell]) == 12 * number
        assert len(mine) == (12 + 2) * number
    assert {cell.group for cell in study.with_runs(["alone"]).cells} == {*TASKS}
    assert CONTEST.seed == TUNING_SEED


def test_a_trial_is_shorter_and_its_settings_reach_the_recipe() -> None:
    attempt = Attempt("gosgd", {"lr": 0.3, "value": 0.01}, seed=3, is_tuning=False)
    result = CONTEST.comparison(Path(), attempt).experiments["gosgd"]
    trial = CONTEST.comparison(Path(), replace(attempt, is_tuning=True)).experiments["gosgd"]
    assert trial.max_seconds == pytest.approx(0.25 * (result.max_seconds or 0), rel=0.01)
    for each in (result, trial):
        assert isinstance(each.algorithm, eg.GoSGD)
        assert each.algorithm.exchange_probability == 0.01
        assert getattr(each.task.optimizer, "lr", None) == 0.3
        assert each.seed == 3
    assert len(result.faults.script) == len(trial.faults.script) > 0


def test_rivals_may_end_before_the_baseline(
    tmp_path: Path,
) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "someone.txt").write_text("And so on. " * 900)
    contest = replace(CONTEST, task="gpt-books", rival_share=0.3)
    length: dict[tuple[str, bool], float] = {}
    for run in (BASELINE, "alone"):
        for is_tuning in (False, True):
            attempt = Attempt(run, {"lr": 0.001, "value": 2}, seed=3, is_tuning=is_tuning)
            made = contest.comparison(tmp_path, attempt).experiments[run]
            length[run, is_tuning] = made.max_seconds or 0.0
    assert length["alone", False] == pytest.approx(0.3 * length[BASELINE, False], rel=0.01)
    assert length["alone", True] == pytest.approx(0.3 * length[BASELINE, True], rel=0.01)
    assert length[BASELINE, True] == pytest.approx(0.25 * length[BASELINE, False], rel=0.01)
    assert "rival_share" not in waiting(StudySettings()).settings
    assert waiting(StudySettings(), rival_share=0.3).settings["rival_share"] == 0.3


def test_the_gpt_is_as_wide_as_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "someone.txt").write_text("And so on. " * 900)
    study = partial(waiting, StudySettings())
    assert study(environments=("halos",), width=64).settings["width"] == 64
    with pytest.raises(ValueError, match="width must be None for mnist, which has no GPT"):
        study(environments=("halos", "churn"), width=64)
    with pytest.raises(ValueError, match="momentum must be 0 for gpt-books"):
        study(environments=("halos",), momentum=0.9)
    contest = replace(CONTEST, task="gpt-books", arguments={"num_workers": 3, "width": 8})
    attempt = Attempt("alone", {"lr": 0.001, "value": 2}, seed=3, is_tuning=False)
    model: Any = contest.comparison(tmp_path, attempt).experiments["alone"].task.model
    assert model().tokens.embedding_dim == 8


def test_trials_are_measured_on_the_share_that_was_given() -> None:
    study = waiting(StudySettings(), held_out=0.01)
    assert study.settings["held_out"] == 0.01
    shares = list[float]()

    class Looking(Session):
        def run(self, experiment: eg.Experiment) -> eg.Results:
            data = experiment.task.dataset
            shares.append(len(data.test) / (len(data.train) + len(data.test)))
            raise TrainingError("enough was seen")

    attempt = Attempt("alone", {"lr": 0.1, "value": 2}, seed=3, is_tuning=True)
    for held_out in (0.1, 0.01):
        contest = replace(CONTEST, task="digits", held_out=held_out)
        contest.work(Path(), attempt, Looking.__new__(Looking))
    assert shares == pytest.approx([0.1, 0.01], rel=0.01)
    with pytest.raises(ValueError, match=r"held_out must be in \(0, 1\)"):
        waiting(StudySettings(), held_out=1.0)


def test_a_study_with_momentum_does_not_go_on_from_one_without() -> None:
    study = partial(waiting, StudySettings(), environments=("churn",))
    assert "momentum" not in study().settings
    assert study(momentum=0.9).settings["momentum"] == 0.9
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
        study(momentum=1.0)


def searched(run: str, best: tuple[float, float], number: int = 12) -> list[Row]:
    """The trials of a system whose merit falls with the distance from the best settings."""
    rows: list[Row] = []
    for _ in range(number):
        tried = CONTEST.to_try(run, {}, rows)
        far = abs(math.log(tried["lr"] / best[0])) + abs(math.log(tried["value"] / best[1]))
        rows.append(row(run, [math.exp(-far)], is_tuning=True, **tried))
    return rows


@pytest.mark.parametrize(
    ("run", "best"),
    [
        ("gosgd", (0.03, 0.8)),  # as often as is possible
        ("all-reduce", (0.3, 1.0)),  # at least one step
        ("adsp", (0.1, 5.0)),
        ("diloco", (0.9, 1.0)),
    ],
)
def test_the_settings_tried_grow_until_the_best_ones_are_inside(
    run: str, best: tuple[float, float]
) -> None:
    rows = searched(run, best)
    assert len({(each["lr"], each["value"]) for each in rows}) == len(rows)
    chosen = CONTEST.best(rows, run)
    assert abs(math.log(chosen["lr"] / best[0])) < math.log(3) / 2 + 1e-9
    assert abs(math.log(chosen["value"] / best[1])) < math.log(5) / 2
    exhibits = waiting(StudySettings(short=True)).exhibit(
        {"result": ROWS["own"], **{str(k): each for k, each in enumerate(rows)}}
    )
    titles = [title for title, _ in exhibits.tables[-1].columns]
    line = dict(zip(titles, exhibits.tables[-1].rows[0], strict=True))
    assert (line["learning rate"], line["own setting"]) == (chosen["lr"], chosen["value"])
    assert line["neighbors tried"] == "all"


def test_a_trial_that_diverges_is_a_setting_that_was_tried_and_lost() -> None:
    first, second = searched("gosgd", (0.1, 0.05), 2)
    failed = {k: each for k, each in first.items() if k != "accuracies"} | {"error": "nan"}
    rows = [failed, second]
    assert CONTEST.best(rows, "gosgd") is second
    assert CONTEST.to_try("gosgd", {}, rows)["point"] not in ([0, 0], second["point"])


def row(run: str, values: list[float], *, is_tuning: bool = False, **others: Any) -> Row:  # noqa: ANN401
    number = len(values)
    return {
        "group": "churn",
        "setting": "digits",
        "run": run,
        "seed": TUNING_SEED if is_tuning else 0,
        "is_tuning": is_tuning,
        "times": [10.0 * k for k in range(number)],
        "accuracies": values,
        "bytes": [100.0 * k for k in range(number)],
        "samples": [8 * k for k in range(number)],
        "joules": [5.0 * k for k in range(number)],
        "node_seconds": [40.0 * k for k in range(number)],
        "worst_worker": values[-1] - 0.1,
        "goodput": 0.5,
        "compute_used": 0.6,
        "total_speed": 3.1,
        "barrier_speed": 0.4,
        "lr": 0.1,
        "value": 8,
        "point": [0, 0],
        **others,
    }


def lines(exhibits: Exhibits) -> dict[str, Mapping[str, Any]]:
    found: Table = exhibits.tables[1]
    titles = [title for title, _ in found.columns]
    return {str(line[0]): dict(zip(titles, line, strict=True)) for line in found.rows}


ROWS = {
    "trial": row(BASELINE, [0.1, 0.7, 0.7, 0.7, 0.7, 0.7], is_tuning=True),
    "worse": row(BASELINE, [0.1, 0.2, 0.2, 0.2, 0.2, 0.2], is_tuning=True, point=[1, 0]),
    "own": row(BASELINE, [0.1, 0.6, 0.8, 0.9], goodput=0.2),
    "fast": row("gosgd", [0.1, 0.95, 0.95, 0.95]),
    "control": row("alone", [0.1, 0.5, 0.5, 0.5], bytes=[0.0] * 4),
}


def test_the_target_is_what_the_baselines_best_trial_reached() -> None:
    exhibits = waiting(StudySettings(short=True)).exhibit(ROWS)
    found = lines(exhibits)
    assert found[BASELINE]["target"] == pytest.approx(0.7)
    to_target = {
        "time to target": 20.0,
        "samples to target": 16,
        "bytes to target": 200.0,
        "energy to target": 10.0,
        "node-seconds to target": 80.0,
    }
    assert {title: found[BASELINE][title] for title in to_target} == to_target
    assert found["gosgd"]["time to target"] == 10.0
    assert found["alone"]["time to target"] is None
    # To the best value of the baseline, three times as soon; always training gives five times.
    assert found["gosgd"]["speed-up"] == 3.0
    assert found["gosgd"]["of the bound"] == pytest.approx(3 / 5)
    assert found[BASELINE]["of the bound"] is None
    assert found["gosgd"]["worst worker"] == pytest.approx(0.85)
    assert exhibits.tables[0].rows == (("churn", "digits", 3.1, 0.4, 3.1 / 0.4, 1 / 0.2),)


def test_losses_are_compared_after_the_samples_that_the_baseline_processes_in_all() -> None:
    rows = {
        "own": row(BASELINE, [0.1, 0.6], losses=[2.0, 1.0], samples=[0, 12]),
        "fast": row("gosgd", [0.1, 0.9, 0.9], losses=[2.0, 1.0, 0.6]),  # 8 samples a look
        "slow": row("alone", [0.1, 0.2], losses=[2.0, 0.9]),
    }
    found = lines(waiting(StudySettings(short=True)).exhibit(rows))
    shares = {run: line["loss at equal samples"] for run, line in found.items()}
    assert shares == {BASELINE: 1.0, "gosgd": pytest.approx(0.8), "alone": None}


def test_a_given_target_needs_no_trials() -> None:
    study = waiting(StudySettings(short=True), target=0.85)
    found = lines(study.exhibit({name: ROWS[name] for name in ("own", "fast")}))
    assert (found[BASELINE]["target"], found[BASELINE]["time to target"]) == (0.85, 30.0)
    assert study.settings["target"] == 0.85


def test_a_front_has_the_best_value_for_at_most_as_much() -> None:
    figure = waiting(StudySettings(short=True)).exhibit(ROWS).figures[0]
    time, sent = figure.panels[:2]
    front = next(each for each in time.series if each.is_mark)
    assert front.x == (10.0,)
    assert front.y == pytest.approx((0.05,))
    assert [each.name for each in sent.series] == [BASELINE, "gosgd", "Pareto front"]


def test_unknown_environments_and_tasks_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown environment or task 'halo'"):
        waiting(environments=("halo",))
    with pytest.raises(ValueError, match=r"tuning_share must be in \(0, 1\], got 2.0"):
        waiting(tuning_share=2.0)


@thorough
def test_the_short_form_runs_and_its_trials_are_not_measured_on_test_data(
    tmp_path: Path,
) -> None:
    study = waiting(StudySettings(short=True, seeds=(0,)))
    rows = run_study(study, out=tmp_path, num_threads=0)
    assert len(rows) == len(study.cells) == 8
    results = {each["run"]: each for each in rows.values() if not each["is_tuning"]}
    assert results["alone"]["goodput"] == pytest.approx(1.0)
    assert results[BASELINE]["goodput"] < 0.5
    bound = results[BASELINE]["total_speed"] / results[BASELINE]["barrier_speed"]
    assert bound == pytest.approx(7.0)
    assert "<h1>" in write_study_report(tmp_path).read_text()
    # A tenth of the training samples, whose number no accuracy on 360 test pictures has.
    held_out = [
        accuracy * 139
        for each in rows.values()
        if each["is_tuning"]
        for accuracy in each["accuracies"]
    ]
    assert held_out == pytest.approx([round(number) for number in held_out], abs=1e-6)
