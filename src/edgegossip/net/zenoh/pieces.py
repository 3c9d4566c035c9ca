"""Frames in pieces: cut by the sender, put together by the receiver."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from edgegossip.contract.codec import Buffer
from edgegossip.net.zenoh.session import CHUNK_BYTES

# Serial number of the frame, its size, where in it the piece belongs, and a mark that the
# receiver acknowledges, unless it is 0.
HEADER = struct.Struct("<QQQQ")


def split(
    serial: int,
    frame: Sequence[Buffer],
    size: Callable[[], int] = lambda: CHUNK_BYTES,
    leave: Callable[[int], int] = lambda _: 0,
) -> Iterator[bytes]:
    """Cut a frame, given in parts, into pieces plus a header.

    Args:
        serial: Serial number, different from that of the previous frame.
        frame: Contiguous buffers.
        size: Returns the largest size of the next piece, in bytes.
        leave: Called with the size of each piece before it is made; returns its mark.

    >>> [len(piece) for piece in split(0, [bytes(300_000)])]
    [262176, 37888]
    """
    parts = [memoryview(part).cast("B") for part in frame if len(part)]
    total = sum(len(part) for part in parts)
    offset = 0
    while True:
        piece: list[Buffer] = []
        room = num_bytes = min(size(), total - offset)
        mark = leave(num_bytes)
        piece.append(HEADER.pack(serial, total, offset, mark))
        while parts and room:
            taken, rest = parts[0][:room], parts[0][room:]
            piece.append(taken)
            room -= len(taken)
            parts[:1] = [rest] if rest else []
        yield b"".join(piece)
        offset += num_bytes
        if not parts:
            return


class Assembler:
    r"""Reassembles the frames of one sender; not thread-safe.

    At most one frame is incomplete at a time. A frame of one piece may come between its pieces.
    If another piece does not continue the incomplete frame, that frame is discarded; random
    pieces have no other effect.

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
        if len(piece) < HEADER.size:
            self._discard("no piece of a frame")
            return None
        serial, total, offset, _ = HEADER.unpack_from(piece)
        if offset == 0 and total == len(piece) - HEADER.size <= self._max_bytes:
            return np.frombuffer(piece, np.uint8)[HEADER.size :].copy().data
        if offset == 0:
            self._begin(serial, total)
        # Its other pieces are still under way; they are counted with the frame, not one by one.
        if serial == self._ignored:
            return None
        frame, end = self._frame, offset + len(piece) - HEADER.size
        if frame is None or serial != self._serial or offset != self._filled:
            self._discard("a piece without those before it", serial)
        # A piece without content would never end.
        elif len(frame) != total or end > total or end == offset:
            self._discard("a piece that does not fit its frame", serial)
        else:
            frame[offset:end] = memoryview(piece)[HEADER.size :]
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
        # Before any memory is taken: the size is only a claim of the sender.
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
