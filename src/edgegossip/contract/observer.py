"""Interface for observers of a run."""

from __future__ import annotations

from typing import Protocol

from edgegossip.contract.protocol import Message, Note, Rank, Seconds, Trained


class Observer(Protocol):
    """Sees all events in order of time and changes nothing.

    A subclass may omit methods that it does not need.
    """

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        """Worker `rank` trained from `start` to `now`."""
        return

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        """Worker `rank` sent a message, which occupies the uplink during `uplink`."""
        return

    def received(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, staleness: int
    ) -> None:
        """A message arrived at worker `rank`, `staleness` rounds old."""
        return

    def lost(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, reason: str
    ) -> None:
        """A message from `sender` to `rank` was lost."""
        return

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        """Worker `rank` "crashed", "recovered" or "finished".

        One that leaves, or is not there at the start, is told as crashed, and one that comes
        for the first time as recovered.
        """
        return

    def noted(self, now: Seconds, rank: Rank, note: Note) -> None:
        """Worker `rank` recorded numbers."""
        return


class Unobserved(Observer):
    """An observer that does nothing."""


UNOBSERVED = Unobserved()
