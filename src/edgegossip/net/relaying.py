"""Relaying: with certificates, a worker speaks only for itself, so only routers relay."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import zenoh

from edgegossip.core.protocol import Rank

_LOG = logging.getLogger("edgegossip.net")


def warn_without_relay(session: zenoh.Session, holders: Mapping[str, Rank | None]) -> None:
    """Warn if a worker that does not listen is linked to another worker, and not to a router.

    Nobody calls such a worker, and the other worker cannot relay: each end of a link drops
    messages that name another sender than the certificate.

    Args:
        session: Session of a worker that does not listen and has certificates.
        holders: Ranks of the permitted certificates, by common name; None for routers.
    """
    told: set[Rank] = set()

    def linked(event: zenoh.LinkEvent) -> None:
        rank = holders.get(event.link.auth_identifier or "")
        if event.kind != zenoh.SampleKind.PUT or rank is None or rank in told:
            return
        told.add(rank)
        _LOG.warning(
            "this worker reaches only worker %d, because it does not listen, and workers with "
            "certificates do not relay; to reach the others too, give --listen tls/0.0.0.0:0 "
            "(any free port), or --connect with the endpoint of a router",
            rank,
        )

    session.info.declare_link_events_listener(linked, history=True)
