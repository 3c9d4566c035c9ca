"""An observer for those who want to see a part of what happens."""

from __future__ import annotations

from edgegossip.contract.observer import Observer
from edgegossip.contract.protocol import Message, Note, Rank, Seconds, Trained


class Silent(Observer):
    """Does nothing; who derives from it sees what it overrides."""

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        pass

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        pass

    def received(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, staleness: int
    ) -> None:
        pass

    def lost(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, reason: str
    ) -> None:
        pass

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        pass

    def noted(self, now: Seconds, rank: Rank, note: Note) -> None:
        pass
