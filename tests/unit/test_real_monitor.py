"""Forecasts and records of a real machine's monitor; its counters and clock are ours."""

from __future__ import annotations

import logging
import math
import threading
import time

import pytest
from tests.counted import Counted

from edgegossip.machine.contention import Contention
from edgegossip.machine.counters import Usage
from edgegossip.machine.monitor import Executors, Monitor
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.machine.profile import Profile
from edgegossip.machine.telemetry import Journal, MemoryTelemetry, Sample
from edgegossip.sim.machines import SimulatedMonitor, default_predictor
from edgegossip.sim.platform import ContentionTrace, Platform, Sensitivity

SPEED = 100.0
PROFILE = Profile(
    [Contention(cores=k / 20) for k in range(21)], [(1 + k / 20) / SPEED for k in range(21)]
)
"""A busy machine is half as fast."""


def fitted() -> PerformancePredictor:
    return PerformancePredictor().fit(PROFILE)


def make(
    counted: Counted,
    predictor: PerformancePredictor | None = None,
    journal: Journal | None = None,
    executors: Executors | None = None,
) -> Monitor:
    return Monitor(
        predictor or fitted(),
        counters=counted,
        journal=journal,
        executors=executors,
        clock=counted.clock,
        wall_clock=lambda: 1e9 + counted.now,
    )


def spend(counted: Counted, monitor: Monitor, seconds: int, cores: float = 0.0) -> None:
    """Let time pass while others use a share of the two cores; the thread's readings."""
    for _ in range(seconds):
        counted.pass_by(1.0, machine=Usage(2 * cores))
        monitor.read()


def test_a_profile_tells_the_first_forecast() -> None:
    counted = Counted()
    monitor = make(counted)
    assert monitor.forecast(0.0).throughput == pytest.approx(SPEED, rel=0.01)
    spend(counted, monitor, 2, cores=1.0)
    assert monitor.forecast(2.0).throughput == pytest.approx(SPEED / 2, rel=0.02)


def test_without_anything_known_there_is_no_forecast() -> None:
    with pytest.raises(ValueError, match="fit a profile, observe, or give seconds_alone"):
        make(Counted(), PerformancePredictor()).forecast(0.0)


def test_without_a_profile_the_speed_of_training_tells() -> None:
    counted = Counted()
    monitor = make(counted, PerformancePredictor())
    spend(counted, monitor, 2)
    monitor.trained(0.0, 2.0, 80.0)
    assert monitor.forecast(2.0).throughput == pytest.approx(40.0)


def test_a_load_that_comes_within_a_long_stretch_leaves_the_base_time_right() -> None:
    counted = Counted()
    monitor = make(counted)
    spend(counted, monitor, 5)
    spend(counted, monitor, 5, cores=1.0)
    # 5 s at full speed, 5 s at half.
    monitor.trained(0.0, 10.0, 7.5 * SPEED)
    assert monitor.forecast(10.0).throughput == pytest.approx(SPEED / 2, rel=0.02)
    spend(counted, monitor, 2)
    assert monitor.forecast(12.0).throughput == pytest.approx(SPEED, rel=0.02)


def test_a_slow_down_that_no_counter_shows_is_followed() -> None:
    counted = Counted()
    monitor = make(counted)
    for start in range(0, 8, 2):
        spend(counted, monitor, 2)
        monitor.trained(start, start + 2, 2 * SPEED / 1.5)
        found = monitor.forecast(start + 2).throughput
        assert found == pytest.approx(SPEED / 1.5, rel=0.01)


def test_many_short_steps_say_the_same_as_one_long_stretch() -> None:
    found = []
    for num_steps in (1, 400):
        counted = Counted()
        monitor = make(counted)
        spend(counted, monitor, 4, cores=0.5)
        for step in range(num_steps):
            start = 4 * step / num_steps
            monitor.trained(start, start + 4 / num_steps, 320.0 / num_steps)
        found.append(monitor.forecast(4.0).throughput)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("last_step", [0.5, 2.0])
@pytest.mark.parametrize("asks_before", [False, True])
def test_a_round_that_ends_with_a_single_step_is_not_judged_by_that_alone(
    last_step: float, asks_before: bool
) -> None:
    """A quota that is spent lets one step run through, and the next one wait."""
    counted = Counted()
    monitor = make(counted)
    usual = 0.02
    for round_ in range(4):
        start = 3.0 * round_
        spend(counted, monitor, 2)
        for step in range(99):
            monitor.trained(start + step * usual, start + (step + 1) * usual, usual * SPEED)
        if asks_before:
            assert monitor.forecast(start + 2.0).throughput == pytest.approx(SPEED, rel=0.1)
        spend(counted, monitor, 1)
        monitor.trained(start + 2.5, start + 2.5 + last_step * usual, usual * SPEED)
        found = monitor.forecast(start + 3.0).throughput
        assert found == pytest.approx(SPEED, rel=0.1)


def test_what_was_too_short_to_be_judged_counts_later() -> None:
    counted = Counted()
    monitor = make(counted, PerformancePredictor())
    for step in range(12):
        spend(counted, monitor, 1)
        monitor.trained(step + 0.5, step + 0.54, 4.0)
        found = monitor.forecast(step + 1.0).throughput
        assert found == pytest.approx(100.0)
    for step in range(12, 24):
        spend(counted, monitor, 1)
        monitor.trained(step + 0.5, step + 0.54, 2.0)
        found = monitor.forecast(step + 1.0).throughput
    assert found == pytest.approx(50.0)


def test_counters_are_read_when_a_forecast_is_asked_for() -> None:
    counted = Counted()
    monitor = make(counted)
    spend(counted, monitor, 3)
    counted.pass_by(0.5, machine=Usage(1.0))
    assert monitor.forecast(3.5).throughput == pytest.approx(SPEED / 2, rel=0.02)
    assert monitor.contention(3.0, 3.5).cores == pytest.approx(1.0)


def test_stretches_without_length_or_work_are_left_out() -> None:
    counted = Counted()
    monitor = make(counted)
    spend(counted, monitor, 1)
    monitor.trained(0.5, 0.5, 10.0)
    monitor.trained(0.5, 1.0, 0.0)
    assert monitor.forecast(1.0).throughput == pytest.approx(SPEED, rel=0.01)


def test_what_others_take_while_we_pause_says_nothing_of_what_they_leave_us() -> None:
    counted = Counted()
    monitor = make(counted)
    spend(counted, monitor, 4, cores=0.5)
    monitor.trained(0.0, 4.0, 4 * SPEED / 1.5)
    spend(counted, monitor, 3, cores=1.0)
    assert monitor.forecast(7.0).throughput == pytest.approx(SPEED / 1.5, rel=0.02)
    spend(counted, monitor, 10, cores=1.0)
    assert monitor.forecast(17.0).throughput == pytest.approx(SPEED / 2, rel=0.02)


# Telemetry.


def test_means_are_stored_once_a_minute_and_at_the_end() -> None:
    counted, store = Counted(), MemoryTelemetry()
    monitor = make(counted, journal=Journal(store, rank=3))
    spend(counted, monitor, 30)
    monitor.trained(0.0, 30.0, 600.0)
    assert store.read(3) == []
    spend(counted, monitor, 30, cores=0.5)
    spend(counted, monitor, 15, cores=1.0)
    monitor.close()
    first, last = store.read(3)
    assert (first.at, first.seconds, first.throughput) == (1e9 + 60, 60.0, 10.0)
    assert first.cores == pytest.approx(0.25)
    assert (last.seconds, last.throughput) == (15.0, 0.0)
    assert last.cores == pytest.approx(1.0)
    monitor.close()
    assert len(store.read(3)) == 2


def test_counters_that_fail_are_logged_once_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted = Counted()
    monitor = make(counted)
    spend(counted, monitor, 2)
    counted.is_broken = True
    with caplog.at_level(logging.WARNING, "edgegossip.machine"):
        spend(counted, monitor, 5)
        assert math.isfinite(monitor.forecast(7.0).throughput)
    assert [record.message for record in caplog.records] == [
        "cannot read this machine's load: no /proc"
    ]
    counted.is_broken = False
    spend(counted, monitor, 2, cores=1.0)
    assert monitor.contention(8.0, 9.0).cores == pytest.approx(1.0)


class SlowStore:
    """A store that takes its time, as a server that does not answer does."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def append(self, rank: int, sample: Sample) -> None:
        self.has_begun.set()
        self.may_end.wait(5)

    def read(self, rank: int) -> list[Sample]:
        return []

    def close(self) -> None:
        pass


def test_no_forecast_waits_for_a_store() -> None:
    counted, store = Counted(), SlowStore()
    monitor = make(counted, journal=Journal(store, rank=0))
    thread = threading.Thread(target=spend, args=(counted, monitor, 60))
    thread.start()
    assert store.has_begun.wait(5)
    start = time.monotonic()
    monitor.trained(58.0, 60.0, 100.0)
    monitor.forecast(60.0)
    assert time.monotonic() - start < 2
    store.may_end.set()
    thread.join()


# On this machine.


def test_the_thread_reads_and_ends() -> None:
    predictor = PerformancePredictor(seconds_alone=0.01)
    store = MemoryTelemetry()
    with Monitor(predictor, journal=Journal(store, rank=0)) as monitor:
        assert any(thread.name == "monitor" for thread in threading.enumerate())
        assert monitor.forecast(time.monotonic()).throughput == pytest.approx(100.0)
    assert not any(thread.name == "monitor" for thread in threading.enumerate())
    [sample] = store.read(0)
    assert 0 <= sample.cores <= 1
    assert sample.at == pytest.approx(time.time(), abs=60)


@pytest.mark.slow
def test_once_a_second_the_thread_reads_the_counters_of_this_machine() -> None:
    with Monitor(PerformancePredictor(seconds_alone=0.01)) as monitor:
        start = time.monotonic()
        time.sleep(2.5)
        assert 2 <= len(monitor._history.readings(start, time.monotonic())) <= 3


# Several executors.


class Team:
    """Executors that have trained on some samples; `Executors` of a worker is one."""

    def __init__(self, number: int) -> None:
        self.members = [*range(number)]
        self.num_samples = [0.0] * number

    def train(self, *num_samples: float) -> None:
        pairs = zip(self.num_samples, num_samples, strict=True)
        self.num_samples = [before + more for before, more in pairs]


def test_each_executor_has_its_own_time_and_their_speeds_add_up() -> None:
    counted, team, predictor = Counted(), Team(2), PerformancePredictor(2)
    monitor = make(counted, predictor, executors=team)
    for start in range(0, 8, 2):
        spend(counted, monitor, 2)
        team.train(60.0, 20.0)
        monitor.trained(start, start + 2, 80.0)
        assert monitor.forecast(start + 2).throughput == pytest.approx(40.0)
    averages = [each["average"] for each in predictor.state_dict()["base_times"]]
    assert averages == [pytest.approx(1 / 30), pytest.approx(1 / 10)]


def test_a_lost_executor_is_forecast_no_longer() -> None:
    counted, team = Counted(), Team(2)
    monitor = make(counted, PerformancePredictor(2), executors=team)
    spend(counted, monitor, 2)
    team.train(60.0, 20.0)
    monitor.trained(0.0, 2.0, 80.0)
    # It is lost when half of the next work is done.
    spend(counted, monitor, 2)
    team.train(60.0, 10.0)
    monitor.trained(2.0, 4.0, 70.0)
    team.members = [0]
    assert monitor.forecast(4.0).throughput == pytest.approx(30.0)
    spend(counted, monitor, 2)
    team.train(60.0, 0.0)
    monitor.trained(4.0, 6.0, 60.0)
    assert monitor.forecast(6.0).throughput == pytest.approx(30.0)


def test_the_simulator_forecasts_the_same_for_as_many_executors() -> None:
    trace = ContentionTrace((0.0, 10.0), (Contention(), Contention(cores=1.0)), period=20.0)
    platform = Platform(
        throughput=10.0, executors=2, trace=trace, sensitivity=Sensitivity(cores=0.5)
    )
    simulated = SimulatedMonitor(platform, lambda: default_predictor(platform))
    counted, team = Counted(), Team(2)
    real = make(counted, default_predictor(platform), executors=team)
    for start in range(0, 40, 2):
        end = start + 2.0
        assert real.forecast(start) == pytest.approx(simulated.forecast(start))
        spend(counted, real, 2, cores=platform.contention(start).cores)
        work = platform.work(start, end)
        team.train(work / 2, work / 2)
        real.trained(start, end, work)
        simulated.trained(start, end)
