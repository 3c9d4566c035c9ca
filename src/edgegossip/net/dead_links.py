"""Dead links: they lead to a closed session, stay up, and never carry a message."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection

import zenoh

from edgegossip.core.protocol import Rank, Seconds
from edgegossip.net.known_links import KnownLinks
from edgegossip.net.transport import Incarnation

_FIRST = 0x10000
_NUM_DIGITS = len(f"{_FIRST:x}")
_MAX_DOUBLINGS = 10


def new_session_id(rank: Rank, incarnation: Incarnation = 0) -> str:
    """Draw the id of a session of `rank`; the id contains the rank and the incarnation.

    >>> len(new_session_id(3)), new_session_id(3, 0xBEEF)[:21]
    (27, '10003000000000000beef')
    """
    return f"{_FIRST + rank:x}{incarnation:016x}{secrets.token_hex(3)}"


def process_of(session_id: str | None) -> Incarnation | None:
    """The incarnation in a session's id; None if it is not the session of a worker.

    >>> process_of(new_session_id(3, 17)), process_of("c0ffee"), process_of(None)
    (17, None, None)
    """
    if session_id is None or len(session_id) != _NUM_DIGITS + 22:
        return None
    return int(session_id[_NUM_DIGITS : _NUM_DIGITS + 16], 16)


class DeadLinks:
    """Detects links to workers that show no sign of life.

    A zenoh session that closes during an incoming connection may admit the new link after it
    has closed all other links. The new link then lives as long as the process. The caller
    believes that it has reached the worker, and never connects to the worker's next session.
    Only the caller can end this, by opening a new session.

    A malicious worker could cause such renewals by linking without a sign of life, so the wait
    doubles each time.

    Args:
        patience: Seconds for which a link may lack a sign of life. A leaving worker withdraws
            its token and then stays for at most a lease.
    """

    def __init__(self, patience: Seconds) -> None:
        self._patience = patience
        self._num_found = 0
        self._links = KnownLinks(_rank)
        self._mute_since: dict[Rank, Seconds] = {}

    def follow(self, session: zenoh.Session) -> None:
        """Follow `session` until it is closed or another one is followed."""
        self._mute_since = {}
        self._links.follow(session)

    def find(self, absent: Collection[Rank]) -> Rank | None:
        """Look for a worker whose link has lacked a sign of life for too long."""
        mute, now = {*self._links.known.values()}.intersection(absent), time.monotonic()
        self._mute_since = {rank: self._mute_since.get(rank, now) for rank in mute}
        patience = self._patience * 2 ** min(self._num_found, _MAX_DOUBLINGS)
        found = [rank for rank, since in self._mute_since.items() if now - since > patience]
        if not found:
            return None
        self._num_found += 1
        return min(found)


def _rank(link: zenoh.Link) -> Rank | None:
    """Read the rank from the other end's session id; None if that end is not a worker."""
    zid = str(link.zid)
    return int(zid[:_NUM_DIGITS], 16) - _FIRST if len(zid) == len(new_session_id(0)) else None
