"""Network events, as they wait for a host in its inbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from edgegossip.core.protocol import Message, Rank, Seconds
from edgegossip.net.transport import Incarnation


@dataclass(slots=True, eq=False)
class Frame:
    """Bytes arrived."""

    sender: Rank
    data: memoryview


@dataclass(slots=True)
class Appeared:
    """A process can be reached."""

    rank: Rank
    incarnation: Incarnation


@dataclass(slots=True)
class Disappeared:
    """A process cannot be reached any more."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Refused:
    """The transport refused something, once or more often."""

    rank: Rank | None
    reason: str


@dataclass(slots=True, eq=False)
class Left:
    """A message has been handed to the transport, or is kept until it can be."""

    receiver: Rank
    message: Message
    handed_over: Seconds


Item: TypeAlias = Frame | Appeared | Disappeared | Refused
ITEMS = (Frame, Appeared, Disappeared, Refused)
