"""How long work takes, by hand: speeds, executors, contention over time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from edgegossip.machine.contention import Contention
from edgegossip.sim.platform import (
    ContentionTrace,
    Platform,
    Sensitivity,
    ThrottlingTrace,
    paper,
    uneven,
)

# Halves the speed exactly: 1 / (1 - 0.5 * 1).
HALVED = Contention(cores=1.0)
SENSITIVITY = Sensitivity(cores=0.5, network=0.5, disk=0.25)


def loaded(
    *pieces: tuple[float, Contention], period: float = math.inf, throughput: float = 10.0
) -> Platform:
    times, contentions = zip(*pieces, strict=True)
    trace = ContentionTrace(times, contentions, period)
    return Platform(throughput=throughput, trace=trace, sensitivity=SENSITIVITY)


def test_executors_share_the_work() -> None:
    assert Platform(throughput=100.0, executors=4).duration(start=7.0, cost=100) == 0.25


def test_an_idle_trace_changes_nothing() -> None:
    assert loaded((0.0, Contention())).duration(start=3.0, cost=25) == 2.5


def test_slow_down_is_that_of_the_formula() -> None:
    contention = Contention(cores=0.5, network=2.0, disk=4.0)
    assert SENSITIVITY.slow_down(contention) == pytest.approx(1 / 0.75 + 1.0 + 1.0)


def test_work_is_integrated_over_the_trace() -> None:
    # 10 samples/s for 1 s, then 5: 20 samples are there 2 s after the load came.
    assert loaded((0.0, Contention()), (1.0, HALVED)).duration(start=0.0, cost=20) == 3.0


def test_work_that_starts_under_load_ends_without_it() -> None:
    # 2 s at 5 samples/s, the other 15 at 10.
    platform = loaded((0.0, HALVED), (4.0, Contention()))
    assert platform.duration(start=2.0, cost=25) == 3.5


def test_work_that_ends_where_the_load_changes_is_not_slowed() -> None:
    platform = loaded((0.0, Contention()), (1.0, HALVED))
    assert platform.duration(start=0.0, cost=10) == 1.0
    assert platform.duration(start=1.0, cost=10) == 2.0


def test_a_trace_repeats_after_its_period() -> None:
    # Each period of 4 s does 10 * 1 + 5 * 3 = 25 samples.
    platform = loaded((0.0, Contention()), (1.0, HALVED), period=4.0)
    assert platform.duration(start=0.0, cost=25 * 3) == pytest.approx(12.0)
    assert platform.duration(start=5.0, cost=20) == pytest.approx(3.5)
    assert platform.contention(8.5) == Contention()
    assert platform.contention(9.5) == HALVED


def test_no_work_takes_no_time() -> None:
    assert loaded((0.0, HALVED)).duration(start=1.0, cost=0) == 0.0


@given(
    start=st.floats(0, 1e4),
    first=st.floats(0, 500),
    second=st.floats(0, 500),
    period=st.floats(0.7, 20),
)
def test_pieces_of_work_take_as_long_as_the_whole(
    start: float, first: float, second: float, period: float
) -> None:
    platform = loaded((0.0, HALVED), (0.3, Contention()), (0.6, HALVED), period=period)
    whole = platform.duration(start, first + second)
    middle = platform.duration(start, first)
    rest = platform.duration(start + middle, second)
    assert middle + rest == pytest.approx(whole, rel=1e-6, abs=1e-6)
    alone = (first + second) / 10
    assert alone <= whole * (1 + 1e-9) + 1e-9
    assert whole <= 2 * alone * (1 + 1e-9) + 1e-9


def test_throttling_slows_down_and_no_monitor_shows_it() -> None:
    throttling = ThrottlingTrace((0.0, 2.0), (1.0, 1.25), period=4.0)
    platform = Platform(throughput=10.0, throttling=throttling)
    # 20 samples in the first 2 s, 16 in the next.
    assert platform.duration(start=0.0, cost=36 + 10) == pytest.approx(5.0)
    assert platform.mean_contention(2.0, 3.0) == Contention()


def test_throttling_and_contention_multiply() -> None:
    trace = ContentionTrace((0.0, 1.0), (Contention(), HALVED))
    platform = Platform(
        throughput=10.0,
        trace=trace,
        throttling=ThrottlingTrace((0.0, 3.0), (1.0, 2.0)),
        sensitivity=SENSITIVITY,
    )
    # 10 in the first second, 5 in each of the next two, then 2.5.
    assert platform.duration(start=0.0, cost=25) == 5.0


@given(start=st.floats(0, 1e4), cost=st.floats(0.1, 500), period=st.floats(0.7, 20))
def test_what_is_done_in_the_time_that_work_takes_is_that_work(
    start: float, cost: float, period: float
) -> None:
    platform = loaded((0.0, HALVED), (0.3, Contention()), (0.6, HALVED), period=period)
    end = start + platform.duration(start, cost)
    assert platform.work(start, end) == pytest.approx(cost, rel=1e-6, abs=1e-6)


@given(start=st.floats(0, 100), seconds=st.floats(0.01, 100))
def test_the_mean_contention_is_that_of_the_shares_of_time(
    start: float, seconds: float
) -> None:
    # Without a period: loaded during the third second only.
    platform = loaded((0.0, Contention()), (2.0, HALVED), (3.0, Contention()))
    overlap = max(0.0, min(3.0, start + seconds) - max(2.0, start))
    mean = platform.mean_contention(start, start + seconds)
    assert mean.cores == pytest.approx(overlap / seconds, abs=1e-6)


def test_throttling_never_speeds_up() -> None:
    with pytest.raises(ValueError, match="slow-downs must be at least 1"):
        ThrottlingTrace((0.0,), (0.9,))
    with pytest.raises(ValueError, match="one value a time, got 1 times and 2"):
        ThrottlingTrace((0.0,), (1.0, 2.0))


@given(now=st.floats(0, 1e9), period=st.floats(0.11, 1e3))
def test_the_next_contention_always_begins_later(now: float, period: float) -> None:
    trace = ContentionTrace((0.0, 0.1), (HALVED, Contention()), period)
    assert trace.at(now)[1] > now


def test_a_monitor_sees_an_idle_machine_where_there_is_no_trace() -> None:
    assert Platform(throughput=1.0).contention(5.0) == Contention()


@pytest.mark.parametrize("throughput", [0.0, -1.0, math.inf, math.nan])
def test_a_throughput_out_of_range_is_refused(throughput: float) -> None:
    with pytest.raises(ValueError, match="throughput must be above 0"):
        Platform(throughput=throughput)


@pytest.mark.parametrize(
    "cost", ["seconds_per_training", "seconds_per_byte", "seconds_per_message"]
)
@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan])
def test_a_cost_out_of_range_is_refused(cost: str, value: float) -> None:
    with pytest.raises(ValueError, match=cost):
        Platform(throughput=1.0, **{cost: value})  # type: ignore[arg-type]


def test_a_platform_without_executors_is_refused() -> None:
    with pytest.raises(ValueError, match="executors must be at least 1, got 0"):
        Platform(throughput=1.0, executors=0)


@pytest.mark.parametrize(
    "contention", [{"cores": 1.5}, {"cores": -0.1}, {"network": -1.0}, {"disk": math.nan}]
)
def test_a_contention_out_of_range_is_refused(contention: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="cores must be in"):
        Contention(**contention)


@pytest.mark.parametrize("sensitivity", [{"cores": 1.0}, {"network": -1.0}, {"disk": -1.0}])
def test_a_sensitivity_out_of_range_is_refused(sensitivity: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="sensitivities"):
        Sensitivity(**sensitivity)


@pytest.mark.parametrize(
    ("times", "period", "message"),
    [
        ((), math.inf, "one value a time"),
        ((0.0,), math.inf, "one value a time"),
        ((1.0, 2.0), math.inf, "ascend from 0"),
        ((0.0, 0.0), math.inf, "ascend from 0"),
        ((0.0, 2.0), 2.0, "before the period"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(
    times: tuple[float, ...], period: float, message: str
) -> None:
    contentions = (HALVED, HALVED) if times else (HALVED,)
    with pytest.raises(ValueError, match=message):
        ContentionTrace(times, contentions, period)


def test_uneven_platforms_cycle_through_the_speeds() -> None:
    speeds = [platform.throughput for platform in uneven(6, 100.0)]
    assert speeds == [100.0, 80.0, 33.0, 25.0, 100.0, 80.0]


def test_the_papers_platforms_differ_three_times() -> None:
    speeds = [platform.total_throughput for platform in paper()]
    assert max(speeds) / min(speeds) == 3
