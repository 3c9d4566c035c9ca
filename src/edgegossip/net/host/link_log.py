"""Lost and returned links: rate-limited lines for the log, and reasons for the events."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.host.status import Phase
from edgegossip.net.transport import Incarnation

_LOG = logging.getLogger("edgegossip.net")
PIECE = 256_000
"""Bytes that must leave within a lease, or the link is lost."""
_NUM_LOSSES = 3
_QUIET: Seconds = 10.0
"""Minimum seconds between two lines about the loss of one link."""
_TOLD_AT_ONCE = 20
"""Losses of one link that are told in a burst; on average, one in `_QUIET`."""
_WHY = {
    Phase.WAITING: "while it waited to begin",
    Phase.RUNNING: "it has failed, or the path to it is cut",
    Phase.FINISHED: "it had finished",
    Phase.LEAVING: "it was stopped, and keeps a checkpoint",
    Phase.GONE: "it has left the run",
}


@dataclass(slots=True)
class _Link:
    incarnation: Incarnation
    began_at: Seconds
    num_told: int = 0
    is_told: bool = True  # of the last loss
    lost_at: Seconds = math.nan
    said_at: Seconds = -math.inf
    num_unsaid: int = 0
    has_said_lost: bool = False
    num_bytes: int = 0  # sent since the link was found
    sent_at: Seconds = -math.inf
    num_losses: int = 0  # while something was being sent


class LinkLog:
    """Logs lost and returned links, and says why; not thread-safe.

    Args:
        lease: Lease of the transport, if any. A link that is lost again and again while
            messages are sent is probably slow, and the log then names a lease that suffices.
    """

    def __init__(self, lease: Seconds | None = None) -> None:
        self._lease = lease
        self._links: dict[Rank, _Link] = {}

    def sent(self, rank: Rank, num_bytes: int, now: Seconds) -> None:
        """Record a frame for `rank`."""
        if (link := self._links.get(rank)) is not None:
            link.num_bytes, link.sent_at = link.num_bytes + num_bytes, now

    def found(self, rank: Rank, incarnation: Incarnation, now: Seconds) -> str | None:
        """Record a link to a process of `rank`; return the reason, if it is told."""
        link = self._links.get(rank)
        if link is None:
            self._links[rank] = _Link(incarnation, now)
            _LOG.info("link with worker %d is up", rank)
            return "it has come for the first time"
        reason = "it is the same process"
        if link.incarnation != incarnation:
            reason = "it was started again"
        if link.has_said_lost:
            how = "" if link.incarnation == incarnation else ", which was started again,"
            away = now - link.lost_at
            _LOG.warning("link with worker %d%s is back after %.1f s", rank, how, away)
        # The new process may run on another machine, or with another lease.
        if link.incarnation != incarnation:
            link.num_losses = 0
        link.incarnation, link.has_said_lost, link.num_bytes = incarnation, False, 0
        return reason if link.is_told else None

    def lost(
        self, rank: Rank, incarnation: Incarnation, phase: Phase | None, now: Seconds
    ) -> str | None:
        """Record the loss of the link to a process of `rank` that was in `phase`.

        Returns:
            The reason, or None if the loss is not told: a finished worker is no loss, and a
            link that comes and goes must not fill the worker's log.
        """
        link = self._links.get(rank)
        if link is None or link.incarnation != incarnation:
            return None  # an earlier process; its successor is connected
        link.lost_at = now
        why = "before its first status" if phase is None else _WHY[phase]
        most = _TOLD_AT_ONCE + (now - link.began_at) / _QUIET
        link.is_told = phase != Phase.FINISHED and link.num_told < most
        link.num_told += link.is_told
        if phase in (Phase.RUNNING, Phase.FINISHED):
            self._advise(rank, link, now)
        # A link that comes and goes must not fill the log; the next line tells how often.
        if now < link.said_at + _QUIET:
            link.num_unsaid += 1
            return why if link.is_told else None
        more = f"; also {link.num_unsaid} times before" if link.num_unsaid else ""
        level = logging.INFO if phase == Phase.FINISHED else logging.WARNING
        _LOG.log(level, "link with worker %d is lost (%s)%s", rank, why, more)
        link.said_at, link.num_unsaid, link.has_said_lost = now, 0, True
        return why if link.is_told else None

    def _advise(self, rank: Rank, link: _Link, now: Seconds) -> None:
        """At each third loss while messages were being sent, name a lease that suffices."""
        if self._lease is None or not link.num_bytes or now - link.sent_at > 2 * self._lease:
            return
        link.num_losses += 1
        times, rest = divmod(link.num_losses, _NUM_LOSSES)
        if rest:
            return
        # What was sent did not get through within a lease, so the link carries fewer bytes a
        # second than this; if the advice was not enough, the next one doubles it.
        rate = min(link.num_bytes, PIECE) / self._lease
        lease = math.ceil(2**times * PIECE / rate)
        _LOG.warning(
            "the link with worker %d was lost %d times while messages were being sent; if it "
            "is slow, give all workers a longer lease: --lease %d",
            rank,
            link.num_losses,
            lease,
        )
