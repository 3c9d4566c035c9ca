"""Find the links of a session that lead beyond this machine."""

from __future__ import annotations

import zenoh

from edgegossip.net.address import is_loopback
from edgegossip.net.known_links import KnownLinks


class Reach:
    """Follows the links of a session; links within this machine use no network card."""

    def __init__(self) -> None:
        self._links = KnownLinks(lambda link: not _is_within(str(link.src), str(link.dst)))

    def follow(self, session: zenoh.Session) -> None:
        """Follow `session` until it is closed or another one is followed."""
        self._links.follow(session)

    def leave_machine(self, session_id: str | None) -> bool:
        """Whether traffic with a session leaves this machine.

        Without a link to that session, any external link counts, because the path leads over a
        router or is not known yet.
        """
        links = self._links.known
        direct = [leaves for (other, *_), leaves in links.items() if other == session_id]
        return any(direct or links.values())


def _is_within(source: str, destination: str) -> bool:
    """Whether both ends of a link are on this machine, so that its traffic stays internal."""
    return is_loopback(source) or _host(source) == _host(destination)


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]
