"""Links between workers: latency and bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_ranges
from edgegossip.machine.energy import JOULES_PER_BYTE, OMIT_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a connection.

    Args:
        latency: Seconds until the first byte arrives, at least 0.
        bandwidth: Bytes per second, above 0.
        joules_per_byte: Energy per byte sent, at both ends and between them, in addition to the
            idle power of the machines, at least 0; by default that of Wi-Fi (see
            `edgegossip.machine.energy`). The other direction is another link and may differ.

    Raises:
        ValueError: If a number is out of range.

    >>> Link(latency=0.01, bandwidth=1e6, joules_per_byte=0.0)
    Link(latency=0.01, bandwidth=1000000.0, joules_per_byte=0.0)
    """

    latency: Seconds = 0.0
    bandwidth: float = math.inf
    joules_per_byte: float = field(default=JOULES_PER_BYTE, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        check_ranges(self, latency="in [0, inf) seconds", bandwidth="above 0 bytes/s")
        check_ranges(self, joules_per_byte="in [0, inf) J")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """All links of a run.

    A single message takes ``latency + num_bytes / bandwidth``. The uplinks and downlinks that
    messages share belong to the workers' platforms. Messages from one worker to another arrive
    in the order of sending, unless a `Delay` or a crash of the receiver changes that order.

    Args:
        default: Link for all pairs without an override.
        overrides: Links by (sender, receiver); directions may differ.
    """

    default: Link = Link()
    overrides: Mapping[tuple[Rank, Rank], Link] = field(default_factory=dict)

    def link(self, sender: Rank, receiver: Rank) -> Link:
        """The link from `sender` to `receiver`."""
        if not self.overrides:
            return self.default
        return self.overrides.get((sender, receiver), self.default)


def without_durations(links: Links) -> Links:
    """Links that only state energy, for a run whose real links have durations of their own."""
    overrides = {
        pair: Link(joules_per_byte=link.joules_per_byte)
        for pair, link in links.overrides.items()
        if link.joules_per_byte != links.default.joules_per_byte
    }
    return Links(
        default=Link(joules_per_byte=links.default.joules_per_byte), overrides=overrides
    )


# Downlinks: the times at which simultaneous messages have arrived completely.


@dataclass(slots=True)
class Downlink:
    """Bytes that wait or arrive at a downlink.

    Bytes pass as soon as they have arrived and the downlink is free; earlier messages go first.
    The downlink is never idle while bytes wait, so the last message ends when it would on a
    real downlink. Earlier messages end later in reality, because TCP shares a downlink among
    the senders.

    Attributes:
        now: Time up to which bytes are accounted for.
        waiting: Number of waiting bytes.
        flows: For each message, in order, the arrival time of its last byte and its bytes per
            second until then.

    >>> downlink = Downlink()
    >>> [downlink.receive(0.0, last=2.0, num_bytes=200, bandwidth=100.0) for _ in range(2)]
    [2.0, 4.0]
    """

    now: Seconds = 0.0
    waiting: float = 0.0
    flows: list[tuple[Seconds, float]] = field(default_factory=list)

    def receive(self, now: Seconds, last: Seconds, num_bytes: int, bandwidth: float) -> Seconds:
        """Begin a message that arrives from `now` to `last`; return the time when it has
        passed.

        Messages that begin later do not change that time. `bandwidth` is in bytes/s.
        """
        self._advance(now, bandwidth)
        # A message without a duration, over an unlimited uplink, arrives as a whole.
        if last > now:
            flow = (last, num_bytes / (last - now))
            self.flows = sorted([*self.flows, flow])
        else:
            self.waiting += num_bytes
        return self._end(last, bandwidth)

    def _advance(self, until: Seconds, bandwidth: float) -> None:
        """Let bytes arrive and pass until the time `until`."""
        # Between two ends of flows, rates are constant, so the queue grows or shrinks linearly.
        for end, surplus in self._spans(bandwidth):
            stop = min(end, until)
            self.waiting = max(0.0, self.waiting + surplus * (stop - self.now))
            self.now = stop
            if stop == until:
                break
        self.flows = [flow for flow in self.flows if flow[0] > until]

    def _end(self, last: Seconds, bandwidth: float) -> Seconds:
        """The first time, not before `last`, at which no bytes wait."""
        # Looks ahead without changing the state: later messages queue behind this one, so the
        # answer is final.
        now, waiting = self.now, self.waiting
        for end, surplus in self._spans(bandwidth):
            if now >= last and waiting + surplus * (end - now) <= 0:
                break
            waiting = max(0.0, waiting + surplus * (end - now))
            now = end
        return now + waiting / -surplus if waiting else now

    def _spans(self, bandwidth: float) -> Iterator[tuple[Seconds, float]]:
        """Spans of constant arrival rate: the end of each, and its rate minus the bandwidth."""
        rates = [rate for _, rate in reversed(self.flows)]
        inflows = reversed([*accumulate(rates)])
        for (last, _), inflow in zip(self.flows, inflows, strict=True):
            yield last, inflow - bandwidth
        yield math.inf, -bandwidth
