"""Timing on one thread, with little disturbance from other work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from threadpoolctl import threadpool_limits
from torch import Tensor

from edgegossip.contract.protocol import Seconds
from edgegossip.runs.process import one_intra_op_thread
from edgegossip.training.sampling.aggregation import AggregatedData, Aggregator


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit PyTorch and BLAS to one thread, so that processor time equals duration."""
    with one_intra_op_thread(), threadpool_limits(1):
        yield


def processor_seconds(work: Callable[[], object], num_repeats: int = 3) -> Seconds:
    """Median processor time of `work` on one thread, after a warm-up."""
    with one_thread():
        work()
        measured = []
        for _ in range(num_repeats):
            start = time.process_time()
            work()
            measured.append(time.process_time() - start)
    return statistics.median(measured)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Processor seconds that the three steps of aggregation take."""

    reduction: Seconds
    division: Seconds
    means: Seconds

    @property
    def total(self) -> Seconds:
        """Processor seconds of the whole aggregation."""
        return self.reduction + self.division + self.means


def timed_fit(chosen: Aggregator, x: Tensor, y: Tensor) -> tuple[AggregatedData, StepTimes]:
    """Aggregate on one thread and measure each step; the remaining time counts as means."""
    reduction: Any = _Timed(chosen.reduction)
    division: Any = _Timed(chosen.division)
    timed = replace(chosen, reduction=reduction, division=division)
    with one_thread():
        chosen.fit(x[:200], y[:200])  # the first call is slower
        start = time.process_time()
        aggregated = timed.fit(x, y)
        total = time.process_time() - start
    rest = total - reduction.seconds - division.seconds
    return aggregated, StepTimes(
        reduction=reduction.seconds, division=division.seconds, means=rest
    )


def median_fit(chosen: Aggregator, x: Tensor, y: Tensor, num_repeats: int = 3) -> StepTimes:
    """The step times of the fit with the median total, out of `num_repeats` (odd) fits."""
    measured = [timed_fit(chosen, x, y)[1] for _ in range(num_repeats)]
    return sorted(measured, key=lambda times: times.total)[num_repeats // 2]


@dataclass
class _Timed:
    """A reduction or a division that measures its processor time."""

    inner: Any
    seconds: Seconds = field(default=0.0, init=False)

    def __call__(self, points: Tensor, num_subsets: int, seed: int) -> Tensor:
        start = time.process_time()
        found: Tensor = self.inner(points, num_subsets, seed)
        self.seconds += time.process_time() - start
        return found

    def num_flops(self, *sizes: Any) -> float:  # noqa: ANN401 - sizes of either
        flops: float = self.inner.num_flops(*sizes)
        return flops
