"""Transport of messages between the workers of one run: in order, complete or not at all."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.identity.tls import Credentials

Incarnation: TypeAlias = int
"""Number drawn by every process of a rank, to distinguish a restart from a pause."""

MAX_FRAME_BYTES = 2**30

TWIN = "another process of this worker"
"""Reason of a refusal in this worker's own name: another process was this worker before, and
this process has to end.
"""


class Listener(Protocol):
    """Receives events from the transport's threads, so its methods must not block."""

    def received(self, sender: Rank, frame: memoryview) -> None:
        """A complete, writable frame from `sender` has arrived; the listener now owns it."""

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Worker `rank` has become reachable."""

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Worker `rank` is lost, or the path to it is cut."""

    def refused(self, rank: Rank | None, reason: str) -> None:
        """Invalid input has arrived, apparently from `rank`; see also `TWIN`."""


class Transport(Protocol):
    """Carries frames between workers and knows nothing about algorithms.

    Frames from one sender to one receiver arrive in order, each complete or not at all.

    Attributes:
        credentials: Returns the current credentials; None without certificates.
    """

    credentials: Callable[[], Credentials] | None

    @property
    def lease(self) -> Seconds | None:
        """Seconds after which a link that does not get a piece of a message through is lost;
        None if links are not lost for this reason.
        """

    @property
    def calls(self) -> tuple[str, ...]:
        """Endpoints that the transport tries until they answer, as text."""

    def open(
        self,
        listener: Listener,
        max_bytes: int = MAX_FRAME_BYTES,
        keep_trying: Callable[[], bool] = lambda: True,
    ) -> None:
        """Become reachable and begin to listen.

        Args:
            listener: Receives the events.
            max_bytes: Maximum size of a frame, in bytes; larger frames are rejected before
                memory is allocated.
            keep_trying: Polled while the transport cannot open because no peer answers; when it
                returns false, the transport gives up.

        Raises:
            NetworkError: If the transport cannot be opened.
        """

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        """Deliver `frame`, whose parts the caller must not change afterwards.

        This blocks while the link is congested. A frame to a worker that has not appeared, or
        that disappears in the meantime, is lost. Thread-safe; sends to different receivers do
        not block each other.
        """

    def close(self) -> None:
        """Deliver sent frames, then stop listening and disappear; no effect if closed."""


# Pieces of large frames, which are reassembled completely or not at all.


CHUNK_BYTES = 256 * 1024
"""Smaller pieces cost more calls; larger ones exceed the caches (`benchmarks/exchange.py`).
"""

# Serial number of the frame, its size, and where in it the piece belongs.
_HEADER = struct.Struct("<QQQ")


def split(serial: int, frame: Sequence[Buffer]) -> Iterator[bytes]:
    """Cut a frame, given in parts, into pieces of at most `CHUNK_BYTES` plus a header.

    Args:
        serial: Serial number, different from that of the previous frame.
        frame: Contiguous buffers.

    >>> [len(piece) for piece in split(0, [bytes(300_000)])]
    [262168, 37880]
    """
    parts = [memoryview(part).cast("B") for part in frame if len(part)]
    total = sum(len(part) for part in parts)
    offset = 0
    while True:
        piece: list[Buffer] = [_HEADER.pack(serial, total, offset)]
        room = CHUNK_BYTES
        while parts and room:
            taken, rest = parts[0][:room], parts[0][room:]
            piece.append(taken)
            room -= len(taken)
            parts[:1] = [rest] if rest else []
        yield b"".join(piece)
        offset += CHUNK_BYTES - room
        if not parts:
            return


class Assembler:
    r"""Reassembles the frames of one sender; not thread-safe.

    At most one frame is incomplete at a time. If a piece does not continue that frame, the
    frame is discarded; random pieces have no other effect.

    Args:
        max_bytes: Maximum size of a frame, in bytes; larger frames are rejected at their first
            piece.
        refused: Called with the reason for each rejected frame or stray piece.

    >>> assembler = Assembler(1_000_000, refused=print)
    >>> first, second = split(0, [bytes(262_144), b"end"])
    >>> assembler.add(first)
    >>> bytes(assembler.add(second)[-4:])
    b'\x00end'
    >>> assembler.add(second)
    a piece without those before it
    """

    def __init__(self, max_bytes: int, refused: Callable[[str], None]) -> None:
        self._max_bytes = max_bytes
        self._refused = refused
        self._frame: memoryview | None = None
        self._serial = self._filled = 0
        self._ignored: int | None = None  # serial of a frame that is already rejected

    def add(self, piece: bytes) -> memoryview | None:
        """Add the next piece; return the frame that it completes, owned by the caller."""
        if len(piece) < _HEADER.size:
            self._discard("no piece of a frame")
            return None
        serial, total, offset = _HEADER.unpack_from(piece)
        if offset == 0:
            self._begin(serial, total)
        if serial == self._ignored:
            return None
        frame, end = self._frame, offset + len(piece) - _HEADER.size
        if frame is None or serial != self._serial or offset != self._filled:
            self._discard("a piece without those before it", serial)
        elif len(frame) != total or end > total or (end == offset and total):
            self._discard("a piece that does not fit its frame", serial)
        else:
            frame[offset:end] = memoryview(piece)[_HEADER.size :]
            self._filled = end
            if end == total:
                self._frame = None
                return frame
        return None

    def reset(self) -> None:
        """Discard the incomplete frame after the loss of its sender."""
        self._frame = self._ignored = None

    def _begin(self, serial: int, total: int) -> None:
        if self._frame is not None:
            self._discard("a frame that ends too early")
        self._ignored = None
        if total > self._max_bytes:
            self._discard("a frame that is too large", serial)
            return
        # NumPy requests huge pages and, unlike bytearray, does not write zeros: 22 ms instead
        # of 95 at 100 MB. No byte is read before all are written.
        self._frame = np.empty(total, np.uint8).data
        self._serial, self._filled = serial, 0

    def _discard(self, reason: str, serial: int | None = None) -> None:
        self._frame, self._ignored = None, serial
        self._refused(reason)
