"""Entries of the simulator's queue, and its record of each worker."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from edgegossip.core.protocol import Message, Rank, Seconds, Trained
from edgegossip.core.trainer import TrainingResult
from edgegossip.sim.downlink import Downlink
from edgegossip.sim.fault import Crash, Recover
from edgegossip.sim.pool import Pending


@dataclass(slots=True)
class Start:
    """A worker is about to start, for the first time or again."""

    has_rejoined: bool = False


@dataclass(slots=True, eq=False)
class Ready:
    """A result that is there."""

    value: TrainingResult

    def result(self) -> TrainingResult:
        return self.value


@dataclass(slots=True, eq=False)
class InTraining:
    """Work under way; it ends when virtual time gets there."""

    start: Seconds
    began: Seconds  # later than `start` if the platform was busy
    before: Tensor
    cost: float
    pending: Pending[TrainingResult]

    def finish(self, now: Seconds) -> Trained:
        """Event that the worker is told when virtual time reaches the end."""
        return self.pending.result().event(self.before, now - self.start, self.cost)


@dataclass(slots=True, eq=False)
class Evaluating:
    """An evaluation of `params` that ends when virtual time gets there."""

    params: Tensor


@dataclass(slots=True, eq=False)
class Delivery:
    """A message under way.

    Attributes:
        sender: Rank that sends it.
        receiver: Rank to which it is sent.
        message: Message as the receiver will see it.
        num_bytes: Size on the wire.
        start: When its sender's uplink begins to carry it.
        end: When its last byte has left.
        first: When the first byte gets to the receiver's downlink.
        last: When the last byte does: it is received then unless the downlink is busy.
        is_dropped: The link loses it.
        is_cut_off: Its sender crashed before the last byte left.
    """

    sender: Rank
    receiver: Rank
    message: Message
    num_bytes: int
    start: Seconds
    end: Seconds
    first: Seconds
    last: Seconds
    is_dropped: bool = False
    is_cut_off: bool = False


@dataclass(slots=True, eq=False)
class FirstByte:
    """The first byte of a message gets to a downlink that is limited."""

    delivery: Delivery


@dataclass(slots=True)
class Alarm:
    """A timer that is due unless it was set again since."""

    name: str
    serial: int


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """The simulator's record of a worker, without the algorithm's state."""

    has_finished: bool = False
    training: InTraining | None = None
    uplink_free: Seconds = 0.0
    downlink: Downlink = field(default_factory=Downlink)
    alarms: dict[str, int] = field(default_factory=dict)


Entry: TypeAlias = tuple[Seconds, int, Rank, Any]
"""When, a serial that breaks ties, whose, and what: the queue is a heap of these."""


def forget_crashed(queue: list[Entry], rank: Rank, now: Seconds) -> None:
    """Take out what the crashed worker `rank` was doing, and cut off what it was sending."""
    kept = (Crash, Recover, Delivery, FirstByte)
    # In place: the loop holds the list.
    queue[:] = [entry for entry in queue if entry[2] != rank or isinstance(entry[3], kept)]
    heapq.heapify(queue)
    for _, _, _, item in queue:
        delivery = item.delivery if isinstance(item, FirstByte) else item
        if isinstance(delivery, Delivery) and delivery.sender == rank and delivery.end > now:
            delivery.is_cut_off = True
