"""Items of the simulator's agenda, and its record of each worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from edgegossip.core.protocol import Message, Rank, Seconds, Trained
from edgegossip.core.trainer import TrainingResult
from edgegossip.sim.agenda import Agenda
from edgegossip.sim.downlink import Downlink
from edgegossip.sim.fault import Crash, Recover
from edgegossip.sim.pool import Pending


@dataclass(slots=True)
class Start:
    """A worker is about to start or restart."""

    has_rejoined: bool = False


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

    def wait(self) -> None:
        """Wait for the result of training in progress."""
        if self.training is not None:
            self.training.pending = Ready(self.training.pending.result())


def forget_crashed(agenda: Agenda, rank: Rank, now: Seconds) -> None:
    """Remove the work of the crashed worker `rank`, and cut off the messages it is sending."""
    kept = (Crash, Recover, Delivery, FirstByte)
    agenda.keep(lambda entry: entry[1] != rank or isinstance(entry[2], kept))
    for _, _, item in agenda:
        delivery = item.delivery if isinstance(item, FirstByte) else item
        if isinstance(delivery, Delivery) and delivery.sender == rank and delivery.end > now:
            delivery.is_cut_off = True
