"""Successive halving spends what it may, and no more."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from edgegossip.plan.halving import (
    FACTOR,
    SHORTEST,
    Cost,
    Ranking,
    ladders,
    most_whole_runs,
    total_cost,
)

NUMBERS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 30), min_size=1)


@given(NUMBERS, st.floats(0, 24))
def test_no_candidate_gets_more_than_its_budget(
    numbers: dict[str, int], whole_runs: float
) -> None:
    for name, ladder in ladders(numbers, whole_runs).items():
        assert ladder.cost(Cost(start=0.0, whole=1.0)) <= whole_runs * (1 + 1e-9)
        assert ladder.num_settings <= numbers[name]


@given(NUMBERS, st.floats(0, 24))
def test_rungs_grow_longer_and_narrower_by_one_factor(
    numbers: dict[str, int], whole_runs: float
) -> None:
    for ladder in ladders(numbers, whole_runs).values():
        for one, other in zip(ladder.rungs, ladder.rungs[1:], strict=False):
            assert other.share == pytest.approx(FACTOR * one.share)
            assert other.num_settings == -(-one.num_settings // FACTOR)
        if ladder.rungs:
            assert ladder.rungs[0].num_settings == ladder.num_settings
            assert ladder.rungs[0].share >= SHORTEST * (1 - 1e-9)
            assert 1 < ladder.rungs[-1].num_settings <= FACTOR


def test_all_last_rungs_are_equally_long_and_the_rest_goes_to_seeds() -> None:
    found = ladders({"many": 27, "few": 3}, whole_runs=9.0)
    assert [rung.num_settings for rung in found["many"].rungs] == [27, 9, 3]
    assert found["many"].rungs[-1].share == found["few"].rungs[-1].share == 1.0
    assert found["few"].rungs[0].num_seeds == 3


def test_a_small_budget_tries_fewer_settings_and_a_smaller_one_none() -> None:
    numbers = {"gosgd": 15, "bsp": 5}
    tried = [
        [ladder.num_settings for ladder in ladders(numbers, whole_runs).values()]
        for whole_runs in (6.0, 0.5, 0.1, 0.05)
    ]
    assert tried == [[15, 5], [9, 5], [3, 3], [1, 1]]
    assert all(not ladder.rungs for ladder in ladders(numbers, 0.0).values())


def test_the_budget_buys_as_much_as_it_can() -> None:
    numbers = {"slow": 9, "fast": 3}
    costs = {"slow": Cost(start=1.0, whole=10.0), "fast": Cost(start=0.0, whole=2.0)}
    ranking = Ranking(num_candidates=2, num_seeds=3)
    for budget in (40.0, 100.0, 300.0):
        found = most_whole_runs(numbers, costs, ranking, budget)
        assert found is not None
        assert total_cost(ladders(numbers, found), costs, ranking) <= budget
        assert total_cost(ladders(numbers, found + 0.25), costs, ranking) > budget
    assert most_whole_runs(numbers, costs, ranking, budget=38.0) is None


def test_finalists_run_three_times_as_many_seeds() -> None:
    costs = dict.fromkeys("abcdefghij", Cost(start=0.0, whole=1.0))
    assert Ranking(num_candidates=10, num_seeds=3).cost(costs) == pytest.approx(10 * 3 + 3 * 6)
