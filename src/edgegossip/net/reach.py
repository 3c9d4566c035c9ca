"""Which of a session's links lead beyond this machine."""

from __future__ import annotations

import zenoh

from edgegossip.net.address import is_loopback


class Reach:
    """Follows the links of a session: those within this machine reach no card of it."""

    def __init__(self) -> None:
        # Of each link: the session at its other end, and whether it leaves the machine.
        # Replaced, never changed: several threads look.
        self._links: dict[tuple[str, str, str], bool] = {}

    def follow(self, session: zenoh.Session) -> None:
        """Begin; until `session` is closed, or another is followed."""
        self._links = {}
        # At once, not by a thread of its own: a link is known before messages come over it.
        linked = zenoh.handlers.Callback(self._linked, indirect=False)
        session.info.declare_link_events_listener(linked, history=True)

    def leave_machine(self, session_id: str | None) -> bool:
        """Whether what is exchanged with a session leaves this machine.

        Where there is no link with it, some link does: the way is by a router, or the
        session is not known yet.
        """
        links = self._links
        direct = [leaves for (other, *_), leaves in links.items() if other == session_id]
        return any(direct or links.values())

    def _linked(self, event: zenoh.LinkEvent) -> None:
        source, destination = str(event.link.src), str(event.link.dst)
        key, links = (str(event.link.zid), source, destination), dict(self._links)
        if event.kind == zenoh.SampleKind.PUT:
            links[key] = not _is_within(source, destination)
        else:
            links.pop(key, None)
        self._links = links


def _is_within(source: str, destination: str) -> bool:
    """Whether a link has both ends here; systems keep what is for an own address inside."""
    return is_loopback(source) or _host(source) == _host(destination)


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]
