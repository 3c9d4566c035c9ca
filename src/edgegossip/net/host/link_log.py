"""Lost and returned links: rate-limited lines for the log, and reasons for the events."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.host.status import Phase
from edgegossip.net.transport import Incarnation

_LOG = logging.getLogger("edgegossip.net")
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


class LinkLog:
    """Logs lost and returned links, and says why; not thread-safe."""

    def __init__(self) -> None:
        self._links: dict[Rank, _Link] = {}

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
        link.incarnation, link.has_said_lost = incarnation, False
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
        # A link that comes and goes must not fill the log; the next line tells how often.
        if now < link.said_at + _QUIET:
            link.num_unsaid += 1
            return why if link.is_told else None
        more = f"; also {link.num_unsaid} times before" if link.num_unsaid else ""
        level = logging.INFO if phase == Phase.FINISHED else logging.WARNING
        _LOG.log(level, "link with worker %d is lost (%s)%s", rank, why, more)
        link.said_at, link.num_unsaid, link.has_said_lost = now, 0, True
        return why if link.is_told else None
