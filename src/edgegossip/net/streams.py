"""Direct streams: frames over a TCP or TLS connection that carries nothing else.

A stream goes one way. Its sender connects to a port of the receiver and proves with a token
that the receiver has offered it the stream. With certificates, both ends also prove their
ranks.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import select
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from cryptography import x509

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.identity.tls import Credentials

_LOG = logging.getLogger("edgegossip.net")
TOKEN_BYTES = 16
_ACCEPTED = b"+"
_MOST_AT_ONCE = 16
_PATIENCE: Seconds = 5.0
"""Seconds for the handshake of a connection, and for its token."""
_KEEPALIVE: Seconds = 60.0
_MAX_UNSENT = 262_144
"""Bytes that the kernel takes before it must send some. Without this limit it takes megabytes:
memory that nobody counts, and seconds of a path that has become slow, in which no byte more
would pass. Within a machine, where no path becomes slow, it would only take time: BBR sends a
megabyte in parts, between which the sender waits (0.37 ms for both ways instead of 0.16).
"""

# Number of bytes of the frame that follows.
_LENGTH = struct.Struct("<Q")
_END = 2**64 - 1
# TLS puts at most so many bytes into one record, and Python copies them for each call.
_RECORD = 16_384
_AT_ONCE = 4 * 2**20
"""Bytes of the largest frame that a thread sends itself that others wait for."""
_MOMENT: Seconds = 0.002
"""Seconds for which such a thread waits at most until the path has taken it."""
_MOST_PARTS = 512
_SKIPPED = 65_536
_STALLED = (BlockingIOError, TimeoutError)
IS_SUPPORTED = hasattr(socket.socket, "sendmsg") and hasattr(select, "poll")


class Stream:
    """A connection that carries frames from one end to the other, in order.

    A frame is 8 bytes with its size, little-endian, and its bytes. One thread at a time may
    send, and one receive; `close` may come from any thread.

    Args:
        connection: Connected socket, after all handshakes; the stream owns it.
        lease: Seconds after which a frame of which not one more byte passes ends the stream.
        certificate: Certificate of the other end; None without certificates.
    """

    def __init__(
        self,
        connection: socket.socket,
        lease: Seconds,
        certificate: x509.Certificate | None = None,
    ) -> None:
        self.certificate = certificate
        self._connection = connection
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        self._header = memoryview(bytearray(_LENGTH.size))
        self._is_closed = False
        self._writing = threading.Lock()
        self._rest: list[memoryview] = []  # of what has begun to leave
        self._lease = self._patience = lease
        self._is_quick = True
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, round(_KEEPALIVE))
            if not _is_within_a_machine(connection):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT)
            # Also notices a dead path, on which the kernel would accept megabytes first.
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(lease * 1e3))
            )
        if self._is_tls:
            connection.settimeout(lease)
            return
        # The kernel waits, not Python: a call then sends or fills a whole buffer.
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _limit(lease))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _limit(lease))

    def send(self, frame: Sequence[Buffer]) -> int:
        """Send a frame, given in parts; return its size in bytes.

        Raises:
            OSError: If the stream has ended, or nothing passes for a lease.
        """
        parts, num_bytes = _with_length(frame)
        self._write(parts)
        return num_bytes

    def begin(self, frame: Sequence[Buffer]) -> bool:
        """Do as `send`, but wait for milliseconds at most; return whether a rest is left.

        The rest leaves with `send_rest`, or before the next frame.

        Raises:
            OSError: If the stream has ended.
        """
        parts, num_bytes = _with_length(frame)
        with self._writing:
            self._rest += parts
            if not self._is_tls and num_bytes <= _AT_ONCE:
                self._write_at_once()
            return bool(self._rest)

    def send_rest(self) -> None:
        """Send the rest that `begin` has left.

        Raises:
            OSError: See `send`.
        """
        self._write([])

    def finish(self) -> None:
        """Tell the receiver that this was the last frame; it closes when it has read all.

        Raises:
            OSError: See `send`.
        """
        self._write([memoryview(_LENGTH.pack(_END))])

    def receive(self, max_bytes: int, too_large: Callable[[], None]) -> memoryview | None:
        """Wait for the next frame, which the caller owns; return None after the last one.

        Args:
            max_bytes: Maximum size of a frame, in bytes; larger ones are read and dropped.
            too_large: Called for each larger frame.

        Raises:
            OSError: If the stream has ended, or a frame arrives in part and nothing more of it
                for a lease.
        """
        while True:
            self._fill(self._header, is_begun=False)
            (total,) = _LENGTH.unpack(self._header)
            if total == _END:
                return None
            if total <= max_bytes:
                # NumPy requests huge pages and writes no zeros.
                frame = np.empty(total, np.uint8).data
                self._fill(frame)
                return frame
            # Before any memory is taken: the size is only a claim of the sender.
            too_large()
            scratch = memoryview(bytearray(_SKIPPED))
            while total:
                self._fill(scratch[: min(total, _SKIPPED)])
                total -= min(total, _SKIPPED)

    def wait_for_end(self) -> None:
        """Wait, at the sending end, until the receiver has closed the stream."""
        # Not by reading, because TLS cannot read and write in two threads. An honest receiver
        # says nothing more, so whatever there is to read is its end.
        watch = select.poll()
        with suppress(ValueError, OSError):  # closed
            watch.register(self._connection, select.POLLIN)
            watch.poll()

    def close(self) -> None:
        """End the stream at once; has no effect if it has ended."""
        if self._is_closed:
            return
        self._is_closed = True
        # Closing alone would leave other threads in their calls. `SSLSocket.shutdown` would
        # turn the socket into a plain one, through which another thread might then send.
        with suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)
        self._connection.close()

    def _write(self, parts: list[memoryview]) -> None:
        """Send the rest, and `parts` behind it."""
        with self._writing:
            self._rest += parts
            if self._is_tls:
                joined, self._rest = _joined(self._rest), []
                for part in joined:
                    self._connection.sendall(part)
                return
            self._wait_for(self._lease)
            while self._rest:
                self._write_some()

    def _write_at_once(self) -> None:
        """Send what leaves in a moment; at once, if a moment has not sufficed last time."""
        self._wait_for(_MOMENT)
        with suppress(BlockingIOError):
            self._write_some(0 if self._is_quick else socket.MSG_DONTWAIT)
        self._is_quick = not self._rest

    def _wait_for(self, seconds: Seconds) -> None:
        """Let a call to the kernel wait so long for room."""
        if seconds != self._patience:
            limit = _limit(seconds)
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._patience = seconds

    def _write_some(self, flags: int = 0) -> None:
        rest = self._rest
        sent = self._connection.sendmsg(rest[:_MOST_PARTS], [], flags)
        while rest and sent >= len(rest[0]):
            sent -= len(rest.pop(0))
        if sent:
            rest[0] = rest[0][sent:]

    def _fill(self, buffer: memoryview, *, is_begun: bool = True) -> None:
        """Receive into all of `buffer`; wait without limit for the first byte of a frame."""
        filled = 0
        # In TLS, Python accepts no flags.
        flags = 0 if self._is_tls else socket.MSG_WAITALL
        while filled < len(buffer):
            try:
                received = self._connection.recv_into(buffer[filled:], 0, flags)
            except _STALLED:
                if is_begun or filled or self._is_closed:
                    raise
                continue
            if not received:
                raise ConnectionResetError("the stream ended within or before a frame")
            filled += received


def _is_within_a_machine(connection: socket.socket) -> bool:
    return bool(connection.getpeername()[0] == connection.getsockname()[0])


def _with_length(frame: Sequence[Buffer]) -> tuple[list[memoryview], int]:
    """Parts of a frame behind their size, and this size in bytes."""
    parts = [memoryview(part).cast("B") for part in frame if len(part)]
    total = sum(map(len, parts))
    return [memoryview(_LENGTH.pack(total)), *parts], total


def _limit(seconds: Seconds) -> bytes:
    """A time limit as the kernel reads it."""
    whole, fraction = divmod(seconds, 1)
    return struct.pack("ll", int(whole), int(fraction * 1e6))


def _joined(parts: Sequence[memoryview]) -> list[Buffer]:
    """Join short parts with the ones before, so that they need no records of their own."""
    joined: list[Buffer] = []
    short: list[memoryview] = []
    for part in parts:
        if len(part) <= _RECORD:
            short.append(part)
            continue
        joined += [b"".join(short)] if short else []
        joined.append(part)
        short = []
    return [*joined, b"".join(short)] if short else joined


@dataclass(frozen=True, slots=True)
class _Offer:
    """A stream that is offered to worker `rank`."""

    token: bytes
    rank: Rank
    take: Callable[[Stream], bool]


class Streams:
    """Accepts the streams that this worker has offered, and opens those it is offered.

    Strangers cost little: at most 16 connections without a token are open at once, each for at
    most five seconds, and others wait in the kernel's queue.

    Args:
        host: Address to listen at, at any free port; None to accept no streams.
        lease: See `Stream`.
        credentials: Certificates of this worker and the authorities; None for plain TCP.

    Attributes:
        port: The port; 0 if this worker accepts no streams.

    Raises:
        OSError: If this machine cannot listen at `host`.
    """

    def __init__(
        self, host: str | None, lease: Seconds, credentials: Credentials | None
    ) -> None:
        self._lease = lease
        self._credentials = credentials
        self._contexts = None if credentials is None else _contexts(credentials)
        self._offers: dict[Rank, _Offer] = {}
        self._lock = threading.Lock()
        self._is_over = False
        self._places = threading.Semaphore(_MOST_AT_ONCE)
        self._socket: socket.socket | None = None
        self.port = 0
        if host is not None:
            self._socket = _listen(host)
            self.port = self._socket.getsockname()[1]
            threading.Thread(
                target=self._accept, args=(self._socket,), name="accept streams", daemon=True
            ).start()

    def offer(self, rank: Rank, take: Callable[[Stream], bool]) -> bytes:
        """Offer worker `rank` one stream, instead of any earlier offer; return its token.

        Args:
            rank: The sender.
            take: Called from another thread with the stream, which it may refuse by returning
                false.
        """
        offer = _Offer(secrets.token_bytes(TOKEN_BYTES), rank, take)
        with self._lock:
            self._offers[rank] = offer
        return offer.token

    def withdraw(self, rank: Rank) -> None:
        """Accept no stream of worker `rank` any more."""
        with self._lock:
            self._offers.pop(rank, None)

    def connect(self, rank: Rank, host: str, port: int, token: bytes) -> Stream:
        """Open the stream that worker `rank` has offered.

        Raises:
            OSError: If no connection is made in time, the token is refused, or the listener
                does not prove with its certificate that it is worker `rank`.
        """
        connection = socket.create_connection((host, port), timeout=_PATIENCE)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._contexts is not None:
                connection = self._contexts[1].wrap_socket(connection)
            certificate = self._certificate(rank, connection)
            connection.sendall(token)
            if connection.recv(1) != _ACCEPTED:
                raise ConnectionRefusedError("the stream's token was refused")
            return Stream(connection, self._lease, certificate)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Accept nothing more; streams that are open stay so."""
        self._is_over = True
        with self._lock:
            self._offers.clear()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _accept(self, listening: socket.socket) -> None:
        while not self._is_over:
            self._places.acquire()
            try:
                connection, _ = listening.accept()
            except OSError:
                self._places.release()
                # Too many open files, for example: the next attempt may succeed.
                if not self._is_over:
                    time.sleep(0.1)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._converse(connection)
        except (OSError, ValueError) as error:
            _LOG.debug("refused a stream: %s", error)
        finally:
            self._places.release()

    def _converse(self, connection: socket.socket) -> None:
        stream, deadline = None, time.monotonic() + _PATIENCE
        try:
            connection.settimeout(_PATIENCE)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._contexts is not None:
                connection = self._contexts[0].wrap_socket(connection, server_side=True)
            token = b""
            while len(token) < TOKEN_BYTES:
                # For all of it, so that one byte at a time wins no time.
                connection.settimeout(max(1e-3, deadline - time.monotonic()))
                received = connection.recv(TOKEN_BYTES - len(token))
                if not received:
                    raise ConnectionResetError("it ended before its token")
                token += received
            offer = self._spend(token)
            if offer is None:
                raise ConnectionRefusedError("no stream is offered for this token")
            certificate = self._certificate(offer.rank, connection)
            stream = Stream(connection, self._lease, certificate)
            # Before the answer, after which the sender may use the stream.
            if not offer.take(stream):
                raise ConnectionRefusedError("the stream is not wanted any more")
            connection.sendall(_ACCEPTED)
        except BaseException:
            (stream or connection).close()
            raise

    def _spend(self, token: bytes) -> _Offer | None:
        """The offer with this token, which is good only once."""
        with self._lock:
            for offer in self._offers.values():
                if hmac.compare_digest(offer.token, token):
                    return self._offers.pop(offer.rank)
        return None

    def _certificate(self, rank: Rank, connection: socket.socket) -> x509.Certificate | None:
        """The certificate at the other end, if there are certificates.

        Raises:
            ConnectionRefusedError: If it is not worker `rank`'s, or not valid.
        """
        if self._credentials is None:
            return None
        assert isinstance(connection, ssl.SSLSocket)
        der = connection.getpeercert(binary_form=True)
        certificate = None if der is None else x509.load_der_x509_certificate(der)
        if certificate is None or not self._credentials.is_of(rank, certificate):
            raise ConnectionRefusedError(f"its certificate is not worker {rank}'s")
        if flaw := self._credentials.flaw(certificate, datetime.now(UTC)):
            raise ConnectionRefusedError(f"the certificate of worker {rank} is {flaw}")
        return certificate


def _listen(host: str) -> socket.socket:
    family, *_, address = socket.getaddrinfo(
        host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    is_both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=64, dualstack_ipv6=is_both)


def _contexts(credentials: Credentials) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Settings of TLS for accepted and for made connections."""
    identity = credentials.identity
    contexts = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    # Python reads keys from files only.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "worker.pem")
        path.touch(mode=0o600)
        path.write_bytes(identity.certificate + b"\n" + identity.key)
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            # Names of hosts are not compared, as in zenoh; `_certificate` compares ranks.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=identity.ca.decode())
            context.load_cert_chain(path)
    # Nobody resumes a session, and the sender takes whatever it could read for the end.
    contexts[0].num_tickets = 0
    return contexts
