"""Algorithm 1 of EdgeGossip: the share of its data that each platform has time for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgegossip.contract import PlatformError, Rank, check_ranges

_HALVINGS = 30  # of the interval in which the stable correction lies
_ROUNDING = 1e-9
LONGEST = 4
"""Longest round, as a multiple of the steps that were asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    r"""Each platform's share of its data in the next epoch.

    Attributes:
        keep_ratios: [E] :math:`r_i` in (0, 1]; 0 for a failed platform, or one without data.
        speeds: [E] :math:`s_i = p_i / \max_j p_j` for platforms that train; 0 for the others.
        seconds: [E] :math:`T_i`, time for all data of a platform; infinite if it has failed.
        has_failed: [E] :math:`F_i`, whether a platform has failed.
    """

    keep_ratios: NDArray[np.float64]
    speeds: NDArray[np.float64]
    seconds: NDArray[np.float64]
    has_failed: NDArray[np.bool_]

    def steps(self, num_steps: float) -> NDArray[np.int64]:
        r"""SGD steps of each platform in a round of about `num_steps` steps of the fastest.

        .. math:: H_i = \max(1, \lfloor s_i T \rfloor), \qquad
                  T = \min(4 H, \max(1, [H \min_j s_j]) / \min_j s_j)

        with :math:`H` = `num_steps` and :math:`[x]` the nearest whole number. The slowest
        platform cannot take a part of a step. The others take as many as fit into its time,
        more or fewer than :math:`H s_i`, so that nobody waits for as long as one of its own
        steps takes. Beyond four times :math:`H`, they wait: models that train for ever longer
        without an exchange drift apart. Platforms that do not train have 0.

        >>> shares = Balancer().balance([100.0, 50.0, 10.0, 0.0], [1000] * 4)
        >>> shares.steps(16).tolist(), shares.steps(1).tolist()
        ([20, 10, 2, 0], [4, 2, 1, 0])
        """
        training = self.speeds[self.speeds > 0]
        if not len(training):
            return np.zeros(len(self.speeds), np.int64)
        slowest = training.min()
        length = min(LONGEST * num_steps, max(1, round(num_steps * slowest)) / slowest)
        # Rounding must not take a whole step from one that has just enough time for it.
        whole = np.maximum(1, np.floor(self.speeds * length * (1 + _ROUNDING)))
        steps: NDArray[np.int64] = np.where(self.speeds > 0, whole, 0).astype(int)
        return steps

    def step_ratio(self, rank: Rank, num_steps: int | None, share: float = 1.0) -> float:
        """A platform's factor on the steps of a round that asks for `num_steps` of them, of
        which the fastest is to take a `share`.

        Rounds without a fixed number of steps get the relative speed times the share.
        """
        if num_steps is None:
            return share * float(self.speeds[rank])
        return float(self.steps(share * num_steps)[rank]) / num_steps

    @property
    def failed_share(self) -> float:
        """Share of failed platforms, for comparison with the threshold."""
        return float(self.has_failed.mean())

    @property
    def mean_keep_ratio(self) -> float:
        r""":math:`\bar r`, the mean share of platforms that train; 0 if none does."""
        kept = self.keep_ratios[self.keep_ratios > 0]
        return float(kept.mean()) if len(kept) else 0.0

    @property
    def fastest_seconds(self) -> float:
        """:math:`T_j` of the fastest platform; infinite if none trains."""
        return float(self.seconds[self.keep_ratios > 0].min(initial=np.inf))

    def stable_correction(self, correction: float, max_mean_factor: float) -> float:
        r"""The largest :math:`\beta` up to `correction` whose mean factor is within the limit.

        The factor of platform :math:`i` is :math:`(\bar r / r_i)^\beta`. Its mean over the
        platforms that train is 1 for :math:`\beta = 0` and grows with :math:`\beta`.

        >>> uneven = Balancer().balance([64.0, 1.0], num_samples=[1000, 1000])
        >>> round(uneven.stable_correction(0.5, max_mean_factor=1.3), 3)
        0.152
        """
        kept = self.keep_ratios[self.keep_ratios > 0]
        if not len(kept):
            return correction
        factors = self.mean_keep_ratio / kept
        if float((factors**correction).mean()) <= max_mean_factor:
            return correction
        # The mean grows with the exponent, so halving the interval finds it.
        low, high = 0.0, correction
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_stable = float((factors**middle).mean()) <= max_mean_factor
            low, high = (middle, high) if is_stable else (low, middle)
        return low


@dataclass(frozen=True, kw_only=True)
class Balancer:
    r"""Size every platform's share of its data so that all platforms finish together.

    With predicted throughput :math:`p_i` and :math:`|X_i|` samples, platform :math:`i` has
    failed if :math:`p_i` is 0 or below `min_throughput`; for the others,

    .. math:: T_i = |X_i| / p_i, \qquad r_i = \min_j T_j / T_i

    so the fastest platform keeps all of its data. If the share of failed platforms exceeds
    `max_failed_share`, the caller decides what to do.

    Args:
        min_throughput: Samples per second below which a platform counts as failed, at least 0;
            the paper's :math:`p_\text{threshold}`.
        max_failed_share: Tolerated share of failed platforms, in [0, 1]; the paper's
            :math:`f_\text{threshold}`.

    Raises:
        ValueError: If a threshold is out of range.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 32(7), 2021, Algorithm 1. Departures: failures are
        compared with the threshold after the loop over platforms, not within it; a platform
        without data is never the fastest.

    >>> shares = Balancer().balance([100.0, 50.0, 0.0], num_samples=[1000, 1000, 1000])
    >>> shares.keep_ratios.tolist()
    [1.0, 0.5, 0.0]
    >>> Balancer().balance([100.0, 50.0], num_samples=[3000, 1000]).speeds.tolist()
    [1.0, 0.5]
    >>> Balancer().has_too_many_failures(shares)
    True
    """

    min_throughput: float = 0.001
    max_failed_share: float = 0.1

    def __post_init__(self) -> None:
        check_ranges(self, min_throughput="at least 0 and finite", max_failed_share="in [0, 1]")

    def balance(self, throughputs: ArrayLike, num_samples: ArrayLike) -> Shares:
        """Compute the share of each platform.

        Args:
            throughputs: [E] :math:`p_i`, samples per second, at least 0; 0 for a lost platform.
            num_samples: [E] :math:`|X_i|`, at least 0.

        Raises:
            ValueError: If the arguments differ in length, or a number is negative or not
                finite.
        """
        speed, amount = np.asarray(throughputs, float), np.asarray(num_samples, float)
        if speed.ndim != 1 or speed.shape != amount.shape or not len(speed):
            raise ValueError(
                "give one throughput and one number of samples for each platform, got shapes "
                f"{list(speed.shape)} and {list(amount.shape)}"
            )
        for name, values in (("throughputs", speed), ("num_samples", amount)):
            if not (np.isfinite(values) & (values >= 0)).all():
                raise ValueError(f"{name} must be finite and at least 0, got {values}")
        has_failed = (speed < self.min_throughput) | (speed == 0)
        seconds = np.full(len(speed), np.inf)
        np.divide(amount, speed, out=seconds, where=~has_failed)
        # Without data, a platform would finish in no time, and all others would train nothing.
        # Absurd forecasts, of liars, may say the same.
        is_counted = ~has_failed & (seconds > 0) & np.isfinite(seconds)
        keep_ratios = np.zeros(len(speed))
        if is_counted.any():
            keep_ratios[is_counted] = seconds[is_counted].min() / seconds[is_counted]
        # In this order, equal amounts give exactly the keep ratios.
        most = (keep_ratios * amount).max()
        speeds = keep_ratios * (amount / most) if most else keep_ratios
        return Shares(keep_ratios, speeds, seconds, has_failed)

    def has_too_many_failures(self, shares: Shares) -> bool:
        """Whether more than `max_failed_share` of the platforms have failed."""
        return shares.failed_share > self.max_failed_share

    def require_few_failures(self, shares: Shares) -> None:
        """Raise `PlatformError` if too many platforms have failed."""
        if self.has_too_many_failures(shares):
            failed = shares.has_failed.nonzero()[0].tolist()
            raise PlatformError(
                f"{len(failed)} of {len(shares.has_failed)} platforms have failed (ranks "
                f"{failed}), more than max_failed_share={self.max_failed_share:g} allows, and "
                "on_failure='halt'; choose 'continue' or 'reassign' to continue without them"
            )
