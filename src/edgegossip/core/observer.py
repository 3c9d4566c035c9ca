"""Who may watch a run."""

from __future__ import annotations

from typing import Protocol

from edgegossip.core.protocol import Message, Rank, Seconds, Trained


class Observer(Protocol):
    """Sees what happens, in order of time, and changes nothing."""

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        """Worker `rank` trained from `start` to `now`."""

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        """A message was handed over; the uplink carries it during `uplink`."""

    def received(self, now: Seconds, rank: Rank, sender: Rank, staleness: int) -> None:
        """A message arrived, `staleness` rounds old."""

    def lost(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, reason: str
    ) -> None:
        """A message from `sender` did not reach `rank`."""

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        """Worker `rank` "crashed", "recovered" or "finished"."""


class Unobserved:
    """The observer of a run that nobody watches."""

    def ignore(self, *args: object, **kwargs: object) -> None:
        """Nothing is kept."""

    trained = sent = received = lost = changed = ignore


UNOBSERVED = Unobserved()
