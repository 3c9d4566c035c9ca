"""Statuses, which workers exchange in addition to the algorithm's messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch

from edgegossip.contract.protocol import Message, Rank, Seconds
from edgegossip.contract.schema import MessageSpec, TensorSpec
from edgegossip.net.runtime import Life

STATUS = "net/status"
MAX_ELAPSED: Seconds = 1e9
"""Thirty years; larger clock values would lose their fractions."""


class Phase(IntEnum):
    """Progress of a worker in a run."""

    WAITING = 0  # for the others to begin
    RUNNING = 1
    FINISHED = 2  # it answers, but has no work left
    LEAVING = 3  # it was stopped and has a checkpoint to resume from
    GONE = 4  # it has left before its end and will not resume


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """The status of one worker, addressed to one other worker.

    Attributes:
        phase: Phase of the worker.
        life: Life of the worker.
        begun_with: The receiver's life with which the worker has begun; 0 without one.
        elapsed: Seconds since the run began, by the worker's clock; 0 while it waits.
        silence: Seconds for which the worker may be silent while it works; see `Patience`.
        is_resumed: Whether the worker resumes from a checkpoint.
        oldest: The lowest number of a message to the receiver that can still be resent; one
            more than the last number if there is none.
        kept: The highest number of the receiver's messages in the worker's checkpoint.
        left: The number of the last message to the receiver, all of which arrive before this
            status; 0 if some wait to be sent, or sent again, because the status may overtake
            them.
        sent: [num_workers] number of the last message to each worker.
        received: [num_workers] number of the last message from each worker.
    """

    phase: Phase
    life: Life
    begun_with: Life
    elapsed: Seconds
    silence: Seconds
    is_resumed: bool
    oldest: int
    kept: int
    left: int
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def message(self) -> Message:
        """Write the status as a message; see `parse`."""
        numbers = {
            "phase": int(self.phase),
            "life": self.life,
            "begun_with": self.begun_with,
            "elapsed": float(self.elapsed),
            "silence": float(self.silence),
            "is_resumed": int(self.is_resumed),
            "oldest": self.oldest,
            "kept": self.kept,
            "left": self.left,
        }
        # A tensor, because the schema can check its size and its least value.
        counts = torch.tensor([self.sent, self.received])
        return Message(STATUS, 0, {"counts": counts}, numbers)

    def is_news(self, told: WorkerStatus | None) -> bool:
        """Whether this status differs from `told`, the last one sent."""
        # The clock, the log and what has left are no news: they change all the time.
        return told is None or _content(self) != _content(told)

    def continues(self, told: WorkerStatus | None) -> bool:
        """Whether only counts have changed since `told`, the last status sent."""
        return told is not None and (self.phase, self.life, self.begun_with) == (
            told.phase,
            told.life,
            told.begun_with,
        )

    def without_receipts(self, sender: Rank) -> WorkerStatus:
        """The same status, in which no message of `sender` has arrived."""
        received = (*self.received[:sender], 0, *self.received[sender + 1 :])
        return replace(self, received=received)

    @classmethod
    def parse(cls, message: Message) -> WorkerStatus:
        """Read a status from a message; see `spec`.

        >>> status = WorkerStatus(phase=Phase.RUNNING, life=7, begun_with=8, elapsed=1.5,
        ...     silence=16.0, is_resumed=False, oldest=3, kept=0, left=2, sent=(0, 2),
        ...     received=(0, 1))
        >>> WorkerStatus.parse(status.message()) == status
        True
        """
        values: dict[str, Any] = {**message.numbers}
        values["phase"] = Phase(values["phase"])
        values["is_resumed"] = bool(values["is_resumed"])
        sent, received = message.payload["counts"].tolist()
        return cls(**values, sent=tuple(sent), received=tuple(received))


def _content(status: WorkerStatus) -> tuple[object, ...]:
    counts = (status.kept, status.sent, status.received)
    return (status.phase, status.life, status.begun_with, status.silence, *counts)


def spec(num_workers: int) -> MessageSpec:
    """Description of a message that holds a status."""
    return MessageSpec(
        {"counts": TensorSpec(torch.int64, (2, num_workers), minimum=0)},
        numbers={
            "phase": range(min(Phase), max(Phase) + 1),
            "life": range(1, 2**63),
            "begun_with": range(2**63),
            "elapsed": (0.0, MAX_ELAPSED),
            "silence": (0.0, MAX_ELAPSED),
            "is_resumed": range(2),
            "oldest": range(2**63),
            "kept": range(2**63),
            "left": range(2**63),
        },
    )
