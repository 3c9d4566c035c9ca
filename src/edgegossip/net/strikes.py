"""Strikes for messages that no honest worker sends; a sender with too many is muted."""

from __future__ import annotations

from collections import Counter

from edgegossip.core.protocol import Rank

IN_ANOTHERS_NAME = "in another's name"
IMPOSSIBLE_ROUND = "of an impossible round"
OTHER_FORM = "of another form"
BAD_VALUES = "with bad values"
TOO_LARGE = "with values far beyond what is usual"
FLOOD = "more than any honest worker sends"
LIES = frozenset({IN_ANOTHERS_NAME, IMPOSSIBLE_ROUND, OTHER_FORM, BAD_VALUES, TOO_LARGE})
"""Reasons for a rejection that only the sender can cause. They exclude messages that are lost,
damaged, beyond the memory limit, or from an earlier life or another run.
"""
_MOST = 3


class Strikes:
    """Counts each sender's lies; three mute it until another process of its rank appears.

    >>> strikes = Strikes()
    >>> [strikes.add(2) for _ in range(3)], strikes.muted
    ([False, False, True], {2})
    >>> strikes.forgive(2)
    >>> strikes.muted
    set()
    """

    def __init__(self) -> None:
        self._counts: Counter[Rank] = Counter()
        self.muted: set[Rank] = set()

    def add(self, rank: Rank) -> bool:
        """Count a lie; return whether it mutes `rank`."""
        self._counts[rank] += 1
        return self._counts[rank] >= _MOST and self.mute(rank)

    def mute(self, rank: Rank) -> bool:
        """Mute `rank`; return whether that is new."""
        is_new = rank not in self.muted
        self.muted.add(rank)
        return is_new

    def forgive(self, rank: Rank) -> None:
        """Clear the record of `rank`, which has a new process."""
        self._counts.pop(rank, None)
        self.muted.discard(rank)
