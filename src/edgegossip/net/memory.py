"""An in-memory network: transports that reach each other inside one process."""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
from collections.abc import Callable, Sequence

from edgegossip.contract.codec import Buffer
from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.identity.tls import TLS, Credentials
from edgegossip.net.transport import MAX_FRAME_BYTES, Assembler, Incarnation, Listener, split


class MemoryNetwork:
    """Connects the transports that it makes; for tests and for threads that train together.

    A link is never congested; frames wait in memory.

    >>> network = MemoryNetwork()
    >>> network.transport(rank=0), network.transport(rank=1, incarnation=5)
    (MemoryTransport(rank=0), MemoryTransport(rank=1))
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[Rank, MemoryTransport] = {}
        self._cuts: set[frozenset[Rank]] = set()

    def transport(
        self,
        rank: Rank,
        incarnation: Incarnation | None = None,
        security: TLS | None = None,
    ) -> MemoryTransport:
        """Make an end of the network; `incarnation` is drawn by default.

        Sealing relayed parts requires `security`, whose files are read once; links do not need
        them.

        Raises:
            NetworkError: If the files are invalid; see `TLS.check`.
        """
        return MemoryTransport(
            self, rank, secrets.randbits(63) if incarnation is None else incarnation, security
        )

    def cut(self, a: Rank, b: Rank) -> None:
        """Block all frames between the two workers until `mend`."""
        with self._lock:
            if frozenset((a, b)) not in self._cuts:
                self._tell(a, b, "disappeared")
                self._cuts.add(frozenset((a, b)))

    def mend(self, a: Rank, b: Rank) -> None:
        """Let the two workers reach each other again."""
        with self._lock:
            if frozenset((a, b)) in self._cuts:
                self._cuts.remove(frozenset((a, b)))
                self._tell(a, b, "appeared")

    def kill(self, rank: Rank) -> None:
        """Act as if the process of `rank` were killed: its listener receives nothing more."""
        with self._lock:
            self.leave(self._open[rank])

    # For the transports.

    def join(self, transport: MemoryTransport) -> None:
        """Make `transport` reachable.

        Raises:
            NetworkError: If another transport of the same rank is open.
        """
        with self._lock:
            if transport.rank in self._open:
                raise NetworkError(f"rank {transport.rank} is taken; close its transport first")
            self._open[transport.rank] = transport
            for other in self._open:
                self._tell(transport.rank, other, "appeared")

    def leave(self, transport: MemoryTransport) -> None:
        """Make `transport` unreachable; has no effect if it already is."""
        with self._lock:
            if self._open.get(transport.rank) is transport:
                transport.stop()
                for other in self._open:
                    self._tell(transport.rank, other, "disappeared")
                del self._open[transport.rank]

    def carry(self, sender: MemoryTransport, receiver: Rank, piece: bytes) -> None:
        """Deliver a piece to `receiver`, if it is reachable."""
        with self._lock:
            if self._open.get(sender.rank) is sender and self._is_way(sender.rank, receiver):
                self._open[receiver].take(sender.rank, piece)

    def _tell(self, a: Rank, b: Rank, what: str) -> None:
        if self._is_way(a, b):
            for one, other in ((a, b), (b, a)):
                self._open[one].tell(what, self._open[other])

    def _is_way(self, a: Rank, b: Rank) -> bool:
        is_open = a in self._open and b in self._open
        return is_open and a != b and frozenset((a, b)) not in self._cuts


class MemoryTransport:
    """One worker's end of a `MemoryNetwork`."""

    def __init__(
        self,
        network: MemoryNetwork,
        rank: Rank,
        incarnation: Incarnation,
        security: TLS | None = None,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.credentials: Callable[[], Credentials] | None = None
        self.lease: Seconds | None = None
        if security is not None:
            credentials = security.check(rank)
            self.credentials = lambda: credentials
        self._network = network
        self._serials = itertools.count()
        self._assemblers: dict[Rank, Assembler] = {}
        self._sending = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"receive as {rank}", daemon=True
        )

    @property
    def calls(self) -> tuple[str, ...]:
        """See `Transport`."""
        return ()

    def open(
        self,
        listener: Listener,
        max_bytes: int = MAX_FRAME_BYTES,
        keep_trying: Callable[[], bool] = lambda: True,
    ) -> None:
        """See `Transport`."""
        self._listener = listener
        self._max_bytes = max_bytes
        self._network.join(self)
        self._thread.start()

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        """See `Transport`."""
        with self._sending:
            for piece in split(next(self._serials), frame):
                self._network.carry(self, receiver, piece)

    def close(self) -> None:
        """See `Transport`."""
        self._network.leave(self)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def __repr__(self) -> str:
        return f"MemoryTransport(rank={self.rank})"

    # Calls of the network, one after the other.

    def take(self, sender: Rank, piece: bytes) -> None:
        """Receive a piece of a frame from `sender`."""
        self._calls.put(lambda: self._receive(sender, piece))

    def tell(self, what: str, other: MemoryTransport) -> None:
        """Report that `other` "appeared" or "disappeared"."""
        self._calls.put(lambda: self._announce(what, other))

    def stop(self) -> None:
        """Stop calling this transport's listener."""
        self._calls.put(None)

    def _announce(self, what: str, other: MemoryTransport) -> None:
        self._assemblers[other.rank] = Assembler(
            self._max_bytes, lambda reason: self._listener.refused(other.rank, reason)
        )
        getattr(self._listener, what)(other.rank, other.incarnation)

    def _receive(self, sender: Rank, piece: bytes) -> None:
        frame = self._assemblers[sender].add(piece)
        if frame is not None:
            self._listener.received(sender, frame)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
