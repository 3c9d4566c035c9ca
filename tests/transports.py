"""Both transports behind one face, so that one suite of tests holds for both."""

from __future__ import annotations

import os
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.address import Address
from edgegossip.net.memory import MemoryNetwork
from edgegossip.net.transport import MAX_FRAME_BYTES, Incarnation, Listener, Transport
from edgegossip.net.zenoh.session import LEASE
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.launch import free_ports

What: TypeAlias = tuple[Any, ...]
"""("appeared", rank, incarnation), ("received", sender, bytes) and so on."""


class Recorder(Listener):
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[What] = queue.SimpleQueue()

    def received(self, sender: Rank, frame: Buffer) -> None:
        self._events.put(("received", sender, bytes(frame)))

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        self._events.put(("appeared", rank, incarnation))

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None:
        self._events.put(("disappeared", rank, incarnation))

    def interrupted(self, rank: Rank, incarnation: Incarnation) -> None:
        self._events.put(("interrupted", rank, incarnation))

    def refused(self, rank: Rank | None, reason: str) -> None:
        self._events.put(("refused", rank, reason))

    def next(self, seconds: Seconds = 10.0) -> What:
        """Wait for the next event and return it."""
        return self._events.get(timeout=seconds)

    def take(self, number: int) -> list[What]:
        """The next things, in order; waits for them."""
        return [self.next() for _ in range(number)]

    def until(self, last: What) -> list[What]:
        """Everything up to `last`, which is waited for."""
        events = [self.next()]
        while events[-1] != last:
            events.append(self.next())
        return events

    @property
    def is_empty(self) -> bool:
        return self._events.empty()


@dataclass
class End:
    """An open transport, and what its listener has been told."""

    transport: Transport
    events: Recorder

    def send(self, receiver: Rank, *parts: Buffer) -> None:
        self.transport.send(receiver, parts)


class Network(ABC):
    """Makes transports that reach each other, and closes them all."""

    def __init__(self, num_workers: int = 3) -> None:
        self.num_workers = num_workers
        self.opened: list[Transport] = []

    @abstractmethod
    def transport(self, rank: Rank, incarnation: Incarnation) -> Transport:
        """One that is not open yet."""

    def open(
        self,
        rank: Rank,
        incarnation: Incarnation | None = None,
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> End:
        """Open one; its incarnation is 100 + rank if not given."""
        transport = self.transport(rank, 100 + rank if incarnation is None else incarnation)
        end = End(transport, Recorder())
        self.opened.append(transport)
        transport.open(end.events, max_bytes)
        return end

    def open_all(self) -> list[End]:
        """Open all; returns when each has heard of each."""
        ends = [self.open(rank) for rank in range(self.num_workers)]
        for end in ends:
            for kind, _, _ in end.events.take(self.num_workers - 1):
                assert kind == "appeared"
        return ends

    def close(self) -> None:
        for transport in self.opened:
            transport.close()


class InMemory(Network):
    """Threads of this process."""

    def __init__(self, num_workers: int = 3) -> None:
        super().__init__(num_workers)
        self.network = MemoryNetwork()

    def transport(self, rank: Rank, incarnation: Incarnation) -> Transport:
        return self.network.transport(rank, incarnation)


class OverZenoh(Network):
    """Sessions of this process, which meet on loopback as those of one machine would."""

    run = "test"
    lease = LEASE

    def __init__(self, num_workers: int = 3) -> None:
        super().__init__(num_workers)
        self.endpoints = [f"tcp/127.0.0.1:{port}" for port in free_ports(num_workers)]

    def address(self, rank: Rank) -> Address:
        """Each calls those of lower rank."""
        return Address(listen=(self.endpoints[rank],), connect=tuple(self.endpoints[:rank]))

    def transport(self, rank: Rank, incarnation: Incarnation) -> Transport:
        return ZenohTransport(
            run=self.run,
            rank=rank,
            num_workers=self.num_workers,
            address=self.address(rank),
            incarnation=incarnation,
            insecure=True,  # of use to those who meet by multicast
            lease=self.lease,
        )


class BetweenMachines(OverZenoh):
    """As those of several machines would, which share no memory."""

    def address(self, rank: Rank) -> Address:
        port = self.endpoints[rank].rpartition(":")[2]
        return Address(listen=(f"tcp/0.0.0.0:{port}",), connect=tuple(self.endpoints[:rank]))


class InLocalNetwork(OverZenoh):
    """As those of machines would that know no address of each other."""

    # Tests that run beside this one are found as well.
    run = f"test-{os.getpid()}"

    def address(self, rank: Rank) -> Address:
        return Address(multicast=True)


NETWORKS: list[Callable[[], Network]] = [InMemory, OverZenoh, BetweenMachines]
