"""The online search for the commit rate: more commits a window, as long as that helps."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

from edgegossip.algorithms.parameter_server.reward import Look
from edgegossip.core.protocol import Note, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A window that is over.

    Attributes:
        at: Time at which it ended.
        window: Its number since the search was begun anew, from 1.
        rate: Commits of each worker that were wanted in it.
        reward: Reward that the search gave it; None if it did not search.
        loss: Loss at its end.
        num_commits: Commits of all workers in it.
        implicit_momentum: Momentum by Theorem 1; None if nobody committed.
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
        """Put it on record, less unknown values and the time that each note has."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        del known["at"]
        return Note("search", known)


@dataclass(slots=True, kw_only=True)
class CommitSearch:
    """State of the search; the state of a server has one.

    A window tries a rate. While rewards rise, the next window tries a higher one; the first
    that does not do better ends the search, and the best rate stays. A window in which the
    loss did not fall is no reward at all: more commits mean less implicit momentum, so the
    search goes on upwards from there, which is what stops a divergence.

    A later search begins at the present rate. (One that began below it sank to a rate of 1 in
    most of 36 runs: rewards differ by less than their noise once the loss falls slowly.)

    Attributes:
        growth: The next rate is so many times the present one, and at least one more.
        rate: Commits of each worker in the present window.
        is_searching: Another rate will be tried.
        best_reward: Best reward among the windows of this search.
        best_rate: The rate of that window.
        looks: Losses of this window, from its start.
        tried: Each window so far.
    """

    growth: float = 1.0
    rate: int = 1
    is_searching: bool = True
    best_reward: float = -math.inf
    best_rate: int = 1
    looks: list[Look] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)

    def begin(self) -> None:
        """Search anew, from the present rate."""
        self.is_searching, self.best_reward, self.best_rate = True, -math.inf, self.rate

    def judge(self, reward: float, max_rate: int) -> None:
        """Account for a window in which `rate` was tried."""
        if reward > self.best_reward:
            self.best_reward, self.best_rate = reward, self.rate
        elif self.best_reward > 0:
            self.rate, self.is_searching = self.best_rate, False
            return
        self.is_searching = self.rate < max_rate
        self.rate = min(max(self.rate + 1, round(self.growth * self.rate)), max_rate)
