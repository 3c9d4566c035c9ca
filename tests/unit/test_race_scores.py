"""Standings of a race: speed-ups over the baseline, and their medians over seeds."""

from __future__ import annotations

from typing import Any

import pytest
from studies.contest import StudySettings
from studies.race import BASELINE
from studies.race_scores import LOSS, race_table, standings

from edgegossip.recipes.registry import load_study
from edgegossip.runs.scoreboard import bars
from edgegossip.runs.study import Row


def baseline_row(**changes: Any) -> Row:  # noqa: ANN401
    times = {
        "epoch_ends": [0.0, 40.0, 80.0, 120.0],
        "round_seconds": 10.0,
        "throughput_bound": 2.38,
        "time_ratio": 4.0,
    }
    row = {"group": "g", "problem": "p", "setup": None, "run": BASELINE, "seed": 0}
    curve = {"accuracies": [0.1, 0.7, 0.8, 0.9], "setups": {"uneven": times}}
    return row | curve | {"num_epochs": 3, "num_train": 100} | changes


def other_row(**changes: Any) -> Row:  # noqa: ANN401
    row = {"group": "g", "problem": "p", "setup": "uneven", "run": "random", "seed": 0}
    curve = {"times": [0.0, 10.0, 20.0, 30.0, 40.0], "accuracies": [0.1, 0.6, 0.7, 0.85, 0.91]}
    return row | curve | {"equal_epochs_time": 30.0, "samples_processed": 360} | changes


def test_a_speedup_is_the_baselines_time_to_the_target_over_ones_own() -> None:
    own, other = standings([baseline_row(), other_row()], target_gap=0.1)
    assert own.target == pytest.approx(0.8)
    assert (own["time to target"], own["speed-up"]) == (80.0, 1.0)
    assert other["time to target"] == 30.0
    assert other["speed-up"] == pytest.approx(80 / 30)
    assert other["of the bound"] == pytest.approx(80 / 30 / 2.38)
    assert other["speed-up, equal epochs"] == 4.0
    assert other["accuracy loss, equal epochs"] == pytest.approx(0.05)
    assert other[LOSS] == pytest.approx(-0.01)
    assert own["of the bound"] is None


def test_final_accuracy_is_also_that_after_as_many_samples_as_the_baseline() -> None:
    for is_smoothed in (False, True):  # a smoothed curve ends before the run does
        own, other = standings([baseline_row(), other_row()], 0.1, is_smoothed=is_smoothed)
        # 300 of 360 samples take 33.3 s; from 26.7 s on the curve is at 0.8, 0.85 and 0.87.
        assert other["final accuracy, equal samples"] == pytest.approx((0.825 + 0.86) / 2)
        # From 96 of 120 s the curve rises from 0.84 to 0.9.
        assert own["final accuracy, equal samples"] == pytest.approx(0.87)
    for samples, is_known in ((290, False), (298, True)):
        _, other = standings([baseline_row(), other_row(samples_processed=samples)], 0.1)
        assert (other["final accuracy, equal samples"] is not None) == is_known


def test_runs_are_compared_with_their_own_seed_only() -> None:
    later = {"epoch_ends": [0.0, 400.0, 800.0, 1200.0]}
    times = baseline_row()["setups"]["uneven"] | later
    rows = [
        baseline_row(),
        baseline_row(seed=1, setups={"uneven": times}),
        other_row(),
        other_row(seed=1),
    ]
    others = [each for each in standings(rows, 0.1) if each.run == "random"]
    found = {each.seed: each["speed-up"] for each in others}
    assert found == {0: pytest.approx(80 / 30), 1: pytest.approx(800 / 30)}


def test_who_never_gets_there_counts_as_slowest_in_the_median() -> None:
    never = {"accuracies": [0.1] * 5, "equal_epochs_time": None}
    rows = [baseline_row(seed=seed) for seed in (0, 1, 2)]
    rows += [other_row(), other_row(seed=1, **never), other_row(seed=2, **never)]
    found = standings(rows, 0.1)
    table = race_table(found, "x", 0.1, dash="never")
    assert table.columns[0] == ("run", "text")  # there is one part, on one setup
    [random] = [row for row in table.rows if row[0] == "random"]
    line = {title: value for (title, _), value in zip(table.columns, random, strict=True)}
    assert line["time to target"] is None
    assert line["speed-up"] is None
    assert line["bound"] == 2.38
    others = [each for each in found if each.run != BASELINE]
    assert LOSS not in line  # figures alone have it
    panel = bars(others, "speed-up", y_label="", mark=("throughput bound", "bound"))
    assert (panel.title, panel.y_unit) == ("Speed-up", "times")
    assert [(each.name, each.y) for each in panel.series] == [
        ("random", (None,)),
        ("throughput bound", (2.38,)),
    ]


def test_in_a_median_never_is_later_and_slower_than_anything() -> None:
    never = {"accuracies": [0.1] * 5, "equal_epochs_time": None}
    sooner = {"accuracies": [0.1, 0.85, 0.9, 0.9, 0.9]}
    rows = [baseline_row(seed=seed) for seed in (0, 1, 2)]
    rows += [other_row(), other_row(seed=1, **never), other_row(seed=2, **sooner)]
    table = race_table(standings(rows, 0.1), "x", 0.1, dash="never")
    [random] = [row for row in table.rows if row[0] == "random"]
    line = {title: value for (title, _), value in zip(table.columns, random, strict=True)}
    assert line["time to target"] == 30.0  # of 10, 30 and never
    assert line["speed-up"] == pytest.approx(80 / 30)
    assert line["accuracy loss, equal epochs"] == pytest.approx(0.05)  # of 0, 0.05 and unknown


def test_a_study_is_shown_before_anybody_has_raced() -> None:
    study = load_study("edgegossip/speedup")(StudySettings(short=True))
    exhibits = study.exhibit({"first": baseline_row()})
    [figure] = exhibits.figures
    assert [each.y for each in figure.panels[0].series] == [()]
    assert len(exhibits.tables) == 3
    for table in exhibits.tables:
        assert [row[0] for row in table.rows] == [BASELINE]
