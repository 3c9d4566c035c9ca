r"""Levels that represent many magnitudes with a small squared error.

Magnitudes are sorted into bins by the first 16 bits of their float32 (the exponent and 7 bits
of mantissa). All but two passes over the magnitudes therefore become passes over a few hundred
bins. A *partition* of the bins into cells gives each cell its mean as its level. The levels
:math:`\ell_c` of cells with mass :math:`m_c` then *capture* the energy
:math:`\sum_c m_c \ell_c^2`; the rest of the energy is the squared error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
Cuts: TypeAlias = NDArray[np.int64]
"""The first bin of each cell except the lowest, [num_levels - 1]."""

NUM_ROUNDS = 16
SLACK = 1 + 2.0**-6
"""Factor that covers the width of a bin and the rounding of the scale."""


def fit(
    magnitudes: Floats, weights: Doubles, num_levels: int, thresholds: Doubles
) -> tuple[Bytes, Doubles]:
    """Find levels with a small weighted squared error, and each magnitude's nearest level.

    Args:
        magnitudes: Magnitudes, at least 0, [count].
        weights: Weights of their squared errors, [count].
        num_levels: Number of levels, at most 256.
        thresholds: Initial thresholds between cells, [num_levels - 1]. The error never exceeds
            that of these thresholds.

    Returns:
        Index of each magnitude's level, [count], and the levels, ascending, [num_levels].

    >>> magnitudes = np.float32([1.0, 1.25, 8.0, 8.0])
    >>> codes, levels = fit(magnitudes, np.ones(4), 2, np.array([2.0]))
    >>> codes.tolist(), levels.tolist()
    ([0, 0, 1, 1], [1.125, 8.0])
    """
    if len(magnitudes) == 0:
        return np.empty(0, np.uint8), np.zeros(num_levels)
    bins = magnitudes.view(np.uint32) >> 16
    lowest = int(bins.min())
    bins -= np.uint32(lowest)
    histogram = _Histogram.of(bins, magnitudes, weights, lowest)
    cuts = histogram.best(num_levels, thresholds)
    table = np.repeat(np.arange(num_levels, dtype=np.uint8), histogram.widths(cuts))
    return table[bins], histogram.levels(cuts)


@lru_cache(maxsize=1024)
def guarantee(numel: int, num_levels: int) -> tuple[float, Doubles]:
    r"""Thresholds between levels with a guarantee for any vector of unit root mean square.

    All magnitudes are at most :math:`\sqrt d`. The lowest cell holds magnitudes below
    :math:`t`, whose share of the energy is at most :math:`t^2`. The ends of each remaining cell
    have the same ratio :math:`r = (\sqrt d / t)^{1/(L - 1)}`. In a cell with ends :math:`a` and
    :math:`ra`, the mean captures at least :math:`4 r / (1 + r)^2` of the energy (Kantorovich's
    inequality), so that

    .. math:: \delta = (1 - t^2) \, \frac{4 r}{(1 + r)^2}

    of the energy is captured. The best of several :math:`t` is used.

    Returns:
        :math:`\delta` and the thresholds, [num_levels - 1].

    >>> [round(guarantee(100_000, num_levels)[0], 3) for num_levels in (2, 8, 128)]
    [0.005, 0.724, 0.998]
    """
    largest = math.sqrt(numel)

    def attempt(lowest: float) -> tuple[float, float, float]:
        ratio = (largest / lowest) ** (1 / (num_levels - 1))
        spread = ratio * SLACK
        captured = 4 * spread / (1 + spread) ** 2
        return (1 - (lowest * SLACK) ** 2) * captured, lowest, ratio

    delta, lowest, ratio = max(attempt(2.0**-k) for k in range(1, 13))
    return delta, np.array([lowest * ratio**k for k in range(num_levels - 1)])


@dataclass(frozen=True, eq=False)
class _Histogram:
    """Bins in ascending order, including empty ones.

    Attributes:
        ends: Beginning of each bin, and end of the last one, [num_bins + 1].
        mass: Sum of the weights in all earlier bins, [num_bins + 1].
        moment: The same sums of weights times magnitudes.
    """

    ends: Doubles
    mass: Doubles
    moment: Doubles

    @classmethod
    def of(
        cls, bins: NDArray[Any], magnitudes: Floats, weights: Doubles, lowest: int
    ) -> _Histogram:
        mass = np.bincount(bins, weights)
        moment = np.bincount(bins, weights * magnitudes)
        firsts = np.arange(lowest, lowest + len(mass) + 1, dtype=np.uint32) << 16
        return cls(firsts.view(np.float32).astype(np.float64), _before(mass), _before(moment))

    def best(self, num_levels: int, thresholds: Doubles) -> Cuts:
        """The best partition among two initial ones and those of Lloyd's iterations."""
        found = [np.searchsorted(self.ends[:-1], thresholds), self._even(num_levels)]
        cuts = max(found, key=self.captured)
        for _ in range(NUM_ROUNDS):
            levels = self.levels(cuts)
            middles = (levels[1:] + levels[:-1]) / 2
            # A bin belongs to the cell nearest to its middle.
            moved = np.searchsorted((self.ends[1:] + self.ends[:-1]) / 2, middles)
            if np.array_equal(moved, cuts):
                break
            cuts = np.maximum.accumulate(moved)
            found.append(cuts)
        return max(found, key=self.captured)

    def _even(self, num_levels: int) -> Cuts:
        """Asymptotically optimal cells, by the cube root of the density.

        P. F. Panter and W. Dite, "Quantization distortion in pulse-count modulation with
        nonuniform spacing of levels", Proc. IRE 1951.
        """
        widths = np.diff(self.ends)
        share = _before(np.cbrt(np.diff(self.mass) * widths**2))
        targets: Doubles = share[-1] * np.arange(1, num_levels) / num_levels
        return np.searchsorted(share, targets)

    def widths(self, cuts: Cuts) -> Cuts:
        """Number of bins in each cell, [num_levels]."""
        widths: Cuts = np.diff(cuts, prepend=0, append=len(self.mass) - 1)
        return widths

    def captured(self, cuts: Cuts) -> float:
        """Energy that the levels capture."""
        mass, moment = self._cells(cuts)
        return float(np.sum(moment[mass > 0] ** 2 / mass[mass > 0]))

    def levels(self, cuts: Cuts) -> Doubles:
        """Mean of each cell; for an empty cell, its beginning."""
        mass, moment = self._cells(cuts)
        begin = self.ends[np.concatenate([[0], cuts])]
        return np.where(mass > 0, moment / np.where(mass > 0, mass, 1), begin)

    def _cells(self, cuts: Cuts) -> tuple[Doubles, Doubles]:
        edges = np.concatenate([[0], cuts, [len(self.mass) - 1]])
        return np.diff(self.mass[edges]), np.diff(self.moment[edges])


def _before(numbers: NDArray[Any]) -> Doubles:
    return np.concatenate([[0.0], np.cumsum(numbers)])
