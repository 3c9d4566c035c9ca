"""The cost before an epoch of a worker among many: its own forecast, and everybody's shares.

    python -m benchmarks.balancing [--platforms 1000] [--repeats 200]

Each worker forecasts its own throughput and computes Algorithm 1 over the forecasts that it has
heard from all. Medians in milliseconds on one thread, and the 95th percentile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from edgegossip.algorithms.wrappers.edge_gossip.balancer import Balancer
from edgegossip.algorithms.wrappers.edge_gossip.forecasts import PlatformForecast, known_of
from edgegossip.machine.contention import Contention
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.sim.machines import profile
from edgegossip.sim.platform import Platform


def milliseconds(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and 95th percentile."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), float(np.quantile(times, 0.95))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platforms", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    predictor = PerformancePredictor()
    predictor.fit(profile(Platform(throughput=1000.0)))
    loads = iter(np.random.default_rng(0).random((options.repeats + 1, 2)))

    def forecast() -> object:
        present, usual = next(loads)
        return predictor.forecast([Contention(cores=present)], [Contention(cores=usual)])

    speeds = np.random.default_rng(1).uniform(100, 1000, options.platforms)
    heard = {j: PlatformForecast(0, float(v), 1000.0) for j, v in enumerate(speeds)}
    balancer = Balancer()

    def balance() -> object:
        known = known_of(heard, {}, options.platforms, balancer.min_throughput)
        return balancer.balance(*known)

    forecast()  # imports and warms up
    print(f"{options.platforms} platforms, {options.repeats} repetitions")
    print("                median ms  95 % ms")
    for name, work in (("own forecast", forecast), ("balancing", balance)):
        median, high = milliseconds(work, options.repeats)
        print(f"{name:14s} {median:10.3f} {high:8.3f}")


if __name__ == "__main__":
    main()
