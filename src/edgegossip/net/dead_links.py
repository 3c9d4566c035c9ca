"""Links that lead to a session that is over: they stay up, and nobody ever speaks there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection

import zenoh

from edgegossip.core.protocol import Rank, Seconds
from edgegossip.net.known_links import KnownLinks

_FIRST = 0x10000
_NUM_DIGITS = len(f"{_FIRST:x}")
_MAX_DOUBLINGS = 10


def new_session_id(rank: Rank) -> str:
    """Draw the id of a session of `rank`, which shows whose it is.

    >>> len(new_session_id(3)), new_session_id(3)[:5]
    (27, '10003')
    """
    return f"{_FIRST + rank:x}{secrets.token_hex(11)}"


class DeadLinks:
    """Notices links with a worker that gives no sign of life.

    A zenoh session that closes while somebody calls it may let that link in after it has closed
    all others. The link then lives as long as the process, the caller believes that it has
    reached the worker, and never calls the worker's next session. Only the caller can end this,
    by a session of its own that calls again.

    A worker that links and gives no sign of life on purpose makes others do so in vain:
    each time they wait twice as long.

    Args:
        patience: Seconds for which a link may be without a sign of life. One that leaves takes
            its own back, and then waits for a lease at most.
    """

    def __init__(self, patience: Seconds) -> None:
        self._patience = patience
        self._num_found = 0
        self._links = KnownLinks(_rank)
        self._mute_since: dict[Rank, Seconds] = {}

    def follow(self, session: zenoh.Session) -> None:
        """Begin; until `session` is closed, or another is followed."""
        self._mute_since = {}
        self._links.follow(session)

    def find(self, absent: Collection[Rank]) -> Rank | None:
        """Look among those that give no sign of life for one that is linked for too long."""
        mute, now = {*self._links.known.values()}.intersection(absent), time.monotonic()
        self._mute_since = {rank: self._mute_since.get(rank, now) for rank in mute}
        patience = self._patience * 2 ** min(self._num_found, _MAX_DOUBLINGS)
        found = [rank for rank, since in self._mute_since.items() if now - since > patience]
        if not found:
            return None
        self._num_found += 1
        return min(found)


def _rank(link: zenoh.Link) -> Rank | None:
    """Read whose session is at the other end; None for one that is no worker's."""
    zid = str(link.zid)
    return int(zid[:_NUM_DIGITS], 16) - _FIRST if len(zid) == len(new_session_id(0)) else None
