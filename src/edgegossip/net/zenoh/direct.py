"""Agreement on direct streams, over a zenoh session that has authenticated both ends."""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.identity.tls import Credentials
from edgegossip.net.streams import TOKEN_BYTES, Stream, Streams
from edgegossip.net.transport import Incarnation, Progress

_LOG = logging.getLogger("edgegossip.net")
_LEAST = 512
"""Bytes of the smallest frame for which a stream is opened. Compressed exchanges are not much
longer, and cost half as much processor time over a stream (`benchmarks/small_messages.py`).
"""
_RETRY: Seconds = 30.0
_MOST_ATTEMPTS = 3
_MOST_ENDS, _ENDS_WITHIN = 3, 600.0
"""After so many ends of streams within so many seconds, zenoh carries all frames."""

# Pieces of an agreement. They are shorter than the header of any piece of a frame.
_OFFER = struct.Struct(f"<cH{TOKEN_BYTES}s")
_SWITCH = struct.Struct(f"<c{TOKEN_BYTES}s")
_OFFERS, _SWITCHES = b"o", b"s"


class Owner(Protocol):
    """The peer whose streams these are; all calls come from other threads than its own."""

    def put(self, piece: bytes) -> None:
        """Send a piece over zenoh."""

    def stream_received(self, stream: Stream, frame: memoryview) -> bool:
        """Receive a frame; return false if `stream` is not the current one any more."""

    def stream_refused(self, reason: str) -> None:
        """Receive the reason for a rejected frame."""

    def outgoing_ended(self, stream: Stream) -> None:
        """Receive the end of a stream to the peer; see `DirectStreams.drop`."""

    def incoming_ended(self, stream: Stream) -> None:
        """Receive the end of a stream from the peer, which has not finished it."""


@dataclass(frozen=True, slots=True)
class _Offered:
    """A stream that the peer's process `incarnation` would accept."""

    incarnation: Incarnation
    host: str
    port: int
    token: bytes
    num_attempts: int = 0
    not_before: Seconds = 0.0


class DirectStreams:
    """The streams from and to one other worker, beside the pieces that zenoh carries.

    The receiver offers a stream with a piece over zenoh, which only the sender can read: a port
    and a random token, good for one connection. At its first frame that is not tiny, the sender
    connects in the background, while zenoh goes on to carry its frames. Once it is connected,
    it puts the token as its last piece on zenoh's path, and all its frames take the stream. The
    receiver begins to read the stream when it has received this piece, and so all frames that
    were sent before it. Order is thus kept; only short frames may overtake a long one, over
    zenoh. If a stream ends, the next turn (`ZenohPeer`) begins over zenoh.

    Streams belong to the process that speaks for the rank, and to one appearance of it: `turn`
    ends all. Without an offer, or if no connection can be made, zenoh carries everything.

    Args:
        rank: The other worker.
        streams: Accepts and opens the streams of this session.
        host_of: Returns the host at which a process is reached without a relay; None if it is
            not.
        owner: Receives what happens.
        max_bytes: Maximum size of a frame, in bytes.
    """

    def __init__(
        self,
        rank: Rank,
        streams: Streams,
        host_of: Callable[[Incarnation], str | None],
        owner: Owner,
        max_bytes: int,
    ) -> None:
        self._rank = rank
        self._streams = streams
        self._host_of = host_of
        self._owner = owner
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._incarnation: Incarnation | None = None
        self._latest: Incarnation | None = None
        self._is_closed = self._is_finished = False
        self._ends: deque[Seconds] = deque(maxlen=_MOST_ENDS)
        # To the peer: what it offers, the stream that is connected, and the one in use.
        self._offered: _Offered | None = None
        self._is_connecting = False
        self._connected: tuple[bytes, Stream] | None = None
        self._outgoing: Stream | None = None
        # From the peer: the stream that waits for the switch, and the one that is read.
        self._token: bytes | None = None
        self._accepted: tuple[bytes, Stream] | None = None
        self._incoming: Stream | None = None
        self._has_been_read = threading.Event()

    # Processes.

    def turn(self, incarnation: Incarnation | None) -> None:
        """End all streams, and agree on new ones with another process, if there is one."""
        with self._lock:
            ended = self._forget()
            if incarnation is not None and incarnation != self._latest:
                self._latest = incarnation
                self._ends.clear()  # they were another process's
            self._incarnation = incarnation
            # An offer may arrive before this worker knows the process that makes it.
            offered = self._offered
            if incarnation is not None and offered and offered.incarnation != incarnation:
                self._offered = None
        for stream in ended:
            stream.close()
        if incarnation is not None:
            self._offer(incarnation)

    def close(self) -> None:
        """End all streams for good."""
        with self._lock:
            self._is_closed = True
            ended = self._forget()
        for stream in ended:
            stream.close()

    def expel(self, credentials: Credentials) -> None:
        """End streams whose certificate `credentials` revoke; they need not be flushed."""
        now = datetime.now(UTC)
        for stream in (self._outgoing, self._incoming):
            certificate = None if stream is None else stream.certificate
            if stream is not None and certificate and credentials.flaw(certificate, now):
                stream.close()

    def drop(self, stream: Stream) -> bool:
        """Drop a stream to the peer that has ended; return whether it was in use."""
        with self._lock:
            if self._connected is not None and self._connected[1] is stream:
                self._connected = None
            was_used = stream is self._outgoing
        stream.close()
        return was_used

    def leave_stream(self) -> None:
        """Send the frames of a new turn over zenoh, until there is another stream."""
        with self._lock:
            if self._outgoing is not None and not self._is_finished:
                self._count_end()
            ended = self._forget_outgoing()
        for stream in ended:
            stream.close()

    def renew(self) -> None:
        """Offer another stream, because the peer has left this one for a new turn."""
        with self._lock:
            ended = self._forget_incoming()
        for stream in ended:
            stream.close()
        if ended and self._incarnation is not None:
            self._offer(self._incarnation)

    def _count_end(self) -> None:
        self._ends.append(time.monotonic())
        if not self._may_open():
            _LOG.warning(
                "direct streams to worker %d have ended %d times within %.0f minutes; zenoh "
                "carries its messages from now on",
                self._rank,
                _MOST_ENDS,
                _ENDS_WITHIN / 60,
            )

    def _forget(self) -> list[Stream]:
        self._streams.withdraw(self._rank)
        self._token = None
        return [*self._forget_outgoing(), *self._forget_incoming()]

    def _forget_outgoing(self) -> list[Stream]:
        connected = None if self._connected is None else self._connected[1]
        ended = [each for each in (connected, self._outgoing) if each is not None]
        self._connected = self._outgoing = None
        self._has_been_read.set()
        return ended

    def _forget_incoming(self) -> list[Stream]:
        accepted = None if self._accepted is None else self._accepted[1]
        ended = [each for each in (accepted, self._incoming) if each is not None]
        self._accepted = self._incoming = None
        return ended

    def _may_open(self) -> bool:
        ends = self._ends
        return len(ends) < _MOST_ENDS or time.monotonic() - ends[0] > _ENDS_WITHIN

    # To the peer.

    def send(
        self,
        frame: Sequence[Buffer],
        put: Callable[[bytes], object],
        *,
        may_open: bool = True,
    ) -> bool:
        """Send a frame, if a stream can take it; one thread at a time may call this.

        Args:
            frame: Frame in parts.
            put: Sends a piece over zenoh, after all earlier frames.
            may_open: Whether a stream may be opened for the frame.
        """
        stream = self._outgoing
        if stream is None and may_open and sum(map(len, frame)) >= _LEAST:
            stream = self._switch(put)
        if stream is None:
            return False
        try:
            stream.send(frame)
        except OSError:
            # Before any other frame is sent, so that none arrives without this one.
            self._owner.outgoing_ended(stream)
        return True

    def begin(self, frame: Sequence[Buffer]) -> Progress:
        """Send what the stream in use takes of a frame at once; call this as `send`."""
        stream = self._outgoing
        if stream is None:
            return Progress.NONE
        try:
            return Progress.SOME if stream.begin(frame) else Progress.ALL
        except OSError:
            self._owner.outgoing_ended(stream)
        return Progress.ALL

    def send_rest(self) -> None:
        """Send the rest of a frame that has begun to leave, if its stream has not ended."""
        stream = self._outgoing
        if stream is not None:
            try:
                stream.send_rest()
            except OSError:
                self._owner.outgoing_ended(stream)

    def finish(self) -> None:
        """Tell the peer that no frame follows."""
        self._is_finished = True
        self._has_been_read.clear()
        if (stream := self._outgoing) is None:
            self._has_been_read.set()
            return
        # In another thread, because a peer that reads nothing more may hold it up.
        threading.Thread(target=self._finish, args=(stream,), daemon=True).start()

    def _finish(self, stream: Stream) -> None:
        try:
            stream.finish()
        except OSError:
            self._has_been_read.set()

    def await_reading(self, seconds: Seconds) -> None:
        """Wait until the peer has read all frames, after `finish`."""
        self._has_been_read.wait(seconds)

    def _switch(self, put: Callable[[bytes], object]) -> Stream | None:
        """Leave zenoh's path; None while no stream is connected."""
        with self._lock:
            found = self._connected
            if found is None:
                self._connect_soon()
                return None
            self._connected = None
            token, self._outgoing = found
        put(_SWITCH.pack(_SWITCHES, token))
        return found[1]

    def _connect_soon(self) -> None:
        offered = self._offered
        if self._is_connecting or self._is_closed or offered is None or not self._may_open():
            return
        is_due = time.monotonic() >= offered.not_before
        if offered.incarnation != self._incarnation or not is_due:
            return
        self._offered, self._is_connecting = None, True
        threading.Thread(
            target=self._follow, args=(offered,), name=f"stream to {self._rank}", daemon=True
        ).start()

    def _follow(self, offered: _Offered) -> None:
        """Open a stream, and watch it until it ends."""
        stream = None
        try:
            stream = self._streams.connect(
                self._rank, offered.host, offered.port, offered.token
            )
        except (OSError, ValueError) as error:
            _LOG.debug("no direct stream to worker %d: %s", self._rank, error)
        with self._lock:
            self._is_connecting = False
            is_current = not self._is_closed and offered.incarnation == self._incarnation
            if stream is None:
                if is_current and self._offered is None:
                    self._offered = _later(offered)
                return
            if is_current:
                self._connected = offered.token, stream
        if not is_current:
            stream.close()
            return
        stream.wait_for_end()
        # An earlier stream may end late, while the peer still reads this one.
        if stream is self._outgoing:
            self._has_been_read.set()
        self._owner.outgoing_ended(stream)

    # From the peer.

    def take_offer(self, piece: bytes, process: Incarnation | None) -> bool:
        """Receive a piece over zenoh; return whether it offers a stream."""
        if piece[:1] != _OFFERS or len(piece) != _OFFER.size:
            return False
        _, port, token = _OFFER.unpack(piece)
        host = None if process is None else self._host_of(process)
        if process is not None and host is not None:
            with self._lock:
                self._offered = _Offered(process, host, port, token)
        return True

    def take_switch(self, piece: bytes) -> bool:
        """Receive a piece after all earlier ones; return whether a stream follows."""
        if piece[:1] != _SWITCHES or len(piece) != _SWITCH.size:
            return False
        self._read(_SWITCH.unpack(piece)[1])
        return True

    @property
    def incoming(self) -> Stream | None:
        """The stream that is read."""
        return self._incoming

    def _offer(self, incarnation: Incarnation) -> None:
        with self._lock:
            if self._is_closed or not self._streams.port:
                return
            if self._host_of(incarnation) is None:
                return
            token = self._streams.offer(self._rank, lambda stream: self._accept(token, stream))
            self._token = token
        piece = _OFFER.pack(_OFFERS, self._streams.port, token)
        # In another thread, because a reading thread of zenoh must not wait until another
        # worker reads.
        threading.Thread(target=self._owner.put, args=(piece,), daemon=True).start()

    def _accept(self, token: bytes, stream: Stream) -> bool:
        with self._lock:
            if token != self._token:  # it was offered to an earlier process, or link
                return False
            self._accepted = token, stream
        return True

    def _read(self, token: bytes) -> None:
        """Begin to read the stream to which the peer has switched."""
        with self._lock:
            # An unknown token is of a stream that has ended here, which the peer will notice.
            if self._accepted is None or self._accepted[0] != token:
                return
            stream = self._incoming = self._accepted[1]
            self._accepted = None
        threading.Thread(
            target=self._receive,
            args=(stream,),
            name=f"stream from {self._rank}",
            daemon=True,
        ).start()

    def _receive(self, stream: Stream) -> None:
        def too_large() -> None:
            self._owner.stream_refused("a frame that is too large")

        try:
            while (frame := stream.receive(self._max_bytes, too_large)) is not None:
                if not self._owner.stream_received(stream, frame):
                    return
                del frame  # or it would be held until the next one arrives
        except OSError:
            self._owner.incoming_ended(stream)
            return
        with self._lock:
            if self._incoming is stream:
                self._incoming = None
        stream.close()  # which tells the sender that all has been read


def _later(offered: _Offered) -> _Offered | None:
    """The offer, to be tried again later; None after the last attempt."""
    number = offered.num_attempts + 1
    if number == _MOST_ATTEMPTS:
        return None
    not_before = time.monotonic() + _RETRY * 2 ** (number - 1)
    return replace(offered, num_attempts=number, not_before=not_before)
