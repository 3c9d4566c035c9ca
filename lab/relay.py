"""Holds each frame between two interfaces back for a while: latency, where tc netem is missing.

    python relay.py INTERFACE INTERFACE SECONDS

Frames pass as the kernel hands them over, in bundles of up to 64 KB whose checksums are not yet
worked out; the header that says so (PACKET_VNET_HDR) goes along.
"""

from __future__ import annotations

import selectors
import socket
import struct
import sys
import time
from collections import deque

ALL_PROTOCOLS = 0x0003
SOL_PACKET, PACKET_IGNORE_OUTGOING, PACKET_VNET_HDR = 263, 23, 15
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
PACKET_ADD_MEMBERSHIP, PACKET_MR_PROMISC = 1, 1
LARGEST = 1 << 17


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


def relay(first: str, second: str, latency: float) -> None:
    """Pass frames both ways until stopped, `latency` seconds late."""
    ends = [open_interface(first), open_interface(second)]
    print("ready", flush=True)
    held: deque[tuple[float, socket.socket, bytes]] = deque()  # in order of their times
    with selectors.SelectSelector() as selector:  # its timeouts are finer than epoll's
        for end, other in zip(ends, reversed(ends), strict=True):
            selector.register(end, selectors.EVENT_READ, other)
        while True:
            timeout = max(0.0, held[0][0] - time.monotonic()) if held else None
            for key, _ in selector.select(timeout):
                frame = key.fileobj.recv(LARGEST)  # type: ignore[union-attr]
                held.append((time.monotonic() + latency, key.data, frame))
            while held and held[0][0] <= time.monotonic():
                _, end, frame = held.popleft()
                try:
                    end.send(frame)
                except OSError:  # the interface is full or down: a network loses it too
                    continue


if __name__ == "__main__":
    relay(sys.argv[1], sys.argv[2], float(sys.argv[3]))
