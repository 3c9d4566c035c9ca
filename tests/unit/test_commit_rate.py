"""Rewards of commit rates, and the search that goes by them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from edgegossip.algorithms.server.commit_search import CommitSearch, implicit_momentum
from edgegossip.algorithms.server.reward import (
    ConstrainedFit,
    LogSlope,
    Look,
    PaperReward,
    Reward,
)

ROBUST = [LogSlope(), ConstrainedFit()]
losses = st.floats(0.01, 100.0)


def curve(num_looks: int, a: float, b: float, c: float) -> list[Look]:
    """Losses 1 / (a t + b) + c of a window of 60 s."""
    times = [60.0 * k / (num_looks - 1) for k in range(num_looks)]
    return [(t, 1 / (a * t + b) + c) for t in times]


@pytest.mark.parametrize("reward", ROBUST)
@given(start=losses, rises=st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6))
def test_a_loss_that_rises_is_never_a_reward(
    reward: Reward, start: float, rises: list[float]
) -> None:
    looks, loss = [(0.0, start)], start
    for k, rise in enumerate(rises, 1):
        loss += rise
        looks.append((10.0 * k, loss))
    assert reward(looks) <= 1e-9


@pytest.mark.parametrize("reward", ROBUST)
def test_a_loss_that_is_not_finite_is_the_worst(reward: Reward) -> None:
    looks = [*curve(6, 0.01, 0.5, 0.1), (61.0, math.inf)]
    assert reward(looks) == -math.inf


@pytest.mark.parametrize("reward", [*ROBUST, PaperReward(final_loss=0.4)])
def test_a_loss_that_falls_faster_is_rewarded_more(reward: Reward) -> None:
    slow, fast = (reward(curve(reward.num_looks, a, 0.5, 0.1)) for a in (0.005, 0.02))
    assert 0 < slow < fast


def test_the_constrained_fit_finds_the_curve_that_is_there() -> None:
    looks = curve(7, 0.02, 0.5, 0.0)
    expected = (looks[0][1] - looks[-1][1]) / (60 * looks[0][1])
    assert ConstrainedFit()(looks) == pytest.approx(expected, rel=1e-6)


def test_the_papers_reward_predicts_the_speed_to_the_final_loss() -> None:
    # 1 / (a^2 t + b) + c is 0.7 when t = (1 / (0.7 - c) - b) / a^2: the reward is 1 / t.
    a, b, c = 0.02, 0.5, 0.1
    expected = a / (1 / (0.7 - c) - b)
    assert PaperReward()(curve(3, a, b, c)) == pytest.approx(expected, rel=1e-3)


def test_the_papers_reward_may_praise_a_loss_that_rises() -> None:
    # Losses below the final one turn the sign.
    looks = [(0.0, 0.60), (30.0, 0.59), (60.0, 0.69)]
    assert PaperReward()(looks) != 0.0
    assert LogSlope()(looks) < 0


def test_the_search_keeps_the_rate_before_the_first_that_does_no_better() -> None:
    search = CommitSearch()
    for reward in (0.1, 0.3, 0.2):
        assert search.is_searching
        search.judge(reward, max_rate=10)
    assert (search.rate, search.is_searching) == (2, False)
    search.begin()
    assert (search.rate, search.is_searching) == (2, True)


def test_a_search_without_any_reward_goes_up_to_the_highest_rate_and_ends() -> None:
    search = CommitSearch()
    rates = []
    for _ in range(12):
        rates.append(search.rate)
        if search.is_searching:
            search.judge(-1.0, max_rate=4)
    assert rates[:4] == [1, 2, 3, 4]
    assert search.rate == 4
    assert not search.is_searching


def test_fewer_commits_mean_more_implicit_momentum() -> None:
    momenta = [implicit_momentum([steps] * 18) for steps in (1, 2, 10, 100)]
    assert momenta == sorted(momenta)
    assert momenta[0] == pytest.approx(1 - 1 / 18)


def test_rates_double_until_that_does_not_help() -> None:
    search = CommitSearch(growth=2.0)
    tried = []
    for reward in (1.0, 2.0, 3.0, 2.5):
        tried.append(search.rate)
        search.judge(reward, max_rate=10)
    assert tried == [1, 2, 4, 8]
    assert (search.rate, search.is_searching) == (4, False)
    search.begin()
    assert search.rate == 4


def test_a_loss_that_ends_above_its_start_is_no_reward_though_the_fitted_line_falls() -> None:
    looks = [(0.0, 1.0), (1.0, 1.4), (2.0, 1.3), (3.0, 0.7), (4.0, 0.7), (5.0, 0.6), (6.0, 1.1)]
    assert LogSlope()(looks) == 0.0


def test_a_later_search_does_not_compare_with_an_earlier_one() -> None:
    search = CommitSearch(rate=4, best_reward=7.0, is_searching=False)
    search.begin()
    search.judge(0.1, max_rate=9)
    assert search.is_searching
    assert (search.rate, search.best_rate) == (5, 4)
