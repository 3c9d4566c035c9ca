"""Agenda: the simulator's queue of future items."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from edgegossip.contract.protocol import Message, Rank, Seconds, Trained
from edgegossip.contract.trainer import TrainingResult
from edgegossip.sim.fault import Arrival, Crash, Leave, Recover
from edgegossip.sim.link import Downlink
from edgegossip.sim.pool import Pending

Entry: TypeAlias = tuple[Seconds, Rank, Any]
"""Time, rank and item."""


class Agenda:
    """Entries ordered by time; entries with equal times, by insertion.

    The heap holds each time once and compares floats only. Equal platforms finish at equal
    times, so the heap is often far smaller than the number of entries.

    Attributes:
        times: Heap of the times that have entries; the first is the next time.
        serial: Number of the next entry. Serials are never reused. They also identify
            individual messages and timer settings.

    >>> agenda = Agenda()
    >>> for at, item in [(2.0, "c"), (1.0, "a"), (1.0, "b")]:
    ...     agenda.push(at, 0, item)
    >>> [agenda.pop() for _ in range(3)]
    [(1.0, 0, 'a'), (1.0, 0, 'b'), (2.0, 0, 'c')]
    """

    __slots__ = ("_at", "serial", "times")

    def __init__(self) -> None:
        self.times: list[Seconds] = []
        self.serial = 0
        # An entry that is alone at its time needs no container.
        self._at: dict[Seconds, Entry | deque[Entry]] = {}

    def push(self, at: Seconds, rank: Rank, item: object) -> None:
        """Add an entry."""
        self.serial += 1
        entry = (at, rank, item)
        others = self._at.get(at)
        # Appending keeps entries of one time in the order of insertion, which the heap need
        # not know.
        if others is None:
            self._at[at] = entry
            heapq.heappush(self.times, at)
        elif isinstance(others, deque):
            others.append(entry)
        else:
            self._at[at] = deque((others, entry))

    def pop(self) -> Entry:
        """Remove and return the next entry; there must be one."""
        at = self.times[0]
        entry = self._at[at]
        # The time stays in the heap until its last entry is taken: an event may add another one
        # at the same time.
        if isinstance(entry, deque):
            entries, entry = entry, entry.popleft()
            if entries:
                return entry
        heapq.heappop(self.times)
        del self._at[at]
        return entry

    def __iter__(self) -> Iterator[Entry]:
        """All entries in order."""
        for at in sorted(self.times):
            entries = self._at[at]
            yield from entries if isinstance(entries, deque) else (entries,)

    def keep(self, is_kept: Callable[[Entry], bool]) -> None:
        """Drop all entries except those that `is_kept` accepts."""
        self.load([entry for entry in self if is_kept(entry)], self.serial)

    def load(self, entries: list[Entry], serial: int) -> None:
        """Replace all entries; `entries` must be in order."""
        # In place, because the simulator's loop holds the list.
        self.times.clear()
        self._at.clear()
        for entry in entries:
            self.push(*entry)
        self.serial = serial


# Items of the simulator's agenda, and its record of each worker.


@dataclass(slots=True)
class Start:
    """A worker is about to start or restart."""

    has_rejoined: bool = False


@dataclass(slots=True)
class Absence:
    """A worker is not there when the run begins."""


@dataclass(slots=True, eq=False)
class Ready:
    """A result that is available."""

    value: TrainingResult

    def result(self) -> TrainingResult:
        return self.value


@dataclass(slots=True, eq=False)
class InTraining:
    """Training in progress, which ends at its time in the agenda."""

    start: Seconds
    began: Seconds  # later than `start` if the platform was busy
    before: Tensor
    cost: float
    pending: Pending[TrainingResult]

    def finish(self, now: Seconds) -> Trained:
        """Make the worker's event at the virtual end of the training."""
        return self.pending.result().event(self.before, now - self.start, self.cost)


@dataclass(slots=True, eq=False)
class Evaluating:
    """A running evaluation of `params`, which ends at its time in the agenda."""

    params: Tensor


@dataclass(slots=True, eq=False)
class Delivery:
    """A message in flight.

    Attributes:
        sender: Rank of the sender.
        receiver: Rank of the receiver.
        message: Message for the receiver.
        num_bytes: Size on the wire.
        start: Start of transmission by the sender's uplink.
        end: End of the transmission.
        first: Arrival of the first byte at the receiver's downlink.
        last: Arrival of the last byte there; unless the downlink is busy, the message is
            received then.
        is_dropped: Whether the link loses the message.
        is_cut_off: Whether the sender crashed before the last byte left.
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
    """The first byte of a message arrives at a limited downlink."""

    delivery: Delivery


@dataclass(slots=True)
class Alarm:
    """A setting of a timer, which fires unless the timer has been set again."""

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
    leaves: bool = False  # at the end of its training

    def wait(self) -> None:
        """Wait for the result of training in progress."""
        if self.training is not None:
            self.training.pending = Ready(self.training.pending.result())


def forget_gone(agenda: Agenda, rank: Rank, now: Seconds, *, has_crashed: bool) -> None:
    """Remove the work of worker `rank`; a crash also cuts off the messages it is sending."""
    # Messages to it stay: they arrive if it is back in time. So do its own that have left.
    kept = (Crash, Recover, Arrival, Leave, Delivery, FirstByte)
    # Its training, timers and notices belong to the lost state.
    agenda.keep(lambda entry: entry[1] != rank or isinstance(entry[2], kept))
    for _, _, item in agenda if has_crashed else ():
        delivery = item.delivery if isinstance(item, FirstByte) else item
        if isinstance(delivery, Delivery) and delivery.sender == rank and delivery.end > now:
            delivery.is_cut_off = True
