"""Rewards of a commit rate: how fast the loss fell while the rate was tried."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_ranges

Look: TypeAlias = tuple[Seconds, float]
"""Time on the server's clock, and the loss at that time."""

FloatArray: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class Reward(Protocol):
    """Rates the window in which a commit rate was tried."""

    @property
    def num_looks(self) -> int:
        """Number of losses used, from the start to the end of the window."""

    def __call__(self, looks: Sequence[Look]) -> float:
        """Rate the window: higher is better, and above 0 only if the loss fell."""


@dataclass(frozen=True, kw_only=True)
class LogSlope:
    r"""Negative least-squares slope of the logarithm of the loss; robust, and the default.

    .. math:: r = -\frac{\sum_k (t_k - \bar t)\, \ln \ell_k}{\sum_k (t_k - \bar t)^2}

    The reward is above 0 only if the fitted loss falls and the last loss is below the first. A
    loss that is not finite yields minus infinity.

    Args:
        num_looks: Number of losses in a window, at least 3.

    Raises:
        ValueError: If `num_looks` is out of range.

    >>> LogSlope()([(0.0, math.e**2), (1.0, math.e), (2.0, 1.0)])
    1.0
    """

    num_looks: int = 7

    def __post_init__(self) -> None:
        check_ranges(self, num_looks="at least 3")

    def __call__(self, looks: Sequence[Look]) -> float:
        times, losses = np.array(looks, dtype=float).T
        if not np.isfinite(losses).all():
            return -math.inf
        times = times - times.mean()  # large times would cancel digits of the slope
        logs = np.log(np.maximum(losses, 1e-12))
        # Rounded, so that equal losses have a slope of 0 and not of the sum's rounding error.
        slope = round(float(times @ -logs / (times @ times)), 12) + 0.0
        return slope if losses[-1] < losses[0] else min(slope, 0.0)


@dataclass(frozen=True, kw_only=True)
class ConstrainedFit:
    r"""The paper's curve, with its parameters constrained to sensible ranges.

    Fits :math:`\ell(t) = 1 / (a t + b) + c` with :math:`a, b > 0` and :math:`0 \le c < \min_k
    \ell_k`, and rates the window by the relative fall of the fitted curve: :math:`r = (\ell(0)
    - \ell(\Gamma)) / (\Gamma \ell(0))`. Such a curve cannot rise. If the last loss is above the
    first, the reward is minus the relative rise per second.

    Args:
        num_looks: Number of losses in a window, at least 4, because there are three parameters.

    Raises:
        ValueError: If `num_looks` is out of range.
    """

    num_looks: int = 7

    def __post_init__(self) -> None:
        check_ranges(self, num_looks="at least 4")

    def __call__(self, looks: Sequence[Look]) -> float:
        times, losses = np.array(looks, dtype=float).T
        if not np.isfinite(losses).all():
            return -math.inf
        span = times[-1] - times[0]
        if losses[-1] >= losses[0]:
            return float((losses[0] - losses[-1]) / (span * max(losses[0], 1e-12)))
        # For a given c the curve is a line in 1 / (loss - c). Many values of c are tried.
        best, fall = math.inf, 0.0
        for share in np.linspace(0.0, 0.98, 50):
            c = share * losses.min()
            slope, start = np.polyfit(times, 1 / np.maximum(losses - c, 1e-12), 1)
            if slope <= 0 or slope * times[0] + start <= 0:
                continue
            fitted = 1 / (slope * times + start) + c
            error = float(((fitted - losses) ** 2).sum())
            if error < best:
                best, fall = error, float((fitted[0] - fitted[-1]) / (span * fitted[0]))
        return fall


@dataclass(frozen=True, kw_only=True)
class PaperReward:
    r"""The published reward, unchanged: three losses, three parameters.

    Fits :math:`\ell(t) = 1 / (a^2 t + b) + c` through the losses at the window's start,
    middle and end, and rates the window by the inverse of the time at which the fit reaches the
    final loss :math:`\ell_{end}`:

    .. math:: r = \frac{a^2}{1 / (\ell_{end} - c) - b}

    With as many parameters as losses, noise is not smoothed. The sign flips if :math:`1 /
    (\ell_{end} - c) < b`, so a window with a rising loss may get a good rating. This reward is
    therefore not the default.

    Args:
        final_loss: :math:`\ell_{end}`, the loss at which training ends; 0.7 for CIFAR-10 in the
            published code.

    References:
        Hu, Wang & Wu, AAAI 2020, arXiv:1911.06949, and its published code (`get_reward`), from
        which the fit, its guards and their values -100000 and -100001 are taken.
    """

    final_loss: float = 0.7

    num_looks = 3

    def __call__(self, looks: Sequence[Look]) -> float:
        from scipy.optimize import curve_fit

        def curve(t: FloatArray, a: float, b: float, c: float) -> FloatArray:
            return 1 / (a * a * t + b) + c

        times, losses = np.array(looks, dtype=float).T
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                (a, b, c), _ = curve_fit(curve, times, losses, maxfev=20_000)
        except (RuntimeError, ValueError):  # the fit failed, or a loss is not finite
            return -math.inf
        if self.final_loss == c:
            return -100_000.0
        denominator = 1 / (self.final_loss - c) - b
        return float(a * a / denominator) if denominator != 0 else -100_001.0
