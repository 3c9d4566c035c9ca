"""Online search for the commit rate: more commits per window as long as the reward rises."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

from edgegossip.algorithms.parameter_server.reward import Look
from edgegossip.core.protocol import Note, Seconds


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
    window without improvement ends the search, and the best rate is kept. Until the loss falls
    in some window, the search continues upward, at most to the highest rate: more commits mean
    less implicit momentum, which stops a divergence.

    A later search begins at the current rate. Searches that began below it ended at a rate of 1
    in most of 36 runs, because rewards differ by less than their noise once the loss falls
    slowly.

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
        self.is_searching, self.best_reward, self.best_rate = True, -math.inf, self.rate

    def judge(self, reward: float, max_rate: int) -> None:
        """Record the reward of the window that tried `rate`, and choose the next rate."""
        if reward > self.best_reward:
            self.best_reward, self.best_rate = reward, self.rate
        elif self.best_reward > 0:
            self.rate, self.is_searching = self.best_rate, False
            return
        self.is_searching = self.rate < max_rate
        self.rate = min(max(self.rate + 1, round(self.growth * self.rate)), max_rate)
