"""Tuned parameter servers: the search ends inside its grids, by the same rule for all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import studies.servers
from hypothesis import given, strategies as st
from studies.problems import SMALL_MLP
from studies.servers import (
    FIRST_RATE,
    OPTIONS,
    RATES,
    Cluster,
    Goal,
    ServerContest,
    Tuning,
    climb,
    converged_scores,
    machines,
    tuning_exhibits,
)

from edgegossip.recipes.problems import Problem
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.study import Row, Session, Study, run_study

GOAL = Goal(loss=1.0, look_seconds=1.0, max_seconds=500.0, validation_share=0.2)
MACHINES = machines("H = 2", SMALL_MLP, num_workers=2, heterogeneity=2.0)
NOWHERE = Path("nowhere")


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=12).flatmap(
        lambda merits: st.tuples(st.just(merits), st.integers(0, len(merits) - 1))
    )
)
def test_a_walk_ends_where_both_neighbors_were_tried_and_none_is_better(
    case: tuple[list[int], int],
) -> None:
    merits, start = case
    tried = set[int]()

    def merit(place: int) -> int:
        tried.add(place)
        return merits[place]

    end = climb(start, merit, range(len(merits)))
    neighbors = {end - 1, end + 1} & {*range(len(merits))}
    assert neighbors <= tried
    assert all(merits[each] <= merits[end] for each in neighbors)


class Pretended:
    """Runs that take longer, the farther their settings are from the best."""

    def __init__(self, best_lr: float, best_value: float | None) -> None:
        self.best = best_lr, best_value
        self.runs: list[tuple[float, float | None, float, float, int]] = []

    def __call__(
        self,
        problem: Problem,
        data_dir: Path,
        cluster: Cluster,
        goal: Goal,
        name: str,
        value: float | None,
        seed: int,
        session: Session,
    ) -> Mapping[str, Any]:
        lr = problem.settings.lr
        self.runs.append((lr, value, goal.max_seconds, problem.held_out, seed))
        time = 50 + 20 * abs(math.log(lr / self.best[0]))
        if value is not None:
            assert self.best[1] is not None
            time += 30 * abs(math.log(value / self.best[1]))
        is_there = time <= goal.max_seconds
        return {
            "seconds_to_loss": time if is_there else None,
            "seconds": min(time, goal.max_seconds),
            "losses": [1.0 if is_there else time],
            "times": [1.0],
            "accuracies": [0.5],
        }


@pytest.mark.parametrize(
    ("name", "lr", "value"),
    [
        ("bsp", 1.35, None),
        ("fixed-adacomm", 0.45, 2),
        ("fixed-adacomm", 0.05, 80),
        ("adsp-plus", 0.26, 24),
    ],
)
def test_a_search_walks_to_the_best_settings(
    name: str, lr: float, value: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretended = Pretended(lr, value)
    monkeypatch.setattr(studies.servers, "until_loss", pretended)
    search = _search(name)
    [row] = _rows(search.cells(NOWHERE), tmp_path)
    assert (row["lr"], row["value"]) == (lr, value)
    assert (
        len(row["trials"]) == len(pretended.runs) == len({each[:2] for each in pretended.runs})
    )
    tried = {(each["lr"], each["value"]) for each in row["trials"]}
    place = RATES.index(lr)
    assert {(RATES[place - 1], value), (RATES[place + 1], value)} <= tried
    option = OPTIONS[name]
    if option is not None:
        place = option.values.index(value or 0)
        assert {option.values[place - 1], option.values[place + 1]} <= {
            each[1] for each in tried
        }
    # The limit is the best time so far, and trials see neither test samples nor other seeds.
    assert pretended.runs[0][:1] == (RATES[FIRST_RATE],)
    times = (each["seconds_to_loss"] or math.inf for each in row["trials"])
    *limits, _ = accumulate(times, min, initial=GOAL.max_seconds)
    assert [each[2] for each in pretended.runs] == limits
    assert {each[3:] for each in pretended.runs} == {(GOAL.validation_share, 100)}
    table = tuning_exhibits([search], {"a": row}).tables[0]
    assert [line[-1] for line in table.rows].count("best") == 1


def test_results_have_the_settings_that_the_search_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretended = Pretended(0.78, 3)
    monkeypatch.setattr(studies.servers, "until_loss", pretended)
    search = _search("fixed-adacomm")
    contest = ServerContest(
        problem=SMALL_MLP, seed=7, machines=MACHINES, goal=GOAL, choices=search
    )
    *_, row = _rows([*search.cells(NOWHERE), *contest.cells(NOWHERE)], tmp_path)
    assert (row["lr"], row["value"], row["seed"]) == (0.78, 3, 7)
    assert pretended.runs[-1] == (0.78, 3, GOAL.max_seconds, 0.0, 7)


def test_all_rates_diverging_ends_the_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def diverges(*_: object) -> Row:
        return {
            **{"seconds_to_loss": None, "seconds": 500.0},
            **{"losses": [], "times": [], "accuracies": []},
        }

    monkeypatch.setattr(studies.servers, "until_loss", diverges)
    [row] = _rows(_search("asp").cells(NOWHERE), tmp_path)
    assert [each["loss"] for each in row["trials"]] == [None] * 3


def test_the_end_of_a_run_is_where_its_smoothed_loss_is_lowest() -> None:
    losses = [*range(20, 0, -1), *range(1, 11)]
    row = {"group": "a", "setting": "b", "run": "c", "seed": 0, "losses": losses}
    row |= {"times": [*range(30)], "accuracies": [each / 100 for each in range(30)]}
    [found] = converged_scores([row])
    # Ten evaluations, five on each side of the lowest.
    assert {name: value for name, (_, value) in found.measures.items()} == {
        "lowest loss": 3.0,
        "reached after": 24,
        "accuracy there": pytest.approx(0.195),
        "best accuracy": pytest.approx(0.245),
        "accuracy at the end": pytest.approx(0.245),
    }


def _search(name: str) -> Tuning:
    return Tuning(problem=SMALL_MLP, seed=100, machines=MACHINES, goal=GOAL, methods=(name,))


def _rows(cells: Any, out: Path) -> list[Row]:  # noqa: ANN401
    study = Study(
        name="test/servers",
        title="",
        printed=(),
        settings={},
        cells=tuple(cells),
        exhibit=lambda rows: Exhibits(),
    )
    return [*run_study(study, out=out, num_threads=0).values()]
