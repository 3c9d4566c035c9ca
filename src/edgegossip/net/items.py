"""Network events in a host's inbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from edgegossip.core.protocol import Message, Rank, Seconds
from edgegossip.net.transport import Incarnation


@dataclass(slots=True, eq=False)
class Frame:
    """A frame has arrived."""

    sender: Rank
    data: memoryview


@dataclass(slots=True)
class Appeared:
    """A process has become reachable."""

    rank: Rank
    incarnation: Incarnation


@dataclass(slots=True)
class Disappeared:
    """A process is no longer reachable."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Refused:
    """The transport rejected input, once or several times."""

    rank: Rank | None
    reason: str


@dataclass(slots=True, eq=False)
class Left:
    """A message was handed to the transport, or is kept until this is possible."""

    receiver: Rank
    message: Message
    handed_over: Seconds


Item: TypeAlias = Frame | Appeared | Disappeared | Refused
ITEMS = (Frame, Appeared, Disappeared, Refused)
