"""Curves with equally many looks."""

from __future__ import annotations

import pytest
from studies.race_scores import smoothed


def test_many_looks_and_few_at_the_same_curve_are_the_same_afterwards() -> None:
    few = {"times": [0.0, 2.0, 4.0], "accuracies": [0.1, 0.3, 0.5]}
    many = {"times": [0.0, 1.0, 2.0, 3.0, 4.0], "accuracies": [0.1, 0.1, 0.3, 0.3, 0.5]}
    assert smoothed(few, 2.0) == smoothed(many, 2.0)


def test_a_lucky_look_counts_for_no_more_than_its_time() -> None:
    row = {"times": [0.0, 0.9, 1.0, 2.0], "accuracies": [0.5, 0.9, 0.5, 0.5]}
    assert smoothed(row, 1.0)["accuracies"] == pytest.approx([0.54, 0.5])


def test_the_rest_of_the_row_stays() -> None:
    row = {"times": [0.0, 1.0], "accuracies": [0.5, 0.6], "run": "random"}
    assert smoothed(row, 1.0) == {"times": [1.0], "accuracies": [0.5], "run": "random"}


def test_a_width_that_does_not_divide_the_run_leaves_its_end_out() -> None:
    row = {"times": [0.0, 1.0, 2.5], "accuracies": [0.2, 0.4, 0.9]}
    assert smoothed(row, 1.0)["times"] == [1.0, 2.0]


def test_rounded_times_keep_the_last_interval() -> None:
    row = {"times": [12.565, 301.55], "accuracies": [0.2, 0.4]}
    assert smoothed(row, 12.565)["times"][-1] == pytest.approx(24 * 12.565)
