"""How far off forecasts of the throughput are, and what they cost.

    python -m benchmarks.predictor                    tables
    python -m benchmarks.predictor --json             one JSON object
    python -m benchmarks.predictor --only workloads   one part

Forecasts: on four uneven platforms (two of them with four executors), each under jobs of its
own that come and go, a worker asks for a forecast, trains for about `horizon` seconds, and asks
again. "oracle" knows the present speed exactly, and nothing of the future: what it misses comes
from loads that change meanwhile. "throttled" platforms are also 1.4 times slower for 30 s of
every 200 s, which no monitor shows. Workloads: the same by kind of job
(like WordCount, like Sort, or both at random).

Regressors: mean error of the time under loads that were not profiled, 2 % measurement noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmarks.kept import about
from sklearn.base import RegressorMixin
from sklearn.ensemble import (
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    RandomForestRegressor,
)
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, SplineTransformer
from sklearn.svm import SVR

from edgegossip.contract.protocol import Seconds
from edgegossip.machine.contention import Contention
from edgegossip.machine.predictor import PerformancePredictor, gaussian_process
from edgegossip.sim.machines import SimulatedMonitor, default_predictor, profile
from edgegossip.sim.platform import Platform, ThrottlingTrace
from edgegossip.sim.traces import BatchJob, batch_jobs

HORIZONS = (1.0, 2.0, 5.0, 10.0, 60.0)
PHASE = 8.0
PHASES = (5.0, PHASE, 15.0)
WORKLOADS: dict[str, BatchJob | None] = {
    "WordCount": "word-count",
    "Sort": "sort",
    "both": None,
}
SPEEDS = ((1000.0, 1), (800.0, 1), (82.5, 4), (62.5, 4))
HEAT = ThrottlingTrace((0.0, 100.0, 130.0), (1.0, 1.4, 1.0), period=200.0)


# Forecasts.


def platforms(
    phase: Seconds, throttling: ThrottlingTrace | None, job: BatchJob | None
) -> Iterator[Platform]:
    for seed in range(3):
        for number, (throughput, executors) in enumerate(SPEEDS):
            yield Platform(
                throughput=throughput,
                executors=executors,
                trace=batch_jobs(seed=10 * seed + number, phase=phase, job=job),
                throttling=throttling,
            )


def follow(
    platform: Platform, predictor: PerformancePredictor, horizon: Seconds, num_blocks: int
) -> tuple[list[float], list[float], list[float]]:
    """Relative errors of forecasts and of the oracle, and the error each forecast claims."""
    monitor, now = SimulatedMonitor(platform, lambda: predictor), 0.0
    cost = horizon * platform.total_throughput / 1.4  # the mean slow-down
    errors, oracle_errors, claims = [], [], []
    for _ in range(num_blocks):
        predicted = monitor.forecast(now)
        present = platform.work(now, now + 1e-6) / 1e-6
        seconds = platform.duration(now, cost)
        errors.append(predicted.throughput * seconds / cost - 1)
        oracle_errors.append(present * seconds / cost - 1)
        claims.append(predicted.relative_error)
        monitor.trained(now, now + seconds)
        now += seconds
    return errors, oracle_errors, claims


def mean_errors(
    phase: Seconds,
    horizon: Seconds,
    is_fitted: bool,
    throttling: ThrottlingTrace | None = None,
    job: BatchJob | None = None,
) -> dict[str, float]:
    errors: list[float] = []
    oracle_errors: list[float] = []
    claims: list[float] = []
    for seed, platform in enumerate(platforms(phase, throttling, job)):
        predictor = default_predictor(platform)
        if is_fitted:
            predictor.fit(profile(platform, num_samples=100, seed=seed))
        parts = follow(platform, predictor, horizon, num_blocks=max(100, int(300 / horizon)))
        for total, part in zip((errors, oracle_errors, claims), parts, strict=True):
            total.extend(part)
    return {
        "error": statistics.fmean(map(abs, errors)),
        "oracle": statistics.fmean(map(abs, oracle_errors)),
        "claimed": statistics.fmean(claims),
        "root_mean_square": statistics.fmean(error**2 for error in errors) ** 0.5,
    }


def measure_forecasts() -> list[dict[str, Any]]:
    return [
        {"phase": phase, "horizon": horizon, "fitted": is_fitted, "throttled": is_throttled}
        | mean_errors(phase, horizon, is_fitted, HEAT if is_throttled else None)
        for phase in PHASES
        for horizon in HORIZONS
        for is_throttled in (False, True)
        for is_fitted in (False, True)
    ]


def measure_workloads() -> list[dict[str, Any]]:
    return [
        {"workload": name, "horizon": horizon, "fitted": is_fitted}
        | mean_errors(PHASE, horizon, is_fitted, job=job)
        for name, job in WORKLOADS.items()
        for horizon in HORIZONS
        for is_fitted in (False, True)
    ]


# Regressors.

REGRESSORS: dict[str, Callable[[], RegressorMixin]] = {
    "Gaussian process": gaussian_process,
    "polynomial, degree 3": lambda: make_pipeline(PolynomialFeatures(3), Ridge(1e-3)),
    "polynomial, degree 4": lambda: make_pipeline(PolynomialFeatures(4), Ridge(1e-3)),
    "splines, pairwise": lambda: make_pipeline(
        SplineTransformer(4), PolynomialFeatures(2, interaction_only=True), Ridge(1e-2)
    ),
    "support vectors": lambda: SVR(C=10, epsilon=0.01),
    "boosted trees": lambda: GradientBoostingRegressor(n_estimators=200, random_state=0),
    "boosted, monotone": lambda: HistGradientBoostingRegressor(
        monotonic_cst=[1, 1, 1], min_samples_leaf=5
    ),
    "random forest": lambda: RandomForestRegressor(100, random_state=0),
}


def measure_regressors(num_samples: int) -> list[dict[str, Any]]:
    platform = Platform(throughput=1.0)
    held_out = profile(platform, num_samples=200, seed=99, noise=0.0)
    rows = []
    for name, make in REGRESSORS.items():
        errors, fit_seconds = [], []
        for seed in range(3):
            predictor = PerformancePredictor(regressor=make())
            measured = profile(platform, num_samples, seed)
            start = time.perf_counter()
            predictor.fit(measured)
            fit_seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
            for contention, seconds in zip(held_out.contentions, held_out.seconds, strict=True):
                forecast = predictor.forecast([contention])
                errors.append(abs(forecast.throughput * seconds - 1))
            forecast_seconds = (time.perf_counter() - start) / len(held_out)
        rows.append(
            {
                "regressor": name,
                "num_samples": num_samples,
                "error": statistics.fmean(errors),
                "fit_seconds": statistics.median(fit_seconds),
                "forecast_microseconds": 1e6 * forecast_seconds,
            }
        )
    return rows


# Costs.


def measure_costs() -> dict[str, float]:
    """Microseconds, for a platform of four executors; loads never seen before."""
    predictor = PerformancePredictor(4).fit(profile(Platform(throughput=1.0)))
    loads = [Contention(cores=k / 2000, disk=1e7) for k in range(2000)]

    def microseconds(call: Callable[[Contention], object], chosen: list[Contention]) -> float:
        start = time.perf_counter()
        for load in chosen:
            call(load)
        return 1e6 * (time.perf_counter() - start) / len(chosen)

    platform = Platform(throughput=1.0, executors=4, trace=batch_jobs())
    monitor = SimulatedMonitor(platform, lambda: predictor)
    times = [2.0 * k for k in range(1, 500)]
    start = time.perf_counter()
    for now in times:
        monitor.trained(now - 2, now)
        monitor.forecast(now)
    whole = 1e6 * (time.perf_counter() - start) / len(times)
    return {
        "observe": microseconds(lambda u: predictor.observe(0, u, 1.0), loads[:1000]),
        "observe, load as before": microseconds(
            lambda u: predictor.observe(0, u, 1.0), [loads[0]] * 1000
        ),
        "forecast": microseconds(lambda u: predictor.forecast([u] * 4), loads[1000:]),
        "monitor, 2 s of training and a forecast": whole,
    }


def show(found: dict[str, Any]) -> None:
    for row in found.get("forecasts", []):
        print(
            f"loads of {row['phase']:4g} s, {row['horizon']:3g} s ahead, "
            f"{'profiled' if row['fitted'] else 'no profile':10s}"
            f"{', throttled' if row['throttled'] else '':11s}: "
            f"{row['error']:6.2%} (oracle {row['oracle']:6.2%}; root mean square "
            f"{row['root_mean_square']:6.2%}, claimed {row['claimed']:6.2%})"
        )
    for row in found.get("workloads", []):
        print(
            f"{row['workload']:9s}, {row['horizon']:3g} s ahead, "
            f"{'profiled' if row['fitted'] else 'no profile':10s}: {row['error']:6.2%} "
            f"(oracle {row['oracle']:6.2%})"
        )
    for row in found.get("regressors", []):
        print(
            f"{row['num_samples']:4d} loads, {row['regressor']:22s}: {row['error']:6.2%}, "
            f"fit {row['fit_seconds']:5.2f} s, forecast {row['forecast_microseconds']:5.0f} us"
        )
    for name, value in found.get("costs", {}).items():
        print(f"{name}: {value:.1f} us")


PARTS: dict[str, Callable[[], Any]] = {
    "forecasts": measure_forecasts,
    "workloads": measure_workloads,
    "regressors": lambda: [row for num in (50, 100, 300) for row in measure_regressors(num)],
    "costs": measure_costs,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=PARTS, help="measure this part alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    origin = about(options)
    torch.set_num_threads(1)
    parts = [options.only] if options.only else [*PARTS]
    found = {name: PARTS[name]() for name in parts}
    if not options.json:
        show(found)
        return
    print(json.dumps(origin | found))


if __name__ == "__main__":
    main()
