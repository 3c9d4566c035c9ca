"""A monitor tells a worker the measurements, and nothing that is hidden."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.scripted import world

from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Predict,
    Predicted,
    Rank,
    Seconds,
    Started,
    Steps,
    Train,
    Trained,
)
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.machine.contention import Contention
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.sim.fault import Crash, Recover
from edgegossip.sim.machines import (
    FORECAST_SECONDS,
    SimulatedMonitor,
    default_predictor,
    profile,
    profiled,
)
from edgegossip.sim.platform import ContentionTrace, Platform, Sensitivity, ThrottlingTrace
from edgegossip.sim.traces import batch_jobs

HALF = Contention(cores=1.0)  # halves the speed of these platforms
SENSITIVITY = Sensitivity(cores=0.5)
STEPS = ContentionTrace((0.0, 10.0), (Contention(), HALF), period=20.0)
LOADED = Platform(throughput=10.0, executors=2, trace=STEPS, sensitivity=SENSITIVITY)


class Notes:
    """A predictor that writes down what it is told."""

    def __init__(self) -> None:
        self.observed: list[tuple[int, Contention, float]] = []
        self.asked: list[tuple[Sequence[Contention], Sequence[Contention] | None]] = []

    def observe(self, executor: int, contention: Contention, seconds_per_sample: float) -> None:
        self.observed.append((executor, contention, seconds_per_sample))

    def forecast(
        self, present: Sequence[Contention], usual: Sequence[Contention] | None = None
    ) -> Predicted:
        self.asked.append((present, usual))
        return Predicted(1.0, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def watched(
    *spans: tuple[Seconds, Seconds], now: Seconds, platform: Platform = LOADED
) -> Notes:
    notes = Notes()
    monitor = SimulatedMonitor(platform, lambda: notes)
    for start, end in spans:
        monitor.trained(start, end)
    assert monitor.forecast(now) == Predicted(1.0, 0.5)
    return notes


def test_each_quarter_of_a_second_of_training_is_an_observation_of_each_executor() -> None:
    notes = watched((5.0, 7.0), now=7.0)
    seen = [(executor, u, round(seconds, 9)) for executor, u, seconds in notes.observed]
    assert seen == [(executor, Contention(), 0.1) for _ in range(8) for executor in (0, 1)]


def test_contention_is_the_mean_from_one_reading_to_the_next() -> None:
    # The load comes at 10 s, between the readings at 9 s and 10.6 s, and 10 s is one as well.
    notes = watched((9.5, 10.6), now=10.6)
    seen = {(u.cores, round(seconds, 9)) for _, u, seconds in notes.observed}
    assert seen == {(0.0, 0.1), (1.0, 0.2)}
    # Between 19 s and 20.05 s there is no reading: the load goes away unnoticed at 20 s.
    [(present, _)] = watched((19.0, 20.05), now=20.05).asked
    assert present[0].cores == pytest.approx(1 / 1.05)


def test_usual_is_the_mean_of_the_last_minute() -> None:
    [(present, usual)] = watched((60.0, 75.0), now=75.0).asked
    assert list(present) == [HALF, HALF]
    assert usual is not None
    assert usual[0].cores == pytest.approx(30 / 60)


def test_nothing_is_observed_twice_nor_while_nothing_runs() -> None:
    notes = Notes()
    monitor = SimulatedMonitor(LOADED, lambda: notes)
    monitor.trained(1.0, 1.5)
    monitor.trained(3.0, 3.5)
    monitor.forecast(3.5)
    assert len(notes.observed) == 2 * 4
    monitor.forecast(3.55)
    monitor.forecast(5.0)
    assert len(notes.observed) == 2 * 4


def test_a_long_training_is_remembered_for_a_minute() -> None:
    notes = watched((0.0, 1000.0), now=1000.0)
    assert len(notes.observed) == 2 * 4 * 60


def test_steps_without_a_pause_between_them_are_one_stretch() -> None:
    spans = [(k / 1024, (k + 1) / 1024) for k in range(512)]
    assert len(watched(*spans, now=0.5).observed) == 2 * 2


def test_a_monitor_that_is_never_asked_stays_small() -> None:
    monitor = SimulatedMonitor(LOADED, Notes)
    for k in range(10_000):
        monitor.trained(float(k), k + 0.5)
    assert len(monitor.state_dict()["spans"]) < 300


def test_throttling_is_felt_but_not_seen() -> None:
    throttling = ThrottlingTrace((0.0, 50.0), (1.0, 1.5))
    platform = Platform(throughput=10.0, throttling=throttling)
    notes = watched((49.0, 51.0), now=51.0, platform=platform)
    seen = {(u.cores, round(seconds, 9)) for _, u, seconds in notes.observed}
    assert seen == {(0.0, 0.1), (0.0, 0.15)}
    monitor = SimulatedMonitor(platform, partial(default_predictor, platform))
    monitor.trained(40.0, 50.5)
    assert monitor.forecast(50.5).throughput == pytest.approx(10 / 1.5)


def errors(fit: bool, num_blocks: int = 200, horizon: Seconds = 1.5) -> list[float]:
    """Relative errors of forecasts for one block after the other, under changing loads."""
    platform = Platform(throughput=100.0, trace=batch_jobs(seed=3))
    predictor = default_predictor(platform)
    if fit:
        predictor.fit(profile(platform, seed=0))
    monitor, now, found = SimulatedMonitor(platform, lambda: predictor), 0.0, []
    for _ in range(num_blocks):
        forecast = monitor.forecast(now).throughput
        end = now + platform.duration(now, horizon * 70)
        found.append(abs(forecast * (end - now) / (horizon * 70) - 1))
        monitor.trained(now, end)
        now = end
    return found


@pytest.mark.parametrize("fit", [True, False])
def test_under_jobs_that_come_and_go_forecasts_are_three_percent_off(fit: bool) -> None:
    found = errors(fit)
    assert sum(found) / len(found) < 0.03


def test_a_monitor_goes_on_from_its_state() -> None:
    def make() -> SimulatedMonitor:
        return SimulatedMonitor(LOADED, partial(default_predictor, LOADED))

    first = make()
    first.trained(0.0, 9.0)
    first.forecast(9.0)
    first.trained(9.0, 10.5)
    plain, tensors = dismantle(first.state_dict())
    second = make()
    second.load_state_dict(assemble(json.loads(json.dumps(plain)), tensors))
    for now in (10.5, 12.0):
        assert first.forecast(now) == second.forecast(now)
    assert first.state_dict() == second.state_dict()


# In the simulator.


def blocks(rank: Rank, event: Event, now: Seconds) -> list[Effect]:
    """Forecast, train for some seconds, until half a minute is over."""
    match event:
        case Started() | Trained():
            return [Predict()] if now < 30 else [Finish()]
        case Predicted():
            return [Train(torch.zeros(3), Steps(20))]
    return []


def forecasts(*script: Any, **settings: Any) -> list[tuple[Seconds, float]]:  # noqa: ANN401
    result = world(blocks, 1, *script, platforms=(LOADED,), **settings).run()
    return [
        (now, event.throughput) for now, _, event in result.seen if isinstance(event, Predicted)
    ]


def test_a_forecast_arrives_when_it_is_made() -> None:
    found = forecasts()
    assert found[0] == (FORECAST_SECONDS, 20.0)
    assert found[1][0] == pytest.approx(1.0 + 2 * FORECAST_SECONDS)


def test_the_default_forecast_follows_the_speed_of_training() -> None:
    found = forecasts()
    for seconds, expected in ((5, 20.0), (15, 10.0), (25, 20.0)):
        last = [throughput for now, throughput in found if now < seconds][-1]
        assert last == pytest.approx(expected)


def test_a_worker_that_comes_back_remembers_nothing() -> None:
    always = Platform(throughput=10.0, throttling=ThrottlingTrace((0.0,), (2.0,)))
    result = world(
        blocks, 1, Crash(at=15.0, rank=0), Recover(at=20.0, rank=0), platforms=(always,)
    ).run()
    found = [
        (now, round(event.throughput, 6))
        for now, _, event in result.seen
        if isinstance(event, Predicted)
    ]
    back = [value for now, value in found if now > 20]
    assert found[0][1] == back[0] == 10.0
    assert found[1][1] == back[1] == 5.0
    assert result.simulator.state_dict()["machines"]["monitors"][0]["start"] == 20.0


def test_each_worker_gets_the_predictor_made_for_it() -> None:
    def make(rank: Rank) -> PerformancePredictor:
        return PerformancePredictor(2, seconds_alone=1.0 + rank)

    result = world(blocks, 2, platforms=(LOADED, LOADED), make_predictor=make).run(until=0.5)
    found = {
        rank: event.throughput for _, rank, event in result.seen if type(event) is Predicted
    }
    assert found == {0: 2.0, 1: 1.0}


def test_those_with_a_profile_know_at_once_what_a_load_does() -> None:
    loaded = replace(LOADED, trace=ContentionTrace((0.0,), (HALF,)))
    make = profiled((loaded, loaded), {1: profile(loaded, noise=0.0)})
    result = world(blocks, 2, platforms=(loaded, loaded), make_predictor=make).run(until=0.5)
    found = {
        rank: event.throughput for _, rank, event in result.seen if type(event) is Predicted
    }
    assert found == {0: 20.0, 1: pytest.approx(20 / 2 * 1.05, rel=0.06)}  # 0.9 cores profiled


def test_a_run_goes_on_from_its_checkpoint_with_equal_forecasts() -> None:
    seen = world(blocks, 1, platforms=(LOADED,)).run().seen
    whole = [(now, event) for now, _, event in seen if isinstance(event, Predicted)]
    first = world(blocks, 1, platforms=(LOADED,)).run(until=17.0)
    plain, tensors = dismantle(first.simulator.state_dict())
    second = world(blocks, 1, platforms=(LOADED,))
    second.simulator.load_state_dict(assemble(json.loads(json.dumps(plain)), tensors))
    second.run()
    seen = [*first.seen, *second.seen]
    assert [(now, e) for now, _, e in seen if isinstance(e, Predicted)] == whole


# Profiling.


def test_a_profile_is_that_of_one_executor_under_random_loads() -> None:
    exact = profile(LOADED, num_samples=20, noise=0.0)
    for contention, seconds in zip(exact.contentions, exact.seconds, strict=True):
        assert seconds == pytest.approx(SENSITIVITY.slow_down(contention) / 10.0)
    assert exact.contentions[0] == Contention()
    assert len(set(exact.contentions)) > 15


def test_a_profile_is_repeatable_and_noisy() -> None:
    assert profile(LOADED, seed=1) == profile(LOADED, seed=1)
    noisy, exact = profile(LOADED, seed=1), profile(LOADED, seed=1, noise=0.0)
    assert noisy.contentions == exact.contentions
    deviations = [math.log(a / b) for a, b in zip(noisy.seconds, exact.seconds, strict=True)]
    spread = torch.tensor(deviations).std()
    assert spread == pytest.approx(0.02, rel=0.3)
    assert profile(LOADED, seed=2) != profile(LOADED, seed=1)


@pytest.mark.parametrize("arguments", [{"num_samples": 9}, {"noise": -0.1}, {"noise": 1.0}])
def test_a_profile_out_of_range_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="num_samples must be at least 10 and noise in"):
        profile(LOADED, **arguments)
