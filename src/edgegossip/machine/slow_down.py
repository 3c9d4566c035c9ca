"""The RG of EdgeGossip's performance predictor: the slowdown by contention."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin, clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from threadpoolctl import threadpool_limits

from edgegossip.machine.contention import Contention
from edgegossip.machine.profile import Profile

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
    smooth = ConstantKernel(1.0, (1e-3, 1e3)) * RBF([0.5] * 3, (0.05, 50.0))
    kernel = smooth + WhiteKernel(1e-3, (1e-8, 1.0))
    return GaussianProcessRegressor(kernel, normalize_y=True)


def _fitted(regressor: RegressorMixin, u: np.ndarray, log_t: np.ndarray) -> Any:  # noqa: ANN401
    # On matrices this small, several threads of BLAS are five times slower than one; and the
    # same bits come out on any number of cores.
    with warnings.catch_warnings(), threadpool_limits(1):
        # A profile that leaves one of the three at 0 says nothing about its scale: no harm.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return clone(regressor).fit(u, log_t)


def _table(contentions: Sequence[Contention]) -> np.ndarray:
    return np.array([(u.cores, u.network, u.disk) for u in contentions])
