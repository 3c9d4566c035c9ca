"""The performance predictor: learns RG, follows t0, adds executors up, knows how sure it is."""

from __future__ import annotations

import copy
import json
import math
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.linear_model import LinearRegression
from sklearn.tree import DecisionTreeRegressor
from tests.tiers import thorough

from edgegossip.contract.errors import DataError
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.machine.contention import Contention
from edgegossip.machine.predictor import UNKNOWN_ERROR, PerformancePredictor, gaussian_process
from edgegossip.machine.profile import Profile
from edgegossip.sim.machines import profile
from edgegossip.sim.platform import Platform, Sensitivity

TRUE = Sensitivity()
IDLE, BUSY = Contention(), Contention(cores=0.5, network=2e7, disk=5e7)
CONTENTIONS = st.builds(
    Contention, cores=st.floats(0, 1), network=st.floats(0, 1e12), disk=st.floats(0, 1e12)
)


@lru_cache
def measured(noise: float = 0.02) -> Profile:
    return profile(Platform(throughput=100.0), num_samples=100, seed=1, noise=noise)


@lru_cache
def kept(num_executors: int, noise: float) -> PerformancePredictor:
    return PerformancePredictor(num_executors).fit(measured(noise))


def fitted(num_executors: int = 1, noise: float = 0.02) -> PerformancePredictor:
    return copy.deepcopy(kept(num_executors, noise))


def throughput(predictor: PerformancePredictor, contention: Contention = IDLE) -> float:
    return predictor.forecast([contention] * predictor.num_executors).throughput


# RG.


@thorough
def test_the_slow_down_is_learned_within_one_percent_on_average() -> None:
    noisy, exact = fitted(), fitted(noise=0.0)
    loads = profile(Platform(throughput=1.0), num_samples=40, seed=2).contentions
    errors = torch.tensor([noisy.slow_down(u) / TRUE.slow_down(u) - 1 for u in loads]).abs()
    assert errors.mean() < 0.01
    assert errors.max() < 0.08
    errors = torch.tensor([exact.slow_down(u) / TRUE.slow_down(u) - 1 for u in loads]).abs()
    assert errors.mean() < 0.003


def test_a_fit_alone_gives_forecasts() -> None:
    predictor = fitted(num_executors=2)
    assert throughput(predictor) == pytest.approx(200.0, rel=0.03)
    assert throughput(predictor, BUSY) == pytest.approx(200.0 / TRUE.slow_down(BUSY), rel=0.03)


@settings(max_examples=20)
@given(CONTENTIONS)
def test_contention_never_speeds_up(contention: Contention) -> None:
    assert 1 <= kept(1, 0.02).slow_down(contention) < 100


def test_loads_beyond_the_profile_count_as_the_most_in_it() -> None:
    beyond = Contention(cores=0.5, network=1e12)
    most = Contention(cores=0.5, network=max(u.network for u in measured().contentions))
    assert fitted().slow_down(beyond) == fitted().slow_down(most)


@pytest.mark.parametrize("least", [0.3, 0.5])
def test_without_an_idle_machine_in_the_profile_the_least_load_counts_as_none(
    least: float,
) -> None:
    loads = tuple(Contention(cores=least + (1 - least) * k / 20) for k in range(20))
    seconds = tuple(0.01 * TRUE.slow_down(u) for u in loads)
    predictor = PerformancePredictor().fit(Profile(loads, seconds))
    assert throughput(predictor, Contention()) == pytest.approx(1 / seconds[0], rel=0.02)
    assert predictor.slow_down(Contention()) == predictor.slow_down(loads[0]) == 1


@pytest.mark.parametrize(
    "regressor", [LinearRegression(), DecisionTreeRegressor(), gaussian_process()]
)
def test_any_regressor_of_scikit_learn_will_do(regressor: object) -> None:
    predictor = PerformancePredictor(regressor=regressor).fit(measured())
    assert 1.2 < predictor.slow_down(BUSY) < 3
    assert not hasattr(regressor, "n_features_in_")  # the caller's own stays unfitted


def test_a_profile_of_one_kind_of_load_is_enough_for_that_kind() -> None:
    loads = tuple(Contention(cores=k / 20) for k in range(20))
    seconds = tuple(0.01 * TRUE.slow_down(u) for u in loads)
    predictor = PerformancePredictor().fit(Profile(loads, seconds))
    assert predictor.slow_down(Contention(cores=0.52)) == pytest.approx(
        TRUE.slow_down(Contention(cores=0.52)), rel=0.01
    )


# t0.


def test_without_a_profile_the_slow_down_is_one() -> None:
    predictor = PerformancePredictor(seconds_alone=0.01)
    assert predictor.slow_down(BUSY) == 1
    assert throughput(predictor, BUSY) == 100


def test_the_first_observation_takes_the_place_of_what_was_assumed() -> None:
    predictor = fitted()
    predictor.observe(0, BUSY, 0.05 * predictor.slow_down(BUSY))
    assert throughput(predictor) == pytest.approx(20.0)


def noisy(predictor: PerformancePredictor, seconds: float, count: int, seed: int) -> None:
    """Observe `count` batches under load that take `seconds` alone, give or take 3 %."""
    random = torch.Generator().manual_seed(seed)
    for error in (0.03 * torch.randn(count, generator=random)).tolist():
        predictor.observe(0, BUSY, seconds * TRUE.slow_down(BUSY) * math.exp(error))


def test_a_slow_down_that_contention_does_not_show_is_followed_at_once() -> None:
    predictor = fitted()
    noisy(predictor, 0.01, 50, seed=0)
    for count in range(1, 20):
        noisy(predictor, 0.015, 1, seed=count)
        assert throughput(predictor) == pytest.approx(100 / 1.5, rel=0.1)


def test_noise_is_averaged_out() -> None:
    predictor = fitted()
    noisy(predictor, 0.01, 50, seed=0)
    found = []
    for seed in range(40):
        noisy(predictor, 0.01, 1, seed)
        found.append(throughput(predictor, BUSY) * TRUE.slow_down(BUSY) / 100)
    errors = torch.tensor(found) - 1
    assert errors.square().mean().sqrt() < 0.02


def test_a_hiccup_is_forgotten() -> None:
    predictor = PerformancePredictor()
    for seconds in [0.01] * 20 + [0.05, 0.01]:
        predictor.observe(0, IDLE, seconds)
    assert throughput(predictor) == pytest.approx(100.0)


# Executors.


def test_throughputs_of_executors_add_up() -> None:
    predictor = PerformancePredictor(num_executors=3)
    for executor, seconds in enumerate((0.01, 0.02, 0.05)):
        predictor.observe(executor, IDLE, seconds)
    assert throughput(predictor) == pytest.approx(100 + 50 + 20)


def test_each_executor_has_its_own_contention() -> None:
    predictor = fitted(2)
    both = predictor.forecast([IDLE, BUSY]).throughput
    expected = (throughput(predictor, IDLE) + throughput(predictor, BUSY)) / 2
    assert both == pytest.approx(expected)


def test_an_executor_not_yet_seen_is_taken_for_an_average_one() -> None:
    predictor = PerformancePredictor(num_executors=2)
    predictor.observe(1, IDLE, 0.02)
    assert throughput(predictor) == pytest.approx(100.0)


# How sure, and how much the present counts.


def test_the_error_is_first_that_of_the_profile() -> None:
    unknown = PerformancePredictor(seconds_alone=1.0)
    assert unknown.forecast([IDLE]).relative_error == pytest.approx(UNKNOWN_ERROR)
    assert 0.005 < fitted().forecast([IDLE]).relative_error < 0.05
    exact = fitted(noise=0.0).forecast([IDLE])
    assert exact.relative_error < fitted().forecast([IDLE]).relative_error


def test_the_error_tends_to_that_of_its_own_forecasts() -> None:
    predictor = PerformancePredictor(seconds_alone=0.01)
    for _ in range(60):
        error = predictor.forecast([IDLE]).relative_error
        predictor.observe(0, IDLE, 0.01)
    assert error < 0.02
    random = torch.Generator().manual_seed(0)
    for deviation in (0.1 * torch.randn(200, generator=random)).tolist():
        error = predictor.forecast([IDLE]).relative_error
        predictor.observe(0, IDLE, 0.01 * math.exp(deviation))
    assert error == pytest.approx(0.12, rel=0.4)


@pytest.mark.parametrize("is_lasting", [True, False])
def test_it_finds_out_how_much_the_present_load_says(is_lasting: bool) -> None:
    """A load lasts for the next work, or else that sees nothing but the usual one."""
    predictor, usual = fitted(), Contention(cores=0.3)
    for k in range(60):
        present = Contention(cores=0.6 * (k % 2))
        forecast = predictor.forecast([present], [usual]).throughput
        coming = present if is_lasting else usual
        predictor.observe(0, coming, 0.01 * TRUE.slow_down(coming))
    assert forecast == pytest.approx(100 / TRUE.slow_down(coming), rel=0.03)


@pytest.mark.parametrize("num_slow", [1, 10])
def test_it_finds_out_whether_a_base_time_that_jumps_is_news(num_slow: int) -> None:
    """The last steps of 20 take three times as long: one, which says nothing, or ten."""
    predictor = PerformancePredictor(seconds_alone=0.01)
    errors = []
    for k in range(600):
        phase = k % 20
        predictor.observe(0, IDLE, 0.03 if phase >= 20 - num_slow else 0.01)
        found = predictor.forecast([IDLE]).throughput
        if k >= 300 and phase == 20 - num_slow:
            coming = 100.0 if num_slow == 1 else 100 / 3
            errors.append(abs(found / coming - 1))
    assert max(errors) < 0.1


# Keeping.


def used() -> PerformancePredictor:
    predictor = fitted(2)
    for seconds in (0.02, 0.021, 0.03):
        predictor.forecast([BUSY, IDLE])
        predictor.observe(0, BUSY, seconds)
        predictor.observe(1, IDLE, seconds)
    return predictor


def go_on(predictor: PerformancePredictor) -> list[object]:
    forecasts: list[object] = []
    for seconds in (0.02, 0.04, 0.03):
        forecasts.append(predictor.forecast([IDLE, BUSY], [BUSY, BUSY]))
        predictor.observe(0, BUSY, seconds)
    return forecasts


def test_a_saved_predictor_goes_on_with_equal_forecasts(tmp_path: Path) -> None:
    path = tmp_path / "predictor.safetensors"
    predictor = used()
    predictor.save(path)
    assert go_on(PerformancePredictor.load(path)) == go_on(predictor)
    assert [file.name for file in tmp_path.iterdir()] == ["predictor.safetensors"]


def test_one_without_a_profile_is_saved_too(tmp_path: Path) -> None:
    path = tmp_path / "predictor.safetensors"
    PerformancePredictor(seconds_alone=0.01).save(path)
    assert throughput(PerformancePredictor.load(path)) == 100


def test_a_state_fits_into_a_checkpoint() -> None:
    predictor = used()
    plain, tensors = dismantle(predictor.state_dict())
    other = fitted(2)
    other.load_state_dict(assemble(json.loads(json.dumps(plain)), tensors))
    assert go_on(other) == go_on(predictor)


def test_a_state_is_a_copy() -> None:
    predictor = used()
    state = predictor.state_dict()
    before = json.dumps(state)
    go_on(predictor)
    assert json.dumps(state) == before


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x02\x00\x00\x00\x00\x00\x00\x00{}"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "predictor.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is not a predictor of this program"):
        PerformancePredictor.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no predictor"):
        PerformancePredictor.load(tmp_path / "predictor.safetensors")


# Bad input.


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="num_executors must be at least 1, got 0"):
        PerformancePredictor(0)
    with pytest.raises(ValueError, match="seconds_alone must be above 0"):
        PerformancePredictor(seconds_alone=0.0)
    predictor = PerformancePredictor(2)
    with pytest.raises(ValueError, match=r"executor must be in 0\.\.1, got 2"):
        predictor.observe(2, IDLE, 1.0)
    with pytest.raises(ValueError, match="seconds_per_sample must be above 0"):
        predictor.observe(0, IDLE, math.nan)
    with pytest.raises(ValueError, match="nothing to forecast from; fit a profile"):
        predictor.forecast([IDLE, IDLE])
    with pytest.raises(ValueError, match="got 1 contentions for 2 executors"):
        predictor.forecast([IDLE])


def test_a_forecast_stays_above_0_after_a_huge_slowdown() -> None:
    predictor = PerformancePredictor(seconds_alone=1.0)
    for seconds in (1e-9, 1.0, 16777217.0, 1.0):
        assert predictor.forecast([IDLE], [IDLE]).throughput > 0
        predictor.observe(0, IDLE, seconds)
    assert predictor.forecast([IDLE], [IDLE]).throughput > 0


@settings(max_examples=50)
@given(st.lists(st.tuples(CONTENTIONS, st.floats(1e-9, 1e9)), min_size=1, max_size=30))
def test_forecasts_are_positive_and_finite_whatever_is_observed(
    observations: list[tuple[Contention, float]],
) -> None:
    predictor = PerformancePredictor(seconds_alone=1.0)
    for contention, seconds in observations:
        forecast = predictor.forecast([contention], [IDLE])
        assert 0 < forecast.throughput < math.inf
        assert 0 <= forecast.relative_error < math.inf
        predictor.observe(0, contention, seconds)


def test_a_lost_executor_counts_no_more() -> None:
    predictor = PerformancePredictor(num_executors=3, seconds_alone=0.01)
    for executor, seconds in enumerate((0.01, 0.02, 0.05)):
        predictor.observe(executor, Contention(), seconds)
    assert throughput(predictor) == pytest.approx(170.0)
    predictor.lose(1)
    assert throughput(predictor) == pytest.approx(120.0)
    predictor.observe(1, Contention(), 0.001)  # what it had done before
    predictor.lose(1)
    assert throughput(predictor) == pytest.approx(120.0)
    other = PerformancePredictor(num_executors=3)
    other.load_state_dict(json.loads(json.dumps(predictor.state_dict())))
    assert throughput(other) == pytest.approx(120.0)


def test_a_forecast_with_a_lost_executor_is_not_judged() -> None:
    predictor = PerformancePredictor(num_executors=2, seconds_alone=0.01)
    first = predictor.forecast([Contention()] * 2).relative_error
    predictor.lose(1)
    predictor.observe(0, Contention(), 0.01)
    assert predictor.forecast([Contention()] * 2).relative_error == first
    predictor.observe(0, Contention(), 0.01)
    assert predictor.forecast([Contention()] * 2).relative_error < first


def test_an_unknown_executor_cannot_be_lost() -> None:
    with pytest.raises(ValueError, match=r"executor must be in 0\.\.1, got 2"):
        PerformancePredictor(num_executors=2).lose(2)
