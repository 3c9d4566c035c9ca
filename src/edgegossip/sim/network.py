"""How long a message takes from one worker to another, and whether it arrives at all."""

from __future__ import annotations

from dataclasses import dataclass

from edgegossip.core.protocol import Rank, Seconds
from edgegossip.core.randomness import uniform
from edgegossip.sim.fault import Faults, applies
from edgegossip.sim.link import Links


@dataclass(slots=True)
class Transfer:
    """One message on its way: its uplink carries it from `start` to `end`."""

    start: Seconds
    end: Seconds
    arrival: Seconds
    is_dropped: bool


class Network:
    """Links and their faults.

    Args:
        links: Latencies and bandwidths.
        faults: Which messages are dropped or delayed.
    """

    def __init__(self, links: Links, faults: Faults) -> None:
        self._links = links
        self._seed = faults.seed
        self._drops, self._delays = faults.drops, faults.delays

    def transfer(
        self,
        now: Seconds,
        uplink_free: Seconds,
        sender: Rank,
        receiver: Rank,
        num_bytes: int,
        serial: int,
    ) -> Transfer:
        """Carry `num_bytes` as soon as the uplink is free; `serial` names the message."""
        link = self._links.link(sender, receiver)
        start = max(now, uplink_free)
        end = start + num_bytes / link.bandwidth
        arrival = end + link.latency
        if not (self._drops or self._delays):
            return Transfer(start, end, arrival, False)
        is_dropped = any(
            applies(drop, now, sender, receiver)
            and uniform(self._seed, "drop", k, serial) < drop.probability
            for k, drop in enumerate(self._drops)
        )
        delay = sum(
            delay.seconds * uniform(self._seed, "delay", k, serial)
            for k, delay in enumerate(self._delays)
            if applies(delay, now, sender, receiver)
        )
        return Transfer(start, end, arrival + delay, is_dropped)
