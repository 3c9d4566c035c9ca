"""An in-memory network: transports that reach each other inside one process."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial

from edgegossip.contract.codec import Buffer
from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank
from edgegossip.net.identity.tls import TLS, Credentials
from edgegossip.net.transport import MAX_FRAME_BYTES, Incarnation, Listener, Progress


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
            # Unlike on a real network, two processes of one rank are a mistake in the caller's
            # code.
            if transport.rank in self._open:
                raise NetworkError(f"rank {transport.rank} is taken; close its transport first")
            self._open[transport.rank] = transport
            for other in self._open:
                self._tell(transport.rank, other, "appeared")

    def leave(self, transport: MemoryTransport) -> None:
        """Make `transport` unreachable; has no effect if it already is."""
        with self._lock:
            if self._open.get(transport.rank) is transport:
                # First it stops, so that its own departure is not reported to it.
                transport.stop()
                for other in self._open:
                    self._tell(transport.rank, other, "disappeared")
                del self._open[transport.rank]

    def carry(self, sender: MemoryTransport, receiver: Rank, frame: bytearray) -> None:
        """Deliver a frame to `receiver`, if it is reachable."""
        with self._lock:
            if self._open.get(sender.rank) is sender and self._is_way(sender.rank, receiver):
                self._open[receiver].take(sender.rank, frame)

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
        if security is not None:
            credentials = security.check(rank)
            self.credentials = lambda: credentials
        self._network = network
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
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
        # A copy, which the receiver owns: it may write to it, and the sender may not.
        self._network.carry(self, receiver, bytearray().join(frame))

    def begin(self, receiver: Rank, frame: Sequence[Buffer]) -> Progress:
        """See `Transport`; nothing leaves at once."""
        return Progress.NONE

    def send_rest(self, receiver: Rank) -> None:
        """See `Transport`."""

    def close(self) -> None:
        """See `Transport`."""
        self._network.leave(self)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def __repr__(self) -> str:
        return f"MemoryTransport(rank={self.rank})"

    # Calls of the network, one after the other.

    def take(self, sender: Rank, frame: bytearray) -> None:
        """Receive a frame from `sender`."""
        if len(frame) > self._max_bytes:
            self._calls.put(
                partial(self._listener.refused, sender, "a frame that is too large")
            )
        else:
            self._calls.put(partial(self._listener.received, sender, memoryview(frame)))

    def tell(self, what: str, other: MemoryTransport) -> None:
        """Report that `other` "appeared" or "disappeared"."""
        self._calls.put(partial(getattr(self._listener, what), other.rank, other.incarnation))

    def stop(self) -> None:
        """Stop calling this transport's listener."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
