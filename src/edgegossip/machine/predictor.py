"""Predicting a platform's speed: a profiled slowdown times a base time, measured online."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import torch
from safetensors.torch import save
from threadpoolctl import threadpool_limits

from edgegossip.contract.errors import DataError
from edgegossip.contract.protocol import Predicted, Seconds
from edgegossip.contract.ranges import check_range
from edgegossip.machine.contention import Contention
from edgegossip.machine.files import write_whole
from edgegossip.machine.profile import Profile

if TYPE_CHECKING:
    from sklearn.base import RegressorMixin


UNKNOWN_ERROR = 0.1
"""Assumed relative error of forecasts without a profile or measurements."""
_MEMORY = 8
"""Number of observations over which the base time is averaged."""
_PATIENCE = 8
"""Number of consecutive deviating observations before one more restarts the average."""
_FADING = 32
"""Number of forecasts over which errors are averaged."""
_PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Blends between the forecast from the usual load (0) and that from the present load (1)."""
_MIN_JUMP = 0.02
"""Smallest deviation that can be a jump; averaging follows smaller deviations fast enough."""
_MAX_ROWS = 300
"""Maximum rows for the default regressor, whose fit takes cubic time: 0.7 s for these."""


class SlowDown:
    r"""The paper's :math:`RG`: the slowdown by contention, fitted to a profile.

    The logarithm of the time is regressed on U, so relative errors have the same weight for all
    loads. Each part of U is divided by its maximum in the profile. Loads beyond the profile are
    clipped to its range, because few regressors extrapolate well. If a profile has no row for
    an idle machine, its smallest load counts as idle.

    Attributes:
        seconds_alone: Seconds per sample without contention.
        relative_error: Root mean square error on every fifth row, after a fit to the other
            rows.
    """

    def __init__(self, profile: Profile, regressor: RegressorMixin | None) -> None:
        u = _table(profile.contentions)
        log_t = np.log(np.asarray(profile.seconds, dtype=float))
        if regressor is None:
            kept = slice(None, None, math.ceil(len(u) / _MAX_ROWS))
            u, log_t, regressor = u[kept], log_t[kept], gaussian_process()
        self._least, self._most = u.min(0), u.max(0)
        self._scale = np.where(self._most > 0, self._most, 1.0)
        u = u / self._scale
        held_out = np.arange(len(u)) % 5 == 4
        trial = _fitted(regressor, u[~held_out], log_t[~held_out])
        residuals = log_t[held_out] - trial.predict(u[held_out])
        self.relative_error = float(np.sqrt(np.mean(residuals**2)))
        self._regressor = _fitted(regressor, u, log_t)
        self._log_alone = self._log_seconds(Contention())
        self.seconds_alone = math.exp(self._log_alone)
        # Monitors often see the same load as a second ago.
        self.of = lru_cache(maxsize=128)(self._predict)

    def _predict(self, contention: Contention) -> float:
        """The slowdown under `contention`, at least 1."""
        return max(1.0, math.exp(self._log_seconds(contention) - self._log_alone))

    def _log_seconds(self, contention: Contention) -> float:
        u = np.clip(_table([contention]), self._least, self._most) / self._scale
        return float(self._regressor.predict(u)[0])


def gaussian_process() -> RegressorMixin:
    """A Gaussian process, which had the smallest error on held-out loads.

    With 100 profiled loads and 2 % noise, its mean error is 0.7 %, compared with 1.0 % for
    polynomials of degree 3 or 4, 1.4 % for splines, 1.8 % for support vectors and 3.3 % for
    boosted trees. It is also among the fastest to evaluate (0.1 ms). `benchmarks/predictor.py`
    measures this.
    """
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    smooth = ConstantKernel(1.0, (1e-3, 1e3)) * RBF([0.5] * 3, (0.05, 50.0))
    kernel = smooth + WhiteKernel(1e-3, (1e-8, 1.0))
    return GaussianProcessRegressor(kernel, normalize_y=True)


def _fitted(regressor: RegressorMixin, u: np.ndarray, log_t: np.ndarray) -> Any:  # noqa: ANN401
    # Importing scikit-learn takes more than a second, and most runs have no profile to fit.
    from sklearn.base import clone
    from sklearn.exceptions import ConvergenceWarning

    # On matrices this small, several threads of BLAS are five times slower than one; and the
    # same bits come out on any number of cores.
    with warnings.catch_warnings(), threadpool_limits(1):
        # A profile that leaves one of the three at 0 says nothing about its scale: no harm.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return clone(regressor).fit(u, log_t)


def _table(contentions: Sequence[Contention]) -> np.ndarray:
    return np.array([(u.cores, u.network, u.disk) for u in contentions], np.float64)


@dataclass(slots=True)
class BaseTime:
    """One executor's t0: an average over the last observations, restarted after a jump.

    Attributes:
        average: Seconds per sample, without the effect of contention.
        last: The last observation.
        num_averaged: Number of observations in `average`; 0 if it is assumed.
        variance: Variance of observations' relative noise.
        num_beyond: Number of consecutive recent observations that deviate too far; negative if
            they are below the average.
    """

    average: Seconds
    last: Seconds = math.nan
    num_averaged: int = 0
    variance: float = 0.02**2
    num_beyond: int = 0

    @property
    def seconds(self) -> Seconds:
        """The best estimate: the average, or the last observation if it deviates too far.

        In that case, a change has occurred that U does not show, or does not show yet. The
        average is kept unless the change lasts, because U may show it at the next observation.
        """
        return self.last if self.num_beyond else self.average

    def observe(self, seconds: Seconds) -> None:
        if self.num_averaged == 0:
            self._restart(seconds)
            return
        limit = max(_MIN_JUMP, 3 * math.sqrt(self.variance))
        deviation = seconds / self.average - 1
        # Half the squared difference of neighbors: a jump counts once, and only so much.
        noise = min(0.5 * ((seconds - self.last) / self.average) ** 2, limit**2)
        self.variance += (noise - self.variance) / _MEMORY
        self.last = seconds
        if abs(deviation) <= limit:
            self.num_beyond = 0
            self.num_averaged += 1
            self.average += (seconds - self.average) / min(self.num_averaged, _MEMORY)
            return
        sign = 1 if deviation > 0 else -1
        self.num_beyond = max(0, self.num_beyond * sign) * sign + sign
        if abs(self.num_beyond) > _PATIENCE:
            self._restart(seconds)

    def _restart(self, seconds: Seconds) -> None:
        self.average, self.last, self.num_averaged, self.num_beyond = seconds, seconds, 1, 0


@dataclass(slots=True)
class Record:
    """The errors of a platform's past forecasts, which adjust the next one.

    A forecast blends two forecasts: from the present load and base time, and from their usual
    values. Among five blends, the one with the smallest recent error is used. Forecasts thus
    adapt to the rate of change, to the time ahead, and to the noise of base times. Errors are
    mean absolute errors; squared errors favor the usual load, which is never far off, and did
    worse at horizons within 5 s.

    Attributes:
        speeds: Sums of measured throughputs since the last forecast, for each executor.
        counts: Number of throughputs in each sum.
        variance: Variance of the relative errors so far.
        present: The last forecast from the present load and base time, in samples/s; 0 once it
            has been evaluated.
        usual: The last forecast from the usual load and the average base time, in samples/s.
        errors: Mean relative error of each blend.
        num_judged: Number of evaluated forecasts.
    """

    speeds: list[float]
    counts: list[int]
    variance: float
    present: float = 0.0
    usual: float = 0.0
    # The present has a head start.
    errors: list[float] = field(default_factory=lambda: [0.02, 0.02, 0.02, 0.02, 0.01])
    num_judged: int = 0

    @property
    def blend(self) -> float:
        """The forecast: the blend with the smallest recent error."""
        return self._candidates[self.errors.index(min(self.errors))]

    @property
    def _candidates(self) -> list[float]:
        # If one is far below the other, the difference rounds it away; a blend would be 0.
        least, difference = min(self.usual, self.present), self.present - self.usual
        return [max(least, self.usual + place * difference) for place in _PLACES]

    def judge(self, executors: Sequence[int]) -> None:
        """Compare the last forecast with the measurements of these executors since then."""
        if self.present and all(self.counts[each] for each in executors):
            measured = sum(self.speeds[each] / self.counts[each] for each in executors)
            self.num_judged += 1
            # The error assumed before the first forecast counts as one.
            share = 1 / min(self.num_judged + 1, _FADING)
            self.variance += share * ((measured / self.blend - 1) ** 2 - self.variance)
            self.errors = [
                error + (abs(candidate / measured - 1) - error) / _FADING
                for error, candidate in zip(self.errors, self._candidates, strict=True)
            ]
        self.present = 0.0
        self.speeds, self.counts = [0.0] * len(self.speeds), [0] * len(self.counts)


class PerformancePredictor:
    r"""Forecasts a platform's throughput from its monitor's data.

    Each executor needs :math:`t = t_0\, RG(U)` seconds per sample. :math:`RG \ge 1` is learned
    from a profile, and :math:`t_0` follows observations, so a slowdown that U does not show
    (heat, a slower clock) is reflected from the next observation on. The platform processes
    :math:`p = \sum_i 1/t_i` samples per second. Without a profile, :math:`RG = 1`; with one::

        predictor = PerformancePredictor().fit(Profile.read("profile.csv"))
        print(predictor.forecast([Contention(cores=0.5)]))  # one contention per executor

    Args:
        num_executors: Number of executors on the platform.
        regressor: Any scikit-learn regressor, unfitted; None for a Gaussian process.
        seconds_alone: :math:`t_0` before the first profile or observation.

    Raises:
        ValueError: If a number is out of range.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 32(7), 2021, its performance predictor. The paper
        states neither the kind of regression nor how t0 is updated.

    >>> predictor = PerformancePredictor(num_executors=2, seconds_alone=0.01)
    >>> predictor.observe(0, Contention(), seconds_per_sample=0.02)
    >>> predictor.forecast([Contention(), Contention()]).throughput
    150.0
    """

    def __init__(
        self,
        num_executors: int = 1,
        regressor: RegressorMixin | None = None,
        *,
        seconds_alone: Seconds | None = None,
    ) -> None:
        check_range("num_executors", num_executors, "at least 1")
        if seconds_alone is not None:
            check_range("seconds_alone", seconds_alone, "above 0 and finite")
        self.num_executors = num_executors
        self._regressor = regressor
        self._slow_down: SlowDown | None = None
        self._profile: Profile | None = None
        self._forget(seconds_alone)

    def _forget(self, seconds_alone: Seconds | None) -> None:
        error = UNKNOWN_ERROR if self._slow_down is None else self._slow_down.relative_error
        start = math.nan if seconds_alone is None else seconds_alone
        n = self.num_executors
        self._base_times: list[BaseTime | None] = [BaseTime(start) for _ in range(n)]
        self._record = Record([0.0] * n, [0] * n, error**2)

    def fit(self, profile: Profile) -> PerformancePredictor:
        """Learn RG and t0 from `profile`, forget observations, and return this predictor."""
        self._slow_down, self._profile = SlowDown(profile, self._regressor), profile
        self._forget(self._slow_down.seconds_alone)
        return self

    def observe(
        self, executor: int, contention: Contention, seconds_per_sample: Seconds
    ) -> None:
        """Record the time per sample of `executor` under `contention`.

        Observations should have about equal lengths, such as a batch or a second.

        Raises:
            ValueError: If the executor is unknown, or the time is not above 0.
        """
        self._require(executor)
        check_range("seconds_per_sample", seconds_per_sample, "above 0 and finite")
        base = self._base_times[executor]
        if base is None:
            return
        self._record.speeds[executor] += 1 / seconds_per_sample
        self._record.counts[executor] += 1
        alone = seconds_per_sample / self.slow_down(contention)
        base.observe(alone)

    def lose(self, executor: int) -> None:
        """Leave out `executor`, which is lost; the others keep their indices.

        Raises:
            ValueError: If the executor is unknown.
        """
        self._require(executor)
        if self._base_times[executor] is not None:
            self._base_times[executor] = None
            # The last forecast counted on it, and cannot be judged without.
            self._record.present = 0.0

    def _require(self, executor: int) -> None:
        if not 0 <= executor < self.num_executors:
            raise ValueError(f"executor must be in 0..{self.num_executors - 1}, got {executor}")

    def forecast(
        self, present: Sequence[Contention], usual: Sequence[Contention] | None = None
    ) -> Predicted:
        """Forecast the throughput of the next work from the contention on each executor.

        The first call after an observation also evaluates the last forecast.

        Args:
            present: Present use by other processes, one entry for each executor; those of lost
                executors do not count.
            usual: Mean use by other processes over about a minute; None if it equals `present`.

        Raises:
            ValueError: If there is not one entry for each executor, or there is no data yet.
        """
        for contentions in (present, usual):
            if contentions is not None and len(contentions) != self.num_executors:
                raise ValueError(
                    f"got {len(contentions)} contentions for {self.num_executors} executors"
                )
        living = {i: base for i, base in enumerate(self._base_times) if base is not None}
        present_speed = self._throughput(
            [present[i] for i in living], [base.seconds for base in living.values()]
        )
        loads = present if usual is None else usual
        usual_speed = self._throughput(
            [loads[i] for i in living], [base.average for base in living.values()]
        )
        self._record.judge([*living])
        self._record.present, self._record.usual = present_speed, usual_speed
        return Predicted(self._record.blend, math.sqrt(self._record.variance))

    def _throughput(
        self, contentions: Sequence[Contention], base_times: Sequence[Seconds]
    ) -> float:
        known = [seconds for seconds in base_times if not math.isnan(seconds)]
        if not known:
            raise ValueError(
                "there is nothing to forecast from; fit a profile, observe, or give "
                "seconds_alone"
            )
        # An executor that was never observed is taken for an average one.
        average = sum(known) / len(known)
        return sum(
            1 / ((average if math.isnan(seconds) else seconds) * self.slow_down(u))
            for seconds, u in zip(base_times, contentions, strict=True)
        )

    def slow_down(self, contention: Contention) -> float:
        """RG: the time under `contention` divided by the time without it, at least 1."""
        return 1.0 if self._slow_down is None else self._slow_down.of(contention)

    # Keeping.

    def state_dict(self) -> dict[str, Any]:
        """All mutable state, as plain numbers."""
        return {
            "base_times": [base and asdict(base) for base in self._base_times],
            "record": asdict(self._record),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the `state_dict` of an equal predictor."""
        self._base_times = [values and BaseTime(**values) for values in state["base_times"]]
        self._record = Record(**state["record"])

    def save(self, path: Path | str) -> None:
        """Write the profile and state, without pickle; `load` refits the regressor."""
        path, profile = Path(path), self._profile
        tensors = {}
        if profile is not None:
            tensors["contentions"] = torch.from_numpy(_table(profile.contentions))
            tensors["seconds"] = torch.tensor(list(profile.seconds), dtype=torch.float64)
        settings = {"num_executors": self.num_executors, "state": self.state_dict()}
        write_whole(path, save(tensors, metadata={"predictor": json.dumps(settings)}))

    @classmethod
    def load(
        cls, path: Path | str, regressor: RegressorMixin | None = None
    ) -> PerformancePredictor:
        """Read a file that `save` has written, and refit the same kind of `regressor`.

        Raises:
            DataError: If the file is missing or has another format.
        """
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                settings = json.loads(file.metadata()["predictor"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            predictor = cls(settings["num_executors"], regressor)
            if tensors:
                rows = tensors["contentions"].tolist()
                contentions = tuple(Contention(*row) for row in rows)
                predictor.fit(Profile(contentions, tuple(tensors["seconds"].tolist())))
            predictor.load_state_dict(settings["state"])
        except FileNotFoundError:
            raise DataError(f"there is no predictor {path}") from None
        except (safetensors.SafetensorError, OSError, LookupError, TypeError, ValueError) as e:
            raise DataError(
                f"{path} is not a predictor of this program ({e}); fit and save it again"
            ) from e
        return predictor
