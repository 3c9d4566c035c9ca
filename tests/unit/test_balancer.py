"""Algorithm 1: all end together, the fastest with all of its data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgegossip.algorithms.wrappers.edge_gossip.balancer import Balancer


def test_worked_example() -> None:
    # T = 10, 20, 5, 40 s: the third platform is the fastest with what it has.
    shares = Balancer().balance([100, 50, 100, 25], [1000, 1000, 500, 1000])
    assert shares.seconds.tolist() == [10, 20, 5, 40]
    assert shares.keep_ratios.tolist() == [0.5, 0.25, 1.0, 0.125]
    assert not shares.has_failed.any()


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.floats(0.01, 1e5), st.integers(1, 10**6)), min_size=1, max_size=20)
)
def test_the_slowest_takes_exactly_as_long_as_the_fastest(
    platforms: list[tuple[float, int]],
) -> None:
    throughputs, sizes = zip(*platforms, strict=True)
    shares = Balancer().balance(throughputs, sizes)
    seconds = shares.keep_ratios * shares.seconds
    np.testing.assert_allclose(seconds, shares.seconds.min(), rtol=1e-12)
    assert ((shares.keep_ratios > 0) & (shares.keep_ratios <= 1)).all()
    assert shares.keep_ratios.max() == 1.0


def test_failed_platforms_get_nothing_and_do_not_count() -> None:
    shares = Balancer().balance([100, 0, 0.0005, 50], [1000, 1, 1, 1000])
    assert shares.keep_ratios.tolist() == [1.0, 0.0, 0.0, 0.5]
    assert shares.has_failed.tolist() == [False, True, True, False]
    assert shares.seconds[1] == shares.seconds[2] == math.inf
    assert shares.failed_share == 0.5


@pytest.mark.parametrize(("num_failed", "is_too_many"), [(1, False), (2, False), (3, True)])
def test_too_many_failures_are_more_than_the_share_that_is_allowed(
    num_failed: int, is_too_many: bool
) -> None:
    balancer = Balancer(max_failed_share=0.2)
    throughputs = [0.0] * num_failed + [1.0] * (10 - num_failed)
    shares = balancer.balance(throughputs, [5] * 10)
    assert balancer.has_too_many_failures(shares) == is_too_many


def test_a_platform_exactly_at_the_threshold_has_not_failed() -> None:
    balancer = Balancer(min_throughput=2.0)
    below = math.nextafter(2.0, 0)
    assert balancer.balance([2.0, below], [1, 1]).has_failed.tolist() == [False, True]


def test_a_platform_that_stands_still_has_failed_whatever_the_threshold() -> None:
    shares = Balancer(min_throughput=0.0).balance([0.0, 1e-9], [1, 1])
    assert shares.has_failed.tolist() == [True, False]
    assert shares.keep_ratios.tolist() == [0.0, 1.0]


def test_a_platform_without_data_is_not_the_fastest() -> None:
    shares = Balancer().balance([1000, 10, 5], [0, 100, 100])
    assert shares.keep_ratios.tolist() == [0.0, 1.0, 0.5]
    assert not shares.has_failed.any()


def test_when_all_have_failed_nobody_trains() -> None:
    shares = Balancer().balance([0.0, 0.0], [1, 1])
    assert shares.keep_ratios.tolist() == [0.0, 0.0]
    assert shares.failed_share == 1.0


@pytest.mark.parametrize(
    ("throughputs", "sizes", "message"),
    [
        ([], [], r"give one throughput .* got shapes \[0\] and \[0\]"),
        ([1.0], [1, 2], r"got shapes \[1\] and \[2\]"),
        ([[1.0]], [[1]], r"got shapes \[1, 1\]"),
        ([-1.0], [1], "throughputs must be finite and at least 0"),
        ([math.nan], [1], "throughputs must be finite"),
        ([math.inf], [1], "throughputs must be finite"),
        ([1.0], [-1], "num_samples must be finite and at least 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    throughputs: list[float], sizes: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Balancer().balance(throughputs, sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_throughput": -1.0}, "min_throughput must be at least 0 and finite, got -1"),
        ({"min_throughput": math.inf}, "min_throughput must be at least 0 and finite"),
        ({"max_failed_share": 1.1}, r"max_failed_share must be in \[0, 1\], got 1.1"),
        ({"max_failed_share": -0.1}, r"max_failed_share must be in \[0, 1\]"),
    ],
)
def test_thresholds_out_of_range_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Balancer(**changes)


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=20), st.integers(1, 500))
def test_nobody_waits_in_a_round_for_as_long_as_one_of_its_own_steps(
    throughputs: list[float], num_steps: int
) -> None:
    shares = Balancer().balance(throughputs, [1000] * len(throughputs))
    steps, speeds = shares.steps(num_steps), np.asarray(throughputs)
    assert (steps >= 1).all()
    assert steps.max() <= 4 * num_steps
    seconds = steps / speeds
    slowest = speeds.argmin()
    assert (seconds <= seconds[slowest] * (1 + 1e-8)).all()
    if seconds[slowest] * speeds.max() > 4 * num_steps:
        return  # others do wait for one that is so slow
    assert (seconds + 1 / speeds > seconds[slowest] * (1 - 1e-8)).all()
    # A round is as near to what was asked for as whole steps of the slowest allow.
    wanted = num_steps * speeds[slowest] / speeds.max()
    assert abs(steps[slowest] - wanted) <= max(0.5, 1 - wanted) + 1e-6


def test_equally_fast_platforms_take_the_steps_that_were_asked_for() -> None:
    shares = Balancer().balance([3.0, 3.0, 0.0], [1000] * 3)
    assert shares.steps(7).tolist() == [7, 7, 0]
    assert Balancer().balance([0.0], [1000]).steps(7).tolist() == [0]
    assert (shares.step_ratio(0, None), shares.step_ratio(2, None)) == (1.0, 0.0)


def test_a_share_of_a_round_has_whole_steps_as_well() -> None:
    shares = Balancer().balance([100.0, 90.0, 30.0], [1000] * 3)
    assert [16 * shares.step_ratio(rank, 16, 0.5) for rank in range(3)] == [6, 6, 2]
