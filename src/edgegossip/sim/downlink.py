"""When messages that come together have passed their receiver's downlink."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from edgegossip.core.protocol import Seconds


@dataclass(slots=True)
class Downlink:
    """Bytes that wait at a downlink, and those still to come.

    Bytes pass as soon as they are there and the downlink is free; those of messages that began
    earlier go first. It never rests while bytes wait, so it is done with all of them when a
    real one is. TCP, though, shares it among the senders: then the last message ends at the
    same time, and the others later than here.

    Attributes:
        now: Until when bytes have come and passed.
        waiting: How many bytes are there that have not passed yet.
        flows: When the last byte of each message comes, in order, and how many come each
            second until then.

    >>> downlink = Downlink()
    >>> [downlink.receive(0.0, last=2.0, num_bytes=200, bandwidth=100.0) for _ in range(2)]
    [2.0, 4.0]
    """

    now: Seconds = 0.0
    waiting: float = 0.0
    flows: list[tuple[Seconds, float]] = field(default_factory=list)

    def receive(self, now: Seconds, last: Seconds, num_bytes: int, bandwidth: float) -> Seconds:
        """Begin with a message whose bytes come from `now` to `last`; say when all have passed.

        Messages that begin later do not change that time. `bandwidth` is in bytes/s.
        """
        self._advance(now, bandwidth)
        if last > now:
            flow = (last, num_bytes / (last - now))
            self.flows = sorted([*self.flows, flow])
        else:
            self.waiting += num_bytes
        return self._end(last, bandwidth)

    def _advance(self, until: Seconds, bandwidth: float) -> None:
        """Let bytes come and pass."""
        for end, surplus in self._spans(bandwidth):
            stop = min(end, until)
            self.waiting = max(0.0, self.waiting + surplus * (stop - self.now))
            self.now = stop
            if stop == until:
                break
        self.flows = [flow for flow in self.flows if flow[0] > until]

    def _end(self, last: Seconds, bandwidth: float) -> Seconds:
        """When nothing waits any more, from `last` on."""
        now, waiting = self.now, self.waiting
        for end, surplus in self._spans(bandwidth):
            if now >= last and waiting + surplus * (end - now) <= 0:
                break
            waiting = max(0.0, waiting + surplus * (end - now))
            now = end
        return now + waiting / -surplus if waiting else now

    def _spans(self, bandwidth: float) -> Iterator[tuple[Seconds, float]]:
        """Until when bytes come at one rate, and by how much more come then than pass."""
        rates = [rate for _, rate in reversed(self.flows)]
        inflows = reversed([*accumulate(rates)])
        for (last, _), inflow in zip(self.flows, inflows, strict=True):
            yield last, inflow - bandwidth
        yield math.inf, -bandwidth
