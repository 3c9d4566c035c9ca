"""A router: it connects workers that cannot connect to each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import zenoh

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_range
from edgegossip.net.address import Address
from edgegossip.net.identity.access import bound_name, known_holders, zenoh_security
from edgegossip.net.identity.tls import TLS, CertificateWatch, Credentials
from edgegossip.net.zenoh.links import (
    ALIVE,
    ExpiredLinks,
    log_refused_connections,
    report_links,
    token_of,
)
from edgegossip.net.zenoh.session import (
    LEASE,
    KeepTrying,
    RenewedSession,
    open_session,
    session_settings,
)

_LOG = logging.getLogger("edgegossip.net")


class Router:
    """A zenoh router, which relays messages until it is closed.

    Workers of any run, and other routers, may connect to it. With certificates it holds each
    worker to its own rank, as workers do among themselves. Workers trust it to name a message's
    sender, so the holder of a router's certificate can impersonate any worker. If two of its
    workers both listen, one of them must be able to connect to the other, because zenoh does
    not relay between them.

    Args:
        address: Endpoints to listen at, and other routers to connect to.
        num_workers: Number of workers in the largest run; with `security`, messages of higher
            ranks are not relayed.
        security: The router's files. If the files change, or a certificate is revoked, all
            links are closed and reopened.
        run_names: Names of runs to which workers' certificates may be bound; unbound
            certificates are always accepted.
        lease: As in `ZenohTransport`.

    Raises:
        NetworkError: If the router cannot listen at `address`, or `security` is invalid.
        ValueError: If `num_workers` is below 1, `lease` is out of range, or there is no
            endpoint to listen at.
    """

    def __init__(
        self,
        address: Address,
        *,
        num_workers: int = 64,
        security: TLS | None = None,
        run_names: Sequence[str] = (),
        lease: Seconds = LEASE,
    ) -> None:
        check_range("num_workers", num_workers, "at least 1")
        if not address.listen:
            raise ValueError("a router must listen; give an endpoint, such as tls/0.0.0.0:7447")
        self._address = address
        self._num_workers = num_workers
        self._run_names = run_names
        self._settings = session_settings(address, lease, is_secure=security is not None)
        self._settings["mode"] = "router"
        watch = None
        if security is not None:
            log_refused_connections()
            watch = CertificateWatch(security, None, run_names)
        self._alive: set[str] = set()
        self._expired_links = ExpiredLinks()
        self._session = RenewedSession(
            self._open_session,
            enter=self._enter,
            is_stuck=self._expired_links.find,
            watch=watch,
        )
        self._session.open()

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop relaying."""
        self._session.close()

    def _open_session(
        self, credentials: Credentials | None, keep_trying: KeepTrying
    ) -> zenoh.Session:
        settings = self._settings
        if credentials is not None:
            settings = settings | zenoh_security(
                credentials, "*", self._num_workers, self._run_names
            )
        return open_session(settings, self._address, self._num_workers, keep_trying)

    def present(self, run_name: str) -> set[Rank]:
        """Ranks of the workers of the runs with this name that show signs of life."""
        found = (token_of(key) for key in tuple(self._alive))
        return {rank for run, rank in found if rank is not None and bound_name(run) == run_name}

    @property
    def num_present(self) -> int:
        """Number of workers, of all runs, that show signs of life."""
        found = [token_of(key) for key in tuple(self._alive)]
        return len({(run, rank) for run, rank in found if rank is not None})

    def _enter(self, session: zenoh.Session) -> None:
        alive: set[str] = set()
        self._alive = alive

        def changed(sample: zenoh.Sample) -> None:
            change = alive.add if sample.kind == zenoh.SampleKind.PUT else alive.discard
            change(str(sample.key_expr))

        session.liveliness().declare_subscriber(ALIVE, changed, history=True)
        # No dead links here: a router calls no worker, so no worker's session can be stuck in
        # it.
        self._expired_links.follow(session)
        holders = known_holders(self._num_workers, self._run_names)
        report_links(
            session, holders, lambda reason: _LOG.warning("not forwarding: %s", reason)
        )
