"""The study of rare exchanges: the rate that is chosen, and each run against its control."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from studies.compressed_push import SHORT, SlowLinkContest
from studies.contest import StudySettings
from studies.rare_exchanges import (
    CONTROLS,
    FACTORS,
    RUNS,
    SETTING,
    RareContest,
    control_exhibits,
    controls,
)
from studies.tuned_races import rates

from edgegossip.contract.errors import TrainingError
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.study import Row, Session

COMPRESSED, CONTROL = next(iter(CONTROLS.items()))


def row(run: str, accuracy: float, **others: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "group": "digits",
        "setting": SETTING,
        "run": run,
        "seed": 0,
        "lr": 0.1,
        "is_tuning": False,
        "accuracies": [accuracy] * 5,
        "bytes_per_worker": [0, 25, 50, 75, 100],
        "times": [0, 1, 2, 3, 4],
        **others,
    }


def test_the_best_rate_on_held_out_samples_is_chosen() -> None:
    tried = [
        row("a", 0.7, lr=0.1, is_tuning=True),
        row("a", 0.8, lr=0.2, is_tuning=True),
        row("b", 0.9, lr=0.4, is_tuning=True),
        row("a", 0.95, lr=0.8),  # a result, on test samples
    ]
    contest = RareContest(problem=SHORT, seeds=(0,), contenders=RUNS)
    assert contest.best(tried, "a")["lr"] == 0.2
    with pytest.raises(TrainingError, match="nothing is tuned"):
        contest.best(tried, "c")


@pytest.mark.parametrize("factors", [(), (1.0, 1.0), (0.0,), (-1.0, 1.0)])
def test_factors_that_cannot_be_tried_are_refused(factors: tuple[float, ...]) -> None:
    for study in (controls, rates):
        with pytest.raises(ValueError, match="factors must be"):
            study(StudySettings(short=True), factors=factors)


def test_results_are_on_test_samples_with_the_rate_that_trials_chose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found(contest: SlowLinkContest, data_dir: Path, run: str, session: Session) -> Row:
        lr = contest.problem.settings.lr
        accuracies = [-abs(lr - lrs[0])] * 5  # the lowest rate is the best
        dataset = contest.problem.load(data_dir)
        used = {"data": dataset.name, "lr_used": lr, "test": len(dataset.test)}
        return {**row(run, 0), "accuracies": accuracies, "seed": contest.seed, **used}

    lrs = [factor * SHORT.settings.lr for factor in FACTORS]
    monkeypatch.setattr(SlowLinkContest, "row", found)
    contenders = {CONTROL: RUNS[CONTROL]}
    contest = RareContest(
        problem=replace(SHORT, name="digits"), seed=7, seeds=(0, 1), contenders=contenders
    )
    rows: dict[str, Row] = {}
    for cell in contest.cells(tmp_path):
        rows[cell.name] = cell.work(Session(folder=tmp_path, rows=rows))
    trials = [each for each in rows.values() if each["is_tuning"]]
    results = [each for each in rows.values() if not each["is_tuning"]]
    assert [each["lr_used"] for each in trials] == lrs
    assert {each["seed"] for each in trials} == {7}
    assert [(each["seed"], each["lr_used"]) for each in results] == [
        (0, lrs[0]),
        (1, lrs[0]),
    ]
    assert {each["test"] for each in trials} != {each["test"] for each in results}


def test_each_run_is_compared_with_its_control_of_the_same_seed() -> None:
    rows = [
        row(CONTROL, 0.90, bytes_per_worker=[0, 1, 2, 3, 3_000]),
        row(COMPRESSED, 0.88),
        row(CONTROL, 0.95, seed=1, bytes_per_worker=[0, 1, 2, 3, 3_000]),
        row(COMPRESSED, 0.94, seed=1),
        row(COMPRESSED, 0.10, seed=2),  # its control has not run
        row(COMPRESSED, 0.99, is_tuning=True),
    ]
    (table,) = control_exhibits({str(number): each for number, each in enumerate(rows)}).tables
    control, own = table.rows
    assert control[-1] is None
    found = dict(zip((name for name, _ in table.columns), own, strict=True))
    assert found["seeds"] == 3
    assert found["accuracy"] == pytest.approx(0.88)
    assert found["lost"] == pytest.approx(0.015)
    assert (found["least lost"], found["most lost"]) == pytest.approx((0.01, 0.02))
    assert found["less"] == 30


def test_a_control_differs_in_compression_alone() -> None:
    for compressed, control in CONTROLS.items():
        assert RUNS[compressed].local_steps == RUNS[control].local_steps > 1
        assert "compressor" in RUNS[compressed].options
        assert "compressor" not in RUNS[control].options


def test_nothing_is_shown_before_anything_has_run() -> None:
    assert control_exhibits({}) == Exhibits()
