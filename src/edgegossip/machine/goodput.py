"""Goodput: what a run has made of its machines' time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from edgegossip.contract.protocol import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """Use of all machines from the start of a run until now.

    Attributes:
        goodput: Useful samples / samples that the machines which train could have processed
            without any wait or outage; 0 at the start. Samples are useful unless a crash has
            lost what was learned from them (see `UsefulSamples`).
        compute_used: Work / work that these machines could have done while they were on; 0 at
            the start. Choosing samples, preparing data and evaluating are work, too.
        node_seconds: Seconds for which machines were on, added up over all machines, those
            that do not train included.
    """

    goodput: float
    compute_used: float
    node_seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """Use of one machine; amounts of work are in training samples.

    Attributes:
        on: Seconds for which the machine was on.
        possible: Samples that it could have processed, outages included; 0 for a machine that
            does not train.
        available: The same without outages.
        worked: Work that it has done.
        useful: Useful samples.
    """

    on: Seconds
    possible: float = 0.0
    available: float = 0.0
    worked: float = 0.0
    useful: float = 0.0


def node_use(machines: Iterable[MachineUse]) -> NodeUse:
    """Sum up the use of all machines.

    >>> slow = MachineUse(on=9.0, possible=100.0, available=90.0, worked=90.0, useful=80.0)
    >>> node_use([slow, MachineUse(on=10.0)])
    NodeUse(goodput=0.8, compute_used=1.0, node_seconds=19.0)
    """
    each = [*machines]
    possible = sum(one.possible for one in each)
    available = sum(one.available for one in each)
    return NodeUse(
        goodput=sum(one.useful for one in each) / possible if possible else 0.0,
        compute_used=sum(one.worked for one in each) / available if available else 0.0,
        node_seconds=sum(one.on for one in each),
    )


@dataclass(slots=True)
class UsefulSamples:
    """Counts the samples of one worker whose results no crash of this worker has lost.

    A crash loses what the worker has learned since its last message that had left by then. With
    a server, work that the server loses is not subtracted.

    Attributes:
        total: Samples so far that are not lost.
        safe: Those of them whose results have left the worker.
        leaving: For each message that may still be leaving, the time at which it has left, and
            the samples that are safe then; ascending.

    >>> useful = UsefulSamples()
    >>> useful.train(8)
    >>> useful.send(now=1.0, end=2.0)
    >>> useful.train(4)
    >>> useful.crash(now=3.0)
    >>> useful.total
    8.0
    """

    total: float = 0.0
    safe: float = 0.0
    leaving: list[tuple[Seconds, float]] = field(default_factory=list)

    def train(self, num_samples: float) -> None:
        """Count samples of a training that has ended."""
        self.total += num_samples

    def send(self, now: Seconds, end: Seconds) -> None:
        """Note a message, handed over at `now`, that will have left at `end`."""
        newest = self.leaving[-1][1] if self.leaving else self.safe
        # The first message after a training suffices: later ones leave later.
        if self.total > newest:
            self._settle(now)
            self.leaving.append((end, self.total))

    def crash(self, now: Seconds) -> None:
        """Subtract the samples whose results are lost in a crash at `now`."""
        self._settle(now)
        self.total, self.leaving = self.safe, []

    def copy(self) -> UsefulSamples:
        """Return a copy that does not change with this one."""
        return replace(self, leaving=[*self.leaving])

    def _settle(self, now: Seconds) -> None:
        # From the front: on a slow uplink, thousands of messages may wait.
        while self.leaving and self.leaving[0][0] <= now:
            _, self.safe = self.leaving.pop(0)
