"""What workers tell each other about themselves, beside the algorithm's messages."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, TypeAlias

import torch

from edgegossip.core.protocol import Message, Seconds
from edgegossip.core.schema import MessageSpec, TensorSpec

STATUS = "net/status"
MAX_ELAPSED: Seconds = 1e9
"""Thirty years: with any number of seconds, clocks would lose their fractions."""
Life: TypeAlias = int
"""Of a rank: drawn anew when it starts with nothing; a resumed worker goes on with its own."""


class Phase(IntEnum):
    """How far a worker is."""

    WAITING = 0  # for the others, to begin
    RUNNING = 1
    FINISHED = 2  # it answers, but has no work left
    LEAVING = 3  # it was stopped, with a checkpoint to go on from


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One worker's account of itself, for one other worker.

    Attributes:
        phase: How far it is.
        life: Its own.
        begun_with: The receiver's life that it goes on with; 0 if it has not begun, or without.
        elapsed: Seconds since the run began, by its clock; 0 while it waits.
        is_resumed: It goes on from a checkpoint.
        oldest: The lowest number of a message to the receiver that it can send again; 1 more
            than the last number if it can none.
        kept: The highest number from the receiver that is in its checkpoint.
        sent: [num_workers] the number of its last message to each worker.
        received: [num_workers] the number of the last message that it has from each.
    """

    phase: Phase
    life: Life
    begun_with: Life
    elapsed: Seconds
    is_resumed: bool
    oldest: int
    kept: int
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def message(self) -> Message:
        """As a message; see `parse`."""
        dtypes = {float: torch.float64, bool: torch.bool}
        payload = {}
        for each in fields(self):
            value = getattr(self, each.name)
            dtype = dtypes.get(type(value), torch.int64)
            payload[each.name] = torch.tensor(value, dtype=dtype)
        return Message(STATUS, 0, payload)

    @classmethod
    def parse(cls, message: Message) -> Status:
        """Read what `message` wrote; see `spec`.

        >>> status = Status(phase=Phase.RUNNING, life=7, begun_with=8, elapsed=1.5, kept=0,
        ...     is_resumed=False, oldest=3, sent=(0, 2), received=(0, 1))
        >>> Status.parse(status.message()) == status
        True
        """
        values: dict[str, Any] = {name: x.tolist() for name, x in message.payload.items()}
        values["phase"] = Phase(values["phase"])
        values["sent"], values["received"] = tuple(values["sent"]), tuple(values["received"])
        return cls(**values)


def spec(num_workers: int) -> MessageSpec:
    """What the message of a status may be."""
    phase = TensorSpec(torch.int64, (), minimum=min(Phase), maximum=max(Phase))
    number = TensorSpec(torch.int64, (), minimum=0)
    return MessageSpec(
        {
            "phase": phase,
            "life": TensorSpec(torch.int64, (), minimum=1),
            "begun_with": number,
            "elapsed": TensorSpec(torch.float64, (), minimum=0.0, maximum=MAX_ELAPSED),
            "is_resumed": TensorSpec(torch.bool, ()),
            "oldest": number,
            "kept": number,
            "sent": TensorSpec(torch.int64, (num_workers,), minimum=0),
            "received": TensorSpec(torch.int64, (num_workers,), minimum=0),
        }
    )


def new_life() -> Life:
    """Draw a life; never 0.

    >>> 0 < new_life() < 2**63
    True
    """
    # From the system: two workers of one seed must not draw alike.
    return 1 + secrets.randbelow(2**63 - 1)
