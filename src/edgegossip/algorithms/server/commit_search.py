"""Online search for the commit rate: more commits per window as long as the reward rises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from edgegossip.algorithms.server.reward import Look
from edgegossip.contract.protocol import Note, Seconds


def implicit_momentum(steps_per_commit: Sequence[float]) -> float:
    r"""Compute the implicit momentum of workers that commit without waiting.

    .. math::
        \mu = 1 - p, \qquad
        p = \frac{1}{1 + (1 - \frac1m) \sum_{i=1}^{m} \frac{\Gamma}{\Delta C_i\, v_i}}

    Fewer commits mean more implicit momentum, and explicit momentum adds to it. The paper calls
    :math:`v_i` a speed; here it is the duration of a step, so the fraction has no unit: it is
    the number of steps between two commits. With one step per commit, the result is the
    :math:`1 - 1/m` of asynchronous SGD.

    Args:
        steps_per_commit: :math:`\Gamma / (\Delta C_i\, v_i)` of each worker, above 0.

    References:
        Hu, Wang & Wu, AAAI 2020, arXiv:1911.06949, Theorem 1. For the limit: Mitliagkas,
        Zhang, Hadjis & Re, "Asynchrony begets momentum", 2016, arXiv:1605.09774.

    >>> implicit_momentum([1.0, 1.0, 1.0, 1.0])
    0.75
    >>> implicit_momentum([20.0])
    0.0
    """
    m = len(steps_per_commit)
    return 1 - 1 / (1 + (1 - 1 / m) * sum(steps_per_commit))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A finished window.

    Attributes:
        at: End time.
        window: Number since the current search began, from 1.
        rate: Commits requested from each worker.
        reward: Reward in the search; None outside a search.
        loss: Loss at the end of the window.
        num_commits: Commits of all workers in the window.
        implicit_momentum: Momentum by Theorem 1 (`implicit_momentum`); None without commits.
    """

    at: Seconds
    window: int
    rate: int
    reward: float | None
    loss: float
    num_commits: int
    implicit_momentum: float | None

    @property
    def note(self) -> Note:
        """Make a note of the fields with known values.

        The time is omitted, because each note has its own.
        """
        known = {name: value for name, value in asdict(self).items() if value is not None}
        del known["at"]
        return Note("search", known)


@dataclass(slots=True, kw_only=True)
class CommitSearch:
    """State of the search, which is part of a server's state.

    A window tries a rate. While rewards rise, the next window tries a higher rate. The first
    window without improvement ends the search, and the best rate is kept.

    Attributes:
        growth: Ratio of the next rate to the current one; the next rate is higher by at least
            one.
        rate: Commits of each worker in the current window.
        is_searching: Whether another rate will be tried.
        best_reward: Best reward among the windows of this search.
        best_rate: Rate of that window.
        looks: Losses measured in this window, from its start.
        tried: Finished windows.
    """

    growth: float = 1.0
    rate: int = 1
    is_searching: bool = True
    best_reward: float = -math.inf
    best_rate: int = 1
    looks: list[Look] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)

    def begin(self) -> None:
        """Start a new search from the current rate."""
        # Searches that began below it ended at a rate of 1 in most of 36 runs, because rewards
        # differ by less than their noise once the loss falls slowly.
        self.is_searching, self.best_reward, self.best_rate = True, -math.inf, self.rate

    def judge(self, reward: float, max_rate: int) -> None:
        """Record the reward of the window that tried `rate`, and choose the next rate."""
        # Until the loss has fallen in some window, the search continues upward: more commits
        # mean less implicit momentum, which stops a divergence.
        if reward > self.best_reward:
            self.best_reward, self.best_rate = reward, self.rate
        elif self.best_reward > 0:
            self.rate, self.is_searching = self.best_rate, False
            return
        self.is_searching = self.rate < max_rate
        self.rate = min(max(self.rate + 1, round(self.growth * self.rate)), max_rate)
