"""Commits of each worker to a server, counted from the logged messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgegossip.core.protocol import Rank

COMMIT = "commit"
"""The kind of a worker's commit to a server."""


@dataclass(slots=True)
class Commits:
    """Counts messages of the kind `COMMIT`; a resent message counts once.

    Attributes:
        by_rank: Commits of each worker so far.

    >>> commits = Commits()
    >>> [commits.add(1, "commit", 0), commits.add(1, "commit", 0), commits.add(1, "params", 1)]
    [True, False, False]
    >>> commits.by_rank
    {1: 1}
    """

    by_rank: dict[Rank, int] = field(default_factory=dict)
    _last_round: dict[Rank, int] = field(default_factory=dict)

    def add(self, rank: Rank, kind: str, round: int) -> bool:
        """Count a message of `rank` if it is a new commit; return whether it is."""
        if kind != COMMIT or round <= self._last_round.get(rank, -1):
            return False
        self._last_round[rank] = round
        self.by_rank[rank] = self.by_rank.get(rank, 0) + 1
        return True

    @property
    def total(self) -> int | None:
        """Commits of all workers; None in a run without commits."""
        return sum(self.by_rank.values()) if self.by_rank else None
