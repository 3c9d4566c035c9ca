"""Transport of messages between the workers of one run: complete or not at all, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from edgegossip.core.codec import Buffer
from edgegossip.core.protocol import Rank
from edgegossip.net.tls import Credentials

Incarnation: TypeAlias = int
"""Drawn anew by every process that speaks for a rank: tells a restart from a pause."""

MAX_FRAME_BYTES = 2**30


class Listener(Protocol):
    """Receives events from threads of the transport, so its methods must not block."""

    def received(self, sender: Rank, frame: memoryview) -> None:
        """A complete frame from `sender` arrived; the listener owns it, and it is writable."""

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Worker `rank` has become reachable."""

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Worker `rank` is gone, or the path to it is cut."""

    def refused(self, rank: Rank | None, reason: str) -> None:
        """Invalid input arrived, apparently from `rank`."""


class Transport(Protocol):
    """Carries frames between workers; knows nothing of algorithms.

    Frames from one sender to one receiver arrive in order, each complete or not at all.

    Attributes:
        credentials: Returns the current credentials; None without certificates.
    """

    credentials: Callable[[], Credentials] | None

    @property
    def calls(self) -> tuple[str, ...]:
        """Endpoints that it calls until they answer, for people to read."""

    def open(
        self,
        listener: Listener,
        max_bytes: int = MAX_FRAME_BYTES,
        keep_trying: Callable[[], bool] = lambda: True,
    ) -> None:
        """Become reachable and begin to listen.

        Args:
            listener: Receives the events.
            max_bytes: Limit of a frame; larger ones are rejected before memory is allocated.
            keep_trying: Polled while a transport cannot open because no peer answers; it gives
                up once this returns false.

        Raises:
            NetworkError: If that cannot be done.
        """

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        """Deliver `frame`, given in parts that the caller must not change afterwards.

        Blocks while the link is congested. A frame to a worker that has not appeared, or that
        disappears in the meantime, is lost. Thread-safe; sends to different receivers do not
        block each other.
        """

    def close(self) -> None:
        """Deliver sent frames, then stop listening and disappear; no effect if it is closed."""
