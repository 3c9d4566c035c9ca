"""The links of a session, and what is to be known of each."""

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
        know: Says what is to be known of a link; None leaves it out.

    Attributes:
        known: By the ends of each link. Replaced, never changed: zenoh's threads write it,
            others look.
    """

    def __init__(self, know: Callable[[zenoh.Link], T | None]) -> None:
        self._know = know
        self.known: dict[Ends, T] = {}

    def follow(self, session: zenoh.Session) -> None:
        """Begin; until `session` is closed, or another is followed."""
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
