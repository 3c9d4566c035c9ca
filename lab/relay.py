"""Holds each frame between two interfaces back for a while, where tc netem is missing.

    python relay.py INTERFACE INTERFACE SHAPE

SHAPE is a `Shape` as JSON. Frames pass as the kernel hands them over, in bundles of up to 64 KB
whose checksums are not yet worked out; the header that says so (PACKET_VNET_HDR) goes along. A
shape that counts frames (a rate, losses) needs hosts that send no bundles
(`Network.unbundle`).
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

ALL_PROTOCOLS = 0x0003
SOL_PACKET, PACKET_IGNORE_OUTGOING, PACKET_VNET_HDR = 263, 23, 15
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
PACKET_ADD_MEMBERSHIP, PACKET_MR_PROMISC = 1, 1
LARGEST = 1 << 17
VNET_HEADER = 10
SLOT = 0.1
"""Seconds of one entry of `Shape.out` and `Shape.back`."""
QUEUE = 16_384
"""Bytes that wait for a rate at least before more are dropped; or those of `QUEUE_SECONDS`."""
QUEUE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a cable carries frames, each way.

    Args:
        latency: Seconds.
        loss: Probability that a frame is lost.
        out: Bytes per slot of 0.1 s that the host may send, repeated; empty for no limit.
        back: Bytes per slot to the host.
        up: Seconds in each `period` for which the cable carries anything at all.
        period: Seconds.

    Raises:
        ValueError: If a number is out of range.
    """

    latency: float = 0.0
    loss: float = 0.0
    out: tuple[int, ...] = ()
    back: tuple[int, ...] = ()
    up: float = 1.0
    period: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency < 10:
            raise ValueError(f"latency must be in [0, 10) seconds, got {self.latency}")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss must be in [0, 1), got {self.loss}")
        if not 0 < self.up <= self.period:
            raise ValueError(f"up must be above 0 and at most period, got {self}")
        for slots in (self.out, self.back):
            if slots and not (min(slots) >= 0 and sum(slots) > 0):
                raise ValueError("slots must not be negative, nor all 0")

    @property
    def counts_frames(self) -> bool:
        """Whether bundles of frames would pass otherwise than the frames."""
        return bool(self.loss or self.out or self.back)

    def text(self) -> str:
        """This shape as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read a `text`."""
        values = json.loads(text)
        return cls(**values | {way: tuple(values[way]) for way in ("out", "back")})


class Way:
    """One direction of a cable; times are seconds since the relay began.

    Args:
        shape: Latency, loss, and when the cable is up.
        slots: Bytes per slot; empty for no limit.
        draw: Returns a number in [0, 1) for each frame.

    >>> way = Way(Shape(latency=0.3), (1000,), draw=lambda: 0.5)
    >>> [round(way.leaves(0.0, 500), 3) for _ in range(3)]
    [0.35, 0.4, 0.45]
    >>> Way(Shape(loss=0.6), (), draw=lambda: 0.5).leaves(0.0, 500) is None
    True
    """

    def __init__(
        self,
        shape: Shape,
        slots: tuple[int, ...],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._shape = shape
        self._slots = slots
        self._draw = draw
        self._free_at = 0.0
        self._queue: deque[tuple[float, int]] = deque()
        self._num_queued = 0

    def leaves(self, now: float, num_bytes: int) -> float | None:
        """When a frame that comes now arrives at the other end; None if it is lost."""
        shape = self._shape
        if now % shape.period >= shape.up or self._draw() < shape.loss:
            return None
        if not self._slots:
            return now + shape.latency
        while self._queue and self._queue[0][0] <= now:
            self._num_queued -= self._queue.popleft()[1]
        if self._num_queued + num_bytes > self._room(now):
            return None
        self._free_at = self._passed(max(now, self._free_at), num_bytes)
        self._queue.append((self._free_at, num_bytes))
        self._num_queued += num_bytes
        return self._free_at + shape.latency

    def _room(self, now: float) -> float:
        slots = self._slots
        first, number = int(now / SLOT), round(QUEUE_SECONDS / SLOT)
        next_ones = sum(slots[(first + index) % len(slots)] for index in range(number))
        return max(QUEUE, next_ones)

    def _passed(self, begin: float, num_bytes: float) -> float:
        """When so many bytes have passed that begin to do so at `begin`."""
        slot = int(begin / SLOT + 1e-9)
        while True:
            rate = self._slots[slot % len(self._slots)] / SLOT
            end = (slot + 1) * SLOT
            if rate and begin + num_bytes / rate <= end:
                return begin + num_bytes / rate
            num_bytes -= rate * (end - begin)
            begin, slot = end, slot + 1


def open_interface(name: str) -> socket.socket:
    """A socket that sees every frame that comes in at an interface, and can send any."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 25)
    opened.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 1 << 25)
    opened.bind((name, ALL_PROTOCOLS))
    index = socket.if_nametoindex(name)
    membership = struct.pack("iHH8s", index, PACKET_MR_PROMISC, 0, b"")
    opened.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, membership)
    opened.setblocking(False)
    return opened


def relay(host: str, switch: str, shape: Shape) -> None:
    """Pass frames both ways until stopped, as `shape` says."""
    ends = [open_interface(host), open_interface(switch)]
    print("ready", flush=True)
    began = time.monotonic()
    held: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # in order of their times
    ways = [Way(shape, shape.out), Way(shape, shape.back)]
    with selectors.SelectSelector() as selector:  # its timeouts are finer than epoll's
        for direction, end in enumerate(ends):
            selector.register(end, selectors.EVENT_READ, direction)
        while True:
            due = min((each[0][0] for each in held if each), default=None)
            timeout = None if due is None else max(0.0, began + due - time.monotonic())
            for key, _ in selector.select(timeout):
                frame = key.fileobj.recv(LARGEST)  # type: ignore[union-attr]
                now, num_bytes = time.monotonic() - began, len(frame) - VNET_HEADER
                if (at := ways[key.data].leaves(now, num_bytes)) is not None:
                    held[key.data].append((at, frame))
            for direction, waiting in enumerate(held):
                while waiting and waiting[0][0] <= time.monotonic() - began:
                    try:
                        ends[1 - direction].send(waiting.popleft()[1])
                    except OSError:  # the interface is full or down: a network loses it too
                        continue


if __name__ == "__main__":
    relay(sys.argv[1], sys.argv[2], Shape.parse(sys.argv[3]))
