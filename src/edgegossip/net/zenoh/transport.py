"""Frames over Eclipse Zenoh, peer to peer between processes, machines and networks."""

from __future__ import annotations

import itertools
import logging
import math
import re
import secrets
import struct
import threading
import time
from collections import defaultdict
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
from edgegossip.net.pacing import LEAST, UNLIMITED, Pace, UploadLimit, bytes_per_second
from edgegossip.net.runtime import TokenBucket
from edgegossip.net.streams import IS_SUPPORTED, Stream, Streams
from edgegossip.net.transport import MAX_FRAME_BYTES, Incarnation, Listener
from edgegossip.net.zenoh.direct import DirectStreams
from edgegossip.net.zenoh.links import (
    DeadLinks,
    ExpiredLinks,
    Links,
    log_as_environment_says,
    log_refused_connections,
    new_session_id,
    process_of,
    report_strangers,
    warn_without_relay,
)
from edgegossip.net.zenoh.pieces import HEADER, Assembler, split
from edgegossip.net.zenoh.session import (
    CHUNK_BYTES,
    LEASE,
    KeepTrying,
    RenewedSession,
    open_session,
    session_settings,
)
from edgegossip.net.zenoh.shown_log import ShownLog
from edgegossip.net.zenoh.twins import Claim, Claims, Twins

_LOG = logging.getLogger("edgegossip.net")
_RUN = re.compile(r"[A-Za-z0-9_.-]+(:[A-Za-z0-9_.-]+)?")
_NUMBER = re.compile(r"[0-9]{1,19}")
_SETTLE = 0.2
"""Part of a lease for which an older process may claim its rank; see `ZenohPeer`."""
_LONGEST_SETTLE: Seconds = 1.0
_MAX_ALIVE = 64
_MAX_HELD = 64
"""Pieces kept of a process that does not speak for its rank yet; by then it only introduces
itself.
"""
_RETURN: Seconds = 0.3
"""Seconds after the end of a stream at which its sender counts as present again, unless it is
found to have ended too.
"""
_SIGNS = (1.0, 64)
"""Sustained rate, per second, and burst of signs of life."""

# The last message to a worker that leaves.
_FAREWELL = b""
_FAST = 500_000
"""Bytes per second that a path must have carried before a direct stream takes it."""
_MARK = struct.Struct("<Q")


class ZenohPeer:
    """The traffic to and from one other worker.

    The youngest process speaks for the rank, because the token of a killed one may remain until
    its lease ends. It has to wait for `settle` seconds, in which an older process that still
    lives claims the rank (see `Twins`). If that process ends, it speaks at once.

    Args:
        rank: The other worker.
        listener: Receives the events.
        max_bytes: Maximum size of a frame, in bytes.
        links: Links of the session; they tell which traffic leaves this machine.
        settle: Seconds for which an older process may claim the rank.
        upload: Limit on what leaves for all workers together.
    """

    publisher: zenoh.Publisher
    acknowledger: zenoh.Publisher
    direct: DirectStreams | None = None

    def __init__(
        self,
        rank: Rank,
        listener: Listener,
        max_bytes: int,
        links: Links,
        settle: Seconds,
        upload: UploadLimit = UNLIMITED,
    ) -> None:
        self.incarnation: Incarnation | None = None
        # Traffic beyond this machine. One thread at a time adds to each counter.
        self.bytes_sent = self.bytes_received = 0
        self._links = links
        self._settle = settle
        self._session_id: str | None = None
        # Processes by their first sign of life, and those that may speak for the rank.
        self._alive: list[Incarnation] = []
        self._may_speak: set[Incarnation] = set()
        self._claims = Claims()
        self._held: defaultdict[Incarnation, list[bytes]] = defaultdict(list)
        self._signs = TokenBucket(*_SIGNS)
        self._rank = rank
        self._max_bytes = max_bytes
        self._listener = listener
        self._serials = itertools.count()
        self._pace = Pace(time.monotonic, CHUNK_BYTES)
        self._upload = upload
        self._assembler = Assembler(max_bytes, lambda reason: listener.refused(rank, reason))
        self._sending = threading.Lock()
        self._is_sending_long = False
        # Held during calls of the listener, so that it gets one report at a time.
        self._telling = threading.Lock()
        self._is_closing = False
        self._left: Incarnation | None = None
        self._has_answered = threading.Event()
        self._answer: threading.Thread | None = None

    def send(self, frame: Sequence[Buffer]) -> None:
        """Send a frame, unless no process speaks for the rank."""
        is_short = sum(map(len, frame)) <= LEAST
        if is_short and self._is_sending_long:
            # From another thread: it neither waits for the end of the long one, nor follows it
            # in a stream.
            if self.direct is not None:
                self.direct.say_given_up()
            self._send_in_pieces(frame, is_short)
            return
        with self._sending:
            self._is_sending_long = not is_short
            try:
                if not self._send_directly(frame):
                    self._send_in_pieces(frame, is_short)
            finally:
                self._is_sending_long = False

    def _send_directly(self, frame: Sequence[Buffer]) -> bool:
        """Send a frame over a direct stream; return whether there is one."""
        if self.direct is None or self.incarnation is None:
            return False
        # A slow path is left to `Pace`: a stream would fill its buffers for seconds.
        is_fast = (self._pace.rate or 0.0) >= _FAST and math.isinf(self._upload.rate)
        if not self.direct.send(frame, may_open=is_fast):
            return False
        if self._links.leave_machine(self._session_id):
            self.bytes_sent += sum(map(len, frame))
        return True

    def _send_in_pieces(self, frame: Sequence[Buffer], is_short: bool) -> None:
        incarnation = self.incarnation

        def goes_on() -> bool:
            return incarnation is not None and self.incarnation == incarnation

        def leave(num_bytes: int) -> int:
            delay = self._upload.delay(num_bytes)
            if not is_short:
                self._pace.wait(num_bytes, delay, goes_on)
            return self._pace.sent(num_bytes)

        pieces = split(next(self._serials), frame, lambda: self._pace.piece_bytes, leave)
        for piece in pieces:
            # The end of a frame is useless to a process that missed its beginning.
            if not goes_on():
                return
            self.put(piece)
            if self._links.leave_machine(self._session_id):
                self.bytes_sent += len(piece)

    def take(self, piece: bytes, session_id: str | None) -> None:
        """Receive a piece of a frame."""
        if piece == _FAREWELL:
            self._has_answered.set()
            return
        if len(piece) == _MARK.size:
            self._pace.acknowledged(*_MARK.unpack(piece))
            return
        process = process_of(session_id)
        if self.direct is not None and self.direct.take(piece, process):
            return
        if len(piece) >= HEADER.size and (mark := HEADER.unpack_from(piece)[-1]):
            self._acknowledge(mark)
        with self._telling:
            if self._links.leave_machine(session_id):
                self.bytes_received += len(piece)
            # A process that has appeared, but does not speak for the rank yet: its pieces wait
            # until it does, because the listener must hear of a process before its frames.
            if process is not None and process != self.incarnation and process in self._alive:
                if len(self._held[process]) < _MAX_HELD:
                    self._held[process].append(piece)
                return
            self._session_id = session_id
            self._add(piece)

    def _add(self, piece: bytes) -> None:
        frame = self._assembler.add(piece)
        if frame is not None:
            self._listener.received(self._rank, frame)

    def stream_received(self, stream: Stream, frame: memoryview) -> bool:
        """See `direct.Owner`."""
        with self._telling:
            if self.direct is None or stream is not self.direct.incoming:
                return False
            if self._links.leave_machine(self._session_id):
                self.bytes_received += len(frame)
            self._listener.received(self._rank, frame)
        return True

    def stream_refused(self, reason: str) -> None:
        """See `direct.Owner`."""
        self._listener.refused(self._rank, reason)

    def stream_ended(self, stream: Stream) -> None:
        """Treat the end of a stream as a cut of the link; see `direct.Owner`."""
        with self._telling:
            has_lost = self.direct is not None and self.direct.drop(stream)
            if not has_lost or self._is_closing or self.incarnation is None:
                return
            self._turn_to(None)
            # Often the process itself has ended. Then zenoh says so before it would return.
            timer = threading.Timer(_RETURN, self._return)
            timer.daemon = True
            timer.start()

    def _return(self) -> None:
        with self._telling:
            self._choose()

    def appear(self, incarnation: Incarnation) -> None:
        """Receive a sign of life."""
        with self._telling:
            if incarnation in self._alive or self._is_closing or not self._may_sign():
                return
            # A process that never undeclares its tokens must not make this list grow for ever.
            self._alive = [*self._alive[1 - _MAX_ALIVE :], incarnation]
            # Another process speaks. It may be dead, or have the older right, which its claim
            # will show; this one waits for that.
            if self.incarnation is not None:
                timer = threading.Timer(self._settle, self._give_way, [incarnation])
                timer.daemon = True
                timer.start()
                return
            self._may_speak.add(incarnation)
            self._choose()

    def heard(self, claim: Claim) -> None:
        """Receive a process's claim that it was there before another one."""
        with self._telling:
            if self._may_sign():
                self._claims.add(claim)
                self._choose()

    def disappear(self, incarnation: Incarnation) -> None:
        """Receive the withdrawal of a sign of life."""
        with self._telling:
            # While this worker leaves, even an unknown withdrawal gets an answer, or the other
            # one would wait in vain.
            if incarnation not in self._alive and not self._is_closing:
                return
            if incarnation in self._alive:
                self._alive.remove(incarnation)
            self._held.pop(incarnation, None)
            # Nobody else can claim the rank now, so the remaining ones need not wait.
            if not self._may_speak.intersection(self._alive):
                self._may_speak.update(self._alive)
            self._choose()
            leaves_too = self._is_closing and incarnation == self._left
        # A worker that leaves in order waits for this answer. It is sent from another thread,
        # because a reading thread of zenoh must not wait until another worker reads.
        answer = threading.Thread(target=self.put, args=(_FAREWELL,))
        answer.start()
        self._answer = answer  # set once the thread runs, because `close` may join it at once
        if leaves_too:
            # It may be gone before it notices our departure and answers. Its own farewell is as
            # good: all its messages have arrived before it, and it waits for our answer.
            self._has_answered.set()

    def leave(self, deadline: Seconds) -> bool:
        """Send nothing after the current frame; return whether the peer is present."""
        # Not for ever: a congested link may block the sending thread until the lease ends.
        has_silence = self._sending.acquire(timeout=_until(deadline))
        with self._telling:
            self._is_closing = True
            self._has_answered.clear()
            self._left, self.incarnation = self.incarnation, None
            self._pace.reset()
        if has_silence:
            if self.direct is not None:
                self.direct.finish()
            self._sending.release()
        return self._left is not None

    def await_reading(self, deadline: Seconds) -> None:
        """Wait until the peer has read all frames of its stream."""
        if self.direct is not None:
            self.direct.await_reading(_until(deadline))

    def expel(self, credentials: Credentials) -> None:
        """End the peer's streams at once if `credentials` revoke its certificate."""
        if self.direct is not None:
            self.direct.expel(credentials)

    def close_streams(self) -> None:
        """End the peer's streams."""
        if self.direct is not None:
            self.direct.close()

    def lose(self) -> None:
        """Report the peer's disappearance to the listener, now that this worker has left."""
        with self._telling:
            self._alive = []
            self._held.clear()
            if self._left is not None:
                self._listener.disappeared(self._rank, self._left)

    def return_to_life(self, streams: Streams) -> None:
        """Resume sending when the peer appears."""
        with self._telling:
            self.direct = DirectStreams(
                self._rank, streams, self._links.host, self, self._max_bytes
            )
            self._assembler.reset()
            self._is_closing = False

    def await_farewell(self, deadline: Seconds) -> None:
        """Wait until the peer confirms that it has read all frames."""
        self._has_answered.wait(_until(deadline))
        if self._answer is not None:
            self._answer.join(_until(deadline))

    def put(self, piece: bytes) -> None:
        """Send a piece over zenoh."""
        with suppress(zenoh.ZError):  # the session has been closed
            # The source tells the receiver which link the frame came over.
            source = zenoh.SourceInfo(self.publisher.id, 0)
            self.publisher.put(piece, source_info=source)

    def _acknowledge(self, mark: int) -> None:
        # Dropped if the link is congested, because a reading thread of zenoh must not wait. The
        # next one says it, too.
        with suppress(zenoh.ZError):
            self.acknowledger.put(_MARK.pack(mark))

    def _may_sign(self) -> bool:
        """Whether another sign of life is accepted now."""
        if self._signs.take(time.monotonic()):
            return True
        self._listener.refused(self._rank, "more signs of life than any honest worker gives")
        return False

    def _give_way(self, incarnation: Incarnation) -> None:
        with self._telling:
            if incarnation in self._alive:
                self._may_speak.add(incarnation)
                self._choose()

    def _choose(self) -> None:
        """Turn to the process that speaks for the rank."""
        if self._is_closing:
            return
        self._may_speak.intersection_update(self._alive)
        ready = [each for each in self._alive if each in self._may_speak]
        # If all are beaten (claims of liars), the youngest speaks, as without claims.
        unclaimed = [each for each in ready if not self._claims.is_beaten(each, self._alive)]
        chosen = next(reversed(unclaimed or ready), None)
        if chosen != self.incarnation:
            self._turn_to(chosen)

    def _turn_to(self, incarnation: Incarnation | None) -> None:
        # The end of a frame of one process must never complete the beginning of another's.
        before, self.incarnation = self.incarnation, incarnation
        self._assembler.reset()
        self._pace.reset()
        if before is not None:
            self._listener.disappeared(self._rank, before)
        if incarnation is not None:
            self._listener.appeared(self._rank, incarnation)
        # After the reports, so that no frame of another process or link comes before them.
        if self.direct is not None:
            self.direct.turn(incarnation)
        if incarnation is not None:
            for piece in self._held.pop(incarnation, []):
                self._add(piece)


def _until(deadline: Seconds) -> Seconds:
    return max(0.0, deadline - time.monotonic())


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
        self._peers = {
            rank: ZenohPeer(rank, listener, max_bytes, self._links, settle, self._upload)
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
        self._links.follow(session)
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
        self._twins.enter(lambda c: claims.append(liveliness.declare_token(f"{own}/{c}")))
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
