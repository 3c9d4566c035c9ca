"""Successive halving: many settings for a short time, the best of them for longer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from edgegossip.contract.protocol import Seconds

FACTOR = 3
"""One in this many settings reaches the next rung, where runs are longer by this factor."""
SHORTEST = 1 / 40
"""Minimum length of a run, as a share of a whole run; in shorter runs, settings look alike."""
MOST_RUNS = 24.0
"""Maximum number of whole runs spent on tuning one candidate."""


@dataclass(frozen=True, slots=True)
class HalvingRung:
    """One stage of the tuning of a candidate.

    Args:
        num_settings: Number of settings that are run.
        share: Length of the runs, as a share of a whole run.
        num_seeds: Number of seeds of each setting.
    """

    num_settings: int
    share: float
    num_seeds: int

    @property
    def num_runs(self) -> int:
        """Number of runs."""
        return self.num_settings * self.num_seeds


@dataclass(frozen=True, slots=True)
class Cost:
    """Wall time of a candidate's runs on one core.

    Args:
        start: Seconds before training begins.
        whole: Additional seconds of a whole run.
    """

    start: Seconds
    whole: Seconds

    def runs(self, number: int, share: float) -> Seconds:
        """Time of `number` runs with this share of the full length.

        >>> Cost(start=1.0, whole=10.0).runs(3, share=0.5)
        18.0
        """
        return number * (self.start + share * self.whole)


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rungs of one candidate, in order.

    Args:
        rungs: The rungs; empty if there is nothing to choose.
        num_settings: Number of settings to try, which may be fewer than the candidate has.
    """

    rungs: tuple[HalvingRung, ...]
    num_settings: int

    def cost(self, cost: Cost) -> Seconds:
        """Wall time of all rungs on one core."""
        return sum(cost.runs(rung.num_runs, rung.share) for rung in self.rungs)


def ladders(numbers: Mapping[str, int], whole_runs: float) -> dict[str, Ladder]:
    """Plan the tuning of each candidate for the time of this many whole runs.

    The first rung runs all settings of a candidate; each further rung runs the best third of
    the previous rung's settings for three times as long. The last rungs of all candidates have
    the same length. They are as long as the budget of the candidate with the most settings
    allows; other candidates spend their budgets on more seeds. If runs would be shorter than
    `SHORTEST`, only the first nine settings are tried, or the first three, or one.

    Args:
        numbers: Number of settings of each candidate.
        whole_runs: Budget of each candidate, in whole runs.

    References:
        Jamieson & Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
        Optimization", AISTATS 2016, arXiv:1502.07943, figure 3. Departure: on each rung, runs
        start from the beginning with different seeds, so a lucky setting does not stay lucky.

    >>> found = ladders({"gosgd": 9, "bsp": 3}, whole_runs=4.5)
    >>> [(rung.num_settings, rung.share) for rung in found["gosgd"].rungs]
    [(9, 0.25), (3, 0.75)]
    >>> found["bsp"].rungs
    (HalvingRung(num_settings=3, share=0.75, num_seeds=2),)
    """
    for most in (max(numbers.values()), FACTOR**2, FACTOR):
        tried = {name: min(number, most) for name, number in numbers.items()}
        depth = min(1.0, whole_runs / max(map(_whole_runs, tried.values())))
        num_rungs = max(len(_sizes(number)) for number in tried.values())
        if depth * FACTOR >= SHORTEST * FACTOR**num_rungs:
            return {name: _ladder(each, depth, whole_runs) for name, each in tried.items()}
    return {name: Ladder(rungs=(), num_settings=1) for name in numbers}


def _ladder(num_settings: int, depth: float, whole_runs: float) -> Ladder:
    sizes = _sizes(num_settings)
    # A hair more, because a quotient may be a hair less than a whole number.
    num_seeds = max(1, math.floor(whole_runs / (depth * _whole_runs(num_settings)) + 1e-9))
    shares = [depth / FACTOR**rung for rung in reversed(range(len(sizes)))]
    rungs = zip(sizes, shares, strict=True)
    return Ladder(
        tuple(HalvingRung(size, share, num_seeds) for size, share in rungs), num_settings
    )


def _sizes(num_settings: int) -> list[int]:
    """Settings on each rung.

    >>> _sizes(9), _sizes(5), _sizes(1)
    ([9, 3], [5, 2], [])
    """
    sizes = []
    while num_settings > 1:
        sizes.append(num_settings)
        num_settings = math.ceil(num_settings / FACTOR)
    return sizes


def _whole_runs(num_settings: int) -> float:
    """Work, in whole runs, of a ladder whose last runs are whole; 1 if nothing is tuned.

    >>> _whole_runs(9), _whole_runs(3)
    (6.0, 3.0)
    """
    sizes = _sizes(num_settings)
    found = sum(size / FACTOR**rung for rung, size in enumerate(reversed(sizes)))
    return found or 1.0


@dataclass(frozen=True, slots=True)
class Ranking:
    """Whole runs that rank the tuned candidates.

    Args:
        num_candidates: Number of candidates.
        num_seeds: Number of seeds of each candidate.
    """

    num_candidates: int
    num_seeds: int

    @property
    def num_finalists(self) -> int:
        """Number of candidates that get more seeds: the best third, at most 3; 0 instead of 1.

        >>> [Ranking(number, 3).num_finalists for number in (3, 5, 10, 20)]
        [0, 2, 3, 3]
        """
        number = min(FACTOR, math.ceil(self.num_candidates / FACTOR))
        return number if number > 1 else 0

    @property
    def num_final_seeds(self) -> int:
        """Additional seeds of a finalist, which then has three times as many."""
        return (FACTOR - 1) * self.num_seeds

    def cost(self, costs: Mapping[str, Cost]) -> Seconds:
        """Wall time on one core, if finalists cost as much as the average candidate."""
        whole = sum(each.runs(1, share=1.0) for each in costs.values())
        final = self.num_finalists * self.num_final_seeds * whole / self.num_candidates
        return self.num_seeds * whole + final


def most_whole_runs(
    numbers: Mapping[str, int], costs: Mapping[str, Cost], ranking: Ranking, budget: Seconds
) -> float | None:
    """Find how many whole runs a budget allows for the tuning of each candidate.

    Args:
        numbers: Number of settings of each candidate.
        costs: Cost of each candidate's runs.
        ranking: Runs that rank the candidates afterwards.
        budget: Seconds on one core for everything.

    Returns:
        Number of whole runs; None if the budget is too small for the ranking.
    """
    steps = [quarter / 4 for quarter in range(int(4 * MOST_RUNS) + 1)]
    return next(
        (
            whole_runs
            for whole_runs in reversed(steps)
            if total_cost(ladders(numbers, whole_runs), costs, ranking) <= budget
        ),
        None,
    )


def total_cost(
    found: Mapping[str, Ladder], costs: Mapping[str, Cost], ranking: Ranking
) -> Seconds:
    """Seconds on one core for tuning and ranking; see `most_whole_runs`."""
    tuning = sum(ladder.cost(costs[name]) for name, ladder in found.items())
    return tuning + ranking.cost(costs)
