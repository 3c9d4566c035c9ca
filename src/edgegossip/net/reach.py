"""Find the links of a session that lead beyond this machine."""

from __future__ import annotations

import zenoh

from edgegossip.net.address import is_loopback
from edgegossip.net.known_links import KnownLinks


class Reach:
    """Follows the links of a session: those within this machine reach no card of it."""

    def __init__(self) -> None:
        self._links = KnownLinks(lambda link: not _is_within(str(link.src), str(link.dst)))

    def follow(self, session: zenoh.Session) -> None:
        """Begin; until `session` is closed, or another is followed."""
        self._links.follow(session)

    def leave_machine(self, session_id: str | None) -> bool:
        """Whether what is exchanged with a session leaves this machine.

        Where there is no link with it, some link does: the way is by a router, or the
        session is not known yet.
        """
        links = self._links.known
        direct = [leaves for (other, *_), leaves in links.items() if other == session_id]
        return any(direct or links.values())


def _is_within(source: str, destination: str) -> bool:
    """Whether a link has both ends here; systems keep what is for an own address inside."""
    return is_loopback(source) or _host(source) == _host(destination)


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]
