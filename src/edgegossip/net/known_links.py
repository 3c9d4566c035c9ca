"""The links of a session, with a known fact about each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import zenoh

T = TypeVar("T")
Ends: TypeAlias = tuple[str, str, str]
"""The session at the other end of a link, and the addresses of both ends."""


class KnownLinks(Generic[T]):
    """Follows the links of a session.

    Args:
        know: Returns the value to store for a link, or None to omit the link.

    Attributes:
        known: Stored values by the ends of each link. The dict is replaced, never changed,
            because zenoh's threads write while other threads read.
    """

    def __init__(self, know: Callable[[zenoh.Link], T | None]) -> None:
        self._know = know
        self.known: dict[Ends, T] = {}

    def follow(self, session: zenoh.Session) -> None:
        """Follow `session` until it is closed or another one is followed."""
        self.known = {}
        # At once, without a thread of its own: a link must be known before its messages arrive.
        linked = zenoh.handlers.Callback(self._linked, indirect=False)
        session.info.declare_link_events_listener(linked, history=True)

    def _linked(self, event: zenoh.LinkEvent) -> None:
        link, known = event.link, dict(self.known)
        ends = (str(link.zid), str(link.src), str(link.dst))
        fact = self._know(link) if event.kind == zenoh.SampleKind.PUT else None
        if fact is None:
            known.pop(ends, None)
        else:
            known[ends] = fact
        self.known = known
