"""Two workers that call each other have two links: what is lost with one is told."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.transports import End, Recorder
from tests.zenoh_workers import wait_until

from edgegossip.net.address import Address
from edgegossip.net.zenoh import transport
from edgegossip.net.zenoh.links import Ends
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.launch import free_ports

NUM_FRAMES = 400
SIZE = 4000
"""Bytes of a frame, less than what the sender cuts into pieces."""


class Relay:
    """Carries the one link that a worker opens, while it may."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp/127.0.0.1:{self._listener.getsockname()[1]}"
        self._port = port
        self._may_read = threading.Event()
        self._may_read.set()
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        self._may_read.clear()

    def go_on(self) -> None:
        self._may_read.set()

    def close(self) -> None:
        """End the link, with all that is in it; nobody can open it again."""
        with self._lock:
            self._is_closed = True
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait for it
            each.close()
        self.go_on()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                self._keep(caller)
                called = self._call()
                self._keep(called)
                for pair in ((caller, called), (called, caller)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _keep(self, opened: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                opened.close()
                raise ConnectionAbortedError
            self._sockets.append(opened)

    def _call(self) -> socket.socket:
        while not self._is_closed:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", self._port))
            time.sleep(0.01)
        raise ConnectionAbortedError

    def _carry(self, source: socket.socket, destination: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._may_read.wait()
                destination.sendall(data)
                self.num_bytes += len(data)
        for each in (source, destination):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Pair:
    """Two workers, each of which has called the other through a relay of its own."""

    def __init__(self) -> None:
        ports = free_ports(2)
        self.relays = [Relay(ports[1]), Relay(ports[0])]
        self.ends = [End(self._transport(rank, ports[rank]), Recorder()) for rank in range(2)]
        for end in self.ends:
            end.transport.open(end.events)
        for end in self.ends:
            assert end.events.next()[0] == "appeared"
        wait_until(lambda: all(len(links(end)) == 2 for end in self.ends))

    def _transport(self, rank: int, port: int) -> ZenohTransport:
        listen, connect = f"tcp/127.0.0.1:{port}", self.relays[rank].endpoint
        return ZenohTransport(
            run="test",
            rank=rank,
            num_workers=2,
            address=Address(listen=(listen,), connect=(connect,)),
            incarnation=100 + rank,
        )

    def relay_in_use(self) -> Relay:
        """The relay that carries what worker 0 sends."""
        before = [relay.num_bytes for relay in self.relays]
        for _ in range(10):
            self.ends[0].send(1, bytes(SIZE))
            self.ends[1].events.next()
        wait_until(lambda: max(self._growth(before)) > 10 * SIZE)
        return self.relays[self._growth(before).index(max(self._growth(before)))]

    def _growth(self, before: list[int]) -> list[int]:
        return [relay.num_bytes - b for relay, b in zip(self.relays, before, strict=True)]

    def close(self) -> None:
        for relay in self.relays:
            relay.close()
        for end in self.ends:
            end.transport.close()


def links(end: End) -> dict[Ends, bool]:
    assert isinstance(end.transport, ZenohTransport)
    return end.transport._links.leaving


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # A direct stream would carry frames past both relays.
    monkeypatch.setattr(transport, "IS_SUPPORTED", False)
    pair = Pair()
    yield pair
    pair.close()


def frame(number: int) -> bytes:
    return number.to_bytes(4, "little") + bytes(SIZE - 4)


def test_what_is_lost_with_one_of_two_links_is_told(pair: Pair) -> None:
    relay = pair.relay_in_use()
    relay.stall()
    sender, receiver = pair.ends
    for number in range(NUM_FRAMES):
        sender.send(1, frame(number))
    relay.close()
    assert sender.events.next() == ("interrupted", 1, 101)
    again = range(NUM_FRAMES, 2 * NUM_FRAMES)
    for number in again:
        sender.send(1, frame(number))
    events = receiver.events.until(("received", 0, frame(again[-1])))
    assert events.count(("interrupted", 0, 100)) == 1  # what it sends may be lost, too
    frames = [event[2] for event in events if event[0] == "received"]
    received = [int.from_bytes(each[:4], "little") for each in frames]
    before = [*itertools.takewhile(lambda number: number < NUM_FRAMES, received)]
    assert before == [*range(len(before))]  # with no gap
    assert len(before) < NUM_FRAMES  # or this test shows nothing
    assert received[len(before) :] == [*again]
    assert receiver.events.is_empty
    assert sender.events.is_empty
