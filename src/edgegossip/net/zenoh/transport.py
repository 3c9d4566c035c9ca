"""Frames over Eclipse Zenoh, peer to peer between processes, machines and networks."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import zenoh

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_rank
from edgegossip.net.address import Address, parse
from edgegossip.net.identity.access import bound_name, known_holders, zenoh_security
from edgegossip.net.identity.tls import TLS, CertificateWatch, Credentials, require_tls
from edgegossip.net.pacing import UNLIMITED, Pace, UploadLimit, bytes_per_second
from edgegossip.net.streams import IS_SUPPORTED, Streams
from edgegossip.net.transport import MAX_FRAME_BYTES, Incarnation, Listener, Progress
from edgegossip.net.zenoh.links import (
    DeadLinks,
    ExpiredLinks,
    Links,
    log_as_environment_says,
    log_refused_connections,
    new_session_id,
    report_strangers,
    warn_without_relay,
)
from edgegossip.net.zenoh.peer import ZenohPeer
from edgegossip.net.zenoh.session import (
    LEASE,
    KeepTrying,
    RenewedSession,
    open_session,
    session_settings,
)
from edgegossip.net.zenoh.shown_log import ShownLog
from edgegossip.net.zenoh.twins import Claim, Twins

_LOG = logging.getLogger("edgegossip.net")
_RUN = re.compile(r"[A-Za-z0-9_.-]+(:[A-Za-z0-9_.-]+)?")
_NUMBER = re.compile(r"[0-9]{1,19}")
_SETTLE = 0.2
"""Part of a lease for which an older process may claim its rank; see `ZenohPeer`."""
_LONGEST_SETTLE: Seconds = 1.0


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
        shown: Log of lines that observers may read; None for none.
        lease: Seconds, from 0.1 to 3600, after which a link is closed and reopened if it is
            silent. Pieces of frames are small enough for it on any link (`Pace`). Each worker's
            lease applies to its own silence.
        upload_limit: Rate of all that this worker sends, such as "10mbit"; None for no limit.

    Raises:
        ValueError: If `run` has other characters, `rank` or `lease` is out of range, or
            `upload_limit` is no rate.
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
        shown: Path | None = None,
        lease: Seconds = LEASE,
        upload_limit: str | None = None,
    ) -> None:
        if not _RUN.fullmatch(run):
            raise ValueError(
                f"run may have letters, digits and '_.-' only, and one colon, got {run!r}"
            )
        check_rank(rank, num_workers)
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
        self._upload = UNLIMITED
        if upload_limit is not None:
            self._upload = UploadLimit(bytes_per_second(upload_limit), time.monotonic)
        self._settings = session_settings(address, lease, is_secure=security is not None)
        self._session: RenewedSession | None = None
        self._shown = None if shown is None else ShownLog(shown)
        self._links = Links()
        # A leaving worker has no token any more, and may wait a lease for farewells.
        self._dead_links = DeadLinks(self._links, patience=2 * lease)
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
        else:
            log_as_environment_says()
        self._listener = listener
        settle = min(self.lease * _SETTLE, _LONGEST_SETTLE)
        more = self._links, settle, self._upload, list[Pace]()
        self._peers = {
            rank: ZenohPeer(rank, listener, max_bytes, *more) for rank in self._others
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
        self._links.follow(session, self._link_ended)
        self._dead_links.start_over()
        self._expired_links.follow(session)
        self._streams = self._open_streams()
        for rank, peer in self._peers.items():
            peer.publisher = session.declare_publisher(
                f"{self._prefix}/data/{rank}/{self.rank}",
                congestion_control=zenoh.CongestionControl.BLOCK,
                reliability=zenoh.Reliability.RELIABLE,
            )
            peer.acknowledger = session.declare_publisher(
                f"{self._prefix}/data/{rank}/{self.rank}",
                congestion_control=zenoh.CongestionControl.DROP,
                reliability=zenoh.Reliability.RELIABLE,
            )
            peer.return_to_life(self._streams)
        # The order matters: a worker that sees the token may send at once.
        session.declare_subscriber(
            f"{self._prefix}/data/{self.rank}/*", _direct(self._take_sample)
        )
        liveliness = session.liveliness()
        own = f"{self._prefix}/alive/{self.rank}"
        # zenoh withdraws a token when nothing refers to it any more.
        self._claims = claims = list[zenoh.LivelinessToken]()

        def claim(name: str) -> None:
            with suppress(zenoh.ZError):  # a thread of its own may find the session closed
                claims.append(liveliness.declare_token(f"{own}/{name}"))

        self._twins.enter(claim)
        liveliness.declare_subscriber(
            f"{self._prefix}/alive/*/*", _direct(self._take_token), history=True
        )
        self._token = liveliness.declare_token(f"{own}/{self.incarnation}")
        if (shown := self._shown) is not None:
            key = f"{self._prefix}/status/{self.rank}"
            session.declare_queryable(key, lambda query: shown.take(query, key))
        holders = known_holders(self._num_workers, [bound_name(self._run)])
        report_strangers(session, self._run, self._num_workers, holders, self._listener.refused)
        listens = self._settings["mode"] == "peer"
        if self._watch is not None and not listens and self._num_workers > 2:
            warn_without_relay(session, holders)

    def _open_streams(self) -> Streams:
        credentials = None if self._watch is None else self._watch.current
        host = None
        if IS_SUPPORTED and self._settings["mode"] == "peer":
            listen = self._address.listen or ("tcp/0.0.0.0:0",)
            host = parse("listen", listen[0], lowest_port=0)[1]
        try:
            return Streams(host, self.lease, credentials)
        except OSError as error:
            _LOG.warning("no direct streams to this worker, at %s: %s", host, error)
            return Streams(None, self.lease, credentials)

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        """See `Transport`."""
        self._peers[receiver].send(frame)

    def begin(self, receiver: Rank, frame: Sequence[Buffer]) -> Progress:
        """See `Transport`."""
        return self._peers[receiver].begin(frame)

    def send_rest(self, receiver: Rank) -> None:
        """See `Transport`."""
        self._peers[receiver].send_rest()

    def close(self) -> None:
        """See `Transport`."""
        session, self._session = self._session, None
        if session is not None:
            self._twins.leave()
            session.close()

    def _leave(self) -> None:
        """Deliver sent frames and announce the departure to the other workers."""
        deadline = time.monotonic() + self.lease
        try:
            if self._watch is not None:
                for peer in self._peers.values():
                    peer.expel(self._watch.current)
            reached = [peer for peer in self._peers.values() if peer.leave(deadline)]
            for peer in reached:
                peer.await_reading(deadline)
            self._token.undeclare()  # type: ignore[no-untyped-call]
            # Closing a socket with unread data also discards the data that was sent.
            for peer in reached:
                peer.await_farewell(deadline)
        finally:
            self._streams.close()
            for peer in self._peers.values():
                peer.close_streams()

    def _link_ended(self, process: Incarnation) -> None:
        for peer in self._peers.values():
            peer.link_ended(process)

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
            piece, source = sample.payload.to_bytes(), sample.source_info
            if source is None:
                peer.take(piece, None)
            else:
                peer.take(piece, str(source.source_id.zid), source.source_sn)

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
