"""Transport of messages between the workers of one run: in order, complete or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol, TypeAlias

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Rank
from edgegossip.net.identity.tls import Credentials

Incarnation: TypeAlias = int
"""Number drawn by every process of a rank, to distinguish a restart from a pause."""

MAX_FRAME_BYTES = 2**30

TWIN = "another process of this worker"
"""Reason of a refusal in this worker's own name: another process was this worker before, and
this process has to end.
"""


class Progress(Enum):
    """How much of a frame has been sent."""

    NONE = auto()
    SOME = auto()
    ALL = auto()


class Listener(Protocol):
    """Receives events from the transport's threads, so its methods must not block."""

    def received(self, sender: Rank, frame: memoryview) -> None:
        """A complete, writable frame from `sender` has arrived; the listener now owns it."""

    def read(self, sender: Rank, frame: memoryview) -> Callable[[], None]:
        """As `received`, from a thread that does nothing but read this sender's frames.

        The thread calls what this returns, without locks, before it reads on; this may block.
        """
        self.received(sender, frame)
        return lambda: None

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Worker `rank` has become reachable."""

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None:
        """Worker `rank` is lost, or the path to it is cut."""

    def interrupted(self, rank: Rank, incarnation: Incarnation) -> None:
        """Frames to a worker that is reachable may be lost; those sent from now on are not."""

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

    def begin(self, receiver: Rank, frame: Sequence[Buffer]) -> Progress:
        """Send as much of `frame` as leaves within milliseconds; return how much that is.

        What is left of it must be sent with `send_rest`.
        """

    def send_rest(self, receiver: Rank) -> None:
        """Send the rest of the frame that `begin` has begun to send, as `send` does."""

    def close(self) -> None:
        """Deliver sent frames, then stop listening and disappear; no effect if closed."""
