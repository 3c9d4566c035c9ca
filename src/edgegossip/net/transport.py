"""Transport of messages between the workers of one run: whole or not at all, in order."""

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
    """Told what happens, from threads of the transport, so it must not wait."""

    def received(self, sender: Rank, frame: memoryview) -> None:
        """A whole frame from `sender` arrived; it is the listener's own, and writable."""

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Worker `rank` can be reached."""

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Worker `rank` is gone, or the way to it is cut."""

    def refused(self, rank: Rank | None, reason: str) -> None:
        """Something arrived that is not a frame; `rank` is who seems to have sent it."""


class Transport(Protocol):
    """Carries frames between workers; knows nothing of algorithms.

    Frames of one sender arrive at one receiver in the order sent, each whole or not at all.

    Attributes:
        credentials: Says by what workers know each other now; None where they do not.
    """

    credentials: Callable[[], Credentials] | None

    @property
    def calls(self) -> tuple[str, ...]:
        """Endpoints of others that it calls until they answer, for people to read."""

    def open(
        self,
        listener: Listener,
        max_bytes: int = MAX_FRAME_BYTES,
        keep_trying: Callable[[], bool] = lambda: True,
    ) -> None:
        """Become reachable and begin to listen.

        Args:
            listener: Told what happens.
            max_bytes: Limit of a frame; larger ones are refused before memory is spent.
            keep_trying: Asked again and again where a transport cannot open before somebody
                answers; it gives up once the answer is false.

        Raises:
            NetworkError: If that cannot be done.
        """

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        """Deliver `frame`, given in parts that the caller does not change afterwards.

        Waits while the link is congested. To a worker that has not appeared, or disappears
        meanwhile, it is lost. May be called from several threads; those that send to different
        receivers do not wait for each other.
        """

    def close(self) -> None:
        """Deliver what was sent, then stop listening and be gone; nothing if it is closed."""
