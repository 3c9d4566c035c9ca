"""Trust: which workers have lied, and are heard no longer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from edgegossip.contract.protocol import Event, Rank, WorkerLost
from edgegossip.contract.schema import MessageSpec
from edgegossip.net.guard.admission import Strikes
from edgegossip.net.guard.plausibility import Plausibility
from edgegossip.net.host.peers import Peers
from edgegossip.net.host.work import Footing

_LOG = logging.getLogger("edgegossip.net")


class Trust:
    """Blames, mutes and forgives the other workers.

    Args:
        schema: Description of the messages, by kind.
        params: Initial parameters, [num_params].
        peers: This worker's rank, and the state of the others.
        role: Returns the name of a rank's role.

    Attributes:
        plausibility: Finds values that are too large.
        footing: Goes back after training that messages have broken.
        strikes: Lies by sender, and the muted workers.
        blamed: Events that follow from blame after failed training; the owner empties the list.
    """

    def __init__(
        self,
        schema: Mapping[str, MessageSpec],
        params: Tensor,
        peers: Peers,
        role: Callable[[Rank], str],
    ) -> None:
        self._peers = peers
        self.plausibility = Plausibility(
            schema, params, peers.rank, present=lambda: self.present, role=role
        )
        self.footing = Footing(params, self.blame, self.plausibility.went_well)
        self.strikes = Strikes()
        self.blamed: list[Event] = []

    @property
    def present(self) -> tuple[Rank, ...]:
        """The other workers that are present and not ignored."""
        peers = self._peers
        return tuple(rank for rank in peers.active if not peers[rank].is_refused)

    def punish(self, offenders: Iterable[Rank]) -> list[Event]:
        """Mute repeated offenders; no worker waits for rejected messages."""
        events: list[Event] = []
        for rank in offenders:
            is_too_much = self.strikes.add(rank)
            why = "it has sent what no honest worker sends, three times"
            events += self.mute(rank, why) if is_too_much else self._lose(rank)
        return events

    def _lose(self, rank: Rank) -> list[Event]:
        """Give up on a worker that has lied; if it is lost already, drop its unused data."""
        self._peers.lied(rank)
        return [WorkerLost(rank, has_lied=True)] if self._peers.has_begun else []

    def mute(self, rank: Rank, why: str) -> list[Event]:
        """Ignore `rank` until another process of its rank appears."""
        _LOG.warning("ignoring worker %d until it is restarted: %s", rank, why)
        self.strikes.mute(rank)
        self.plausibility.acquit(rank)
        self._peers[rank].refuse()
        return self._lose(rank)

    def forgive(self, rank: Rank) -> None:
        """Clear the record of `rank`, which has a new process."""
        self.strikes.forgive(rank)
        self.plausibility.acquit(rank)

    def blame(self) -> bool:
        """After failed training, mute the sender that stood out; return whether one did."""
        rank = self.plausibility.suspect()
        if rank is None:
            return False
        why = "training failed after its messages, whose values were the largest"
        self.blamed += self.mute(rank, why)
        return True
