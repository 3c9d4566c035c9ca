"""A meeting place for workers that cannot call each other: in networks that let nobody in."""

from __future__ import annotations

import logging

import zenoh

from edgegossip.core.protocol import Seconds
from edgegossip.core.ranges import check_range
from edgegossip.net.address import Address
from edgegossip.net.session import LEASE, open_session, session_settings
from edgegossip.net.strangers import log_refused_connections, report_links
from edgegossip.net.tls import TLS, zenoh_security

_LOG = logging.getLogger("edgegossip.net")


def open_router(
    address: Address,
    *,
    num_workers: int = 64,
    security: TLS | None = None,
    lease: Seconds = LEASE,
) -> zenoh.Session:
    """Open a zenoh router, which passes messages on until its session is closed.

    Workers of any run may connect to it, and other routers. With certificates it holds each
    worker to its own rank, as workers do among themselves. Workers believe it whom a message
    comes from, so whoever has a router's certificate can be any worker. Of two workers of a
    router that both listen, one must be able to call the other: zenoh leaves it to them.

    Args:
        address: Where to listen, and other routers to call.
        num_workers: As many as the largest run has; of others nothing is passed on where there
            is `security`.
        security: The files of routers.
        lease: As in `ZenohTransport`.

    Raises:
        NetworkError: If it cannot listen there.
        ValueError: If `num_workers` is below 1, `lease` out of range, or there is nowhere to
            listen.
    """
    check_range("num_workers", num_workers, "at least 1")
    if not address.listen:
        raise ValueError("a router must listen; give an endpoint, such as tls/0.0.0.0:7447")
    settings = session_settings(address, lease, is_secure=security is not None)
    settings["mode"] = "router"
    if security is not None:
        settings |= zenoh_security(security, "*", num_workers)
        log_refused_connections()
    session = open_session(settings, address, num_workers)
    report_links(
        session, num_workers, lambda reason: _LOG.warning("nothing passes: %s", reason)
    )
    return session
