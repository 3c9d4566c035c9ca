"""Frames over Eclipse Zenoh, peer to peer between processes, machines and networks."""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence

import zenoh

from edgegossip.core.codec import Buffer
from edgegossip.core.protocol import Rank, Seconds
from edgegossip.net.access import bound_name, known_holders, zenoh_security
from edgegossip.net.address import Address
from edgegossip.net.dead_links import DeadLinks, new_session_id
from edgegossip.net.expired_links import ExpiredLinks
from edgegossip.net.reach import Reach
from edgegossip.net.relaying import warn_without_relay
from edgegossip.net.renewal import CertificateWatch, RenewedSession
from edgegossip.net.session import LEASE, KeepTrying, open_session, session_settings
from edgegossip.net.strangers import log_refused_connections, report_strangers
from edgegossip.net.tls import TLS, Credentials, require_tls
from edgegossip.net.transport import MAX_FRAME_BYTES, Incarnation, Listener
from edgegossip.net.twins import Claim, Twins
from edgegossip.net.zenoh_peer import ZenohPeer

_LOG = logging.getLogger("edgegossip.net")
_RUN = re.compile(r"[A-Za-z0-9_.-]+(:[A-Za-z0-9_.-]+)?")
_NUMBER = re.compile(r"[0-9]{1,19}")
_SETTLE = 0.2
"""Part of a lease for which an older process may claim its rank; see `ZenohPeer`."""


class ZenohTransport:
    """One worker's end of a run's network; see `Transport`.

    Messages from S to R are published as `edgegossip/RUN/data/R/S`. A liveliness token
    `edgegossip/RUN/alive/S/INCARNATION` shows that S is reachable. In both cases, access
    control holds every worker to its own rank. When certificates change, or one is revoked, the
    transport closes all links and reopens them, and connected workers disappear for a moment.
    It does the same for dead and expired links; see `DeadLinks` and `ExpiredLinks`. When its
    own certificate expires, all links stay closed until there is a new one.

    Args:
        run: Name of the run: letters, digits and `_.-`, in one part or in two with a colon
            between them. A certificate may be bound to the first part.
        rank: Rank of this worker.
        num_workers: Number of workers in the run.
        address: Endpoints to listen at and to connect to.
        incarnation: Incarnation of this process; random by default.
        security: Certificates; without them links are neither encrypted nor authenticated.
        insecure: Allow plain links beyond this machine.
        lease: Seconds, from 0.1 to 3600, after which a link is closed and reopened if it is
            silent or a piece of 256 kB could not be sent. Slow links need a longer lease: the
            default suits 0.4 Mbit/s to each simultaneous receiver. Each worker's lease applies
            to its own silence and its own pieces.

    Raises:
        ValueError: If `run` has other characters, or `rank` or `lease` is out of range.
        NetworkError: If `address` reaches beyond this machine with neither `security` nor
            `insecure`, or has endpoints that do not match `security`; or if `security` is
            invalid (see `TLS.check`).
    """

    def __init__(
        self,
        *,
        run: str,
        rank: Rank,
        num_workers: int,
        address: Address,
        incarnation: Incarnation | None = None,
        security: TLS | None = None,
        insecure: bool = False,
        lease: Seconds = LEASE,
    ) -> None:
        if not _RUN.fullmatch(run):
            raise ValueError(
                f"run may have letters, digits and '_.-' only, and one colon, got {run!r}"
            )
        if not 0 <= rank < num_workers:
            raise ValueError(f"rank must be in 0..{num_workers - 1}, got {rank}")
        require_tls(address, security, insecure=insecure)
        self.rank = rank
        self.incarnation = secrets.randbits(63) if incarnation is None else incarnation
        self._prefix = f"edgegossip/{run}"
        self._run = run
        self._num_workers = num_workers
        self._watch: CertificateWatch | None = None
        self.credentials: Callable[[], Credentials] | None = None
        if security is not None:
            self._watch = watch = CertificateWatch(security, rank, [bound_name(run)])
            self.credentials = lambda: watch.current
        self._others = [other for other in range(num_workers) if other != rank]
        self._address = address
        self.lease = lease
        self._settings = session_settings(address, lease, is_secure=security is not None)
        self._session: RenewedSession | None = None
        self._reach = Reach()
        # A leaving worker has no token any more, and may wait a lease for farewells.
        self._dead_links = DeadLinks(patience=2 * lease)
        self._expired_links = ExpiredLinks()
        self._peers: dict[Rank, ZenohPeer] = {}

    @property
    def network_bytes(self) -> int:
        """Bytes exchanged so far with other machines, without headers."""
        return sum(peer.bytes_sent + peer.bytes_received for peer in self._peers.values())

    @property
    def calls(self) -> tuple[str, ...]:
        """See `Transport`."""
        return self._address.connect

    def open(
        self,
        listener: Listener,
        max_bytes: int = MAX_FRAME_BYTES,
        keep_trying: KeepTrying = lambda: True,
    ) -> None:
        """See `Transport`."""
        if self._watch is not None:
            log_refused_connections()
        elif os.environ.get("RUST_LOG"):
            zenoh.try_init_log_from_env()  # type: ignore[no-untyped-call]
        self._listener = listener
        self._peers = {
            rank: ZenohPeer(rank, listener, max_bytes, self._reach, self.lease * _SETTLE)
            for rank in self._others
        }
        self._inboxes = {
            f"{self._prefix}/data/{self.rank}/{rank}": peer
            for rank, peer in self._peers.items()
        }
        self._twins = Twins(self.rank, self.incarnation, listener.refused)
        self._session = RenewedSession(
            self._open_session,
            enter=self._enter,
            leave=self._leave,
            lost=self._lose,
            is_stuck=self._is_stuck,
            watch=self._watch,
        )
        self._session.open(keep_trying)

    def _open_session(
        self, credentials: Credentials | None, keep_trying: KeepTrying
    ) -> zenoh.Session:
        settings = self._settings | {"id": new_session_id(self.rank, self.incarnation)}
        if credentials is not None:
            settings |= zenoh_security(credentials, self._run, self._num_workers)
        return open_session(settings, self._address, self._num_workers, keep_trying)

    def _enter(self, session: zenoh.Session) -> None:
        self._reach.follow(session)
        self._dead_links.follow(session)
        self._expired_links.follow(session)
        for rank, peer in self._peers.items():
            peer.publisher = session.declare_publisher(
                f"{self._prefix}/data/{rank}/{self.rank}",
                congestion_control=zenoh.CongestionControl.BLOCK,
                reliability=zenoh.Reliability.RELIABLE,
            )
            peer.return_to_life()
        # The order matters: a worker that sees the token may send at once.
        session.declare_subscriber(
            f"{self._prefix}/data/{self.rank}/*", _direct(self._take_sample)
        )
        liveliness = session.liveliness()
        own = f"{self._prefix}/alive/{self.rank}"
        # zenoh withdraws a token when nothing refers to it any more.
        self._claims = claims = list[zenoh.LivelinessToken]()
        self._twins.enter(lambda c: claims.append(liveliness.declare_token(f"{own}/{c}")))
        liveliness.declare_subscriber(
            f"{self._prefix}/alive/*/*", _direct(self._take_token), history=True
        )
        self._token = liveliness.declare_token(f"{own}/{self.incarnation}")
        holders = known_holders(self._num_workers, [bound_name(self._run)])
        report_strangers(session, self._run, self._num_workers, holders, self._listener.refused)
        listens = self._settings["mode"] == "peer"
        if self._watch is not None and not listens and self._num_workers > 2:
            warn_without_relay(session, holders)

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        """See `Transport`."""
        self._peers[receiver].send(frame)

    def close(self) -> None:
        """See `Transport`."""
        session, self._session = self._session, None
        if session is not None:
            self._twins.leave()
            session.close()

    def _leave(self) -> None:
        """Deliver sent frames and announce the departure to the other workers."""
        deadline = time.monotonic() + self.lease
        reached = [peer for peer in self._peers.values() if peer.leave(deadline)]
        self._token.undeclare()  # type: ignore[no-untyped-call]
        # Closing a socket with unread data also discards the data that was sent.
        for peer in reached:
            peer.await_farewell(deadline)

    def _lose(self) -> None:
        for peer in self._peers.values():
            peer.lose()

    def _is_stuck(self) -> bool:
        absent = [rank for rank, peer in self._peers.items() if peer.incarnation is None]
        rank = self._dead_links.find(absent)
        if rank is not None:
            _LOG.warning("the link with worker %d is dead; all links are reopened", rank)
            return True
        return self._expired_links.find()

    # Calls of zenoh, from its threads.

    def _take_sample(self, sample: zenoh.Sample) -> None:
        peer = self._inboxes.get(str(sample.key_expr))
        if peer is None:
            self._listener.refused(None, "a piece from no other worker of the run")
        else:
            source = sample.source_info
            peer.take(sample.payload.to_bytes(), source and str(source.source_id.zid))

    def _take_token(self, sample: zenoh.Sample) -> None:
        *_, rank_text, name = str(sample.key_expr).split("/")
        # A key may also be a wildcard, or not ASCII.
        rank = int(rank_text) if _NUMBER.fullmatch(rank_text) else -1
        claim, is_new = Claim.parse(name), sample.kind == zenoh.SampleKind.PUT
        who = self._twins if rank == self.rank else self._peers.get(rank)
        if who is None or not (claim or _NUMBER.fullmatch(name)):
            self._listener.refused(None, "a sign of life from no other worker of the run")
        elif claim is not None:
            if is_new:
                who.heard(claim)
        elif isinstance(who, Twins):
            if is_new:
                who.saw(int(name))
        elif is_new:
            who.appear(int(name))
        else:
            who.disappear(int(name))


def _direct(callback: Callable[[zenoh.Sample], None]) -> zenoh.handlers.Callback[zenoh.Sample]:
    # Runs in the thread that reads the link: frames stay in order, and backpressure slows the
    # sender down.
    return zenoh.handlers.Callback(callback, indirect=False)
