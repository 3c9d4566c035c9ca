"""Links between workers: latency and bandwidth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgegossip.core.protocol import Rank, Seconds
from edgegossip.core.ranges import check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a connection.

    Args:
        latency: Seconds until the first byte arrives, at least 0.
        bandwidth: Bytes per second, above 0.

    Raises:
        ValueError: If a number is out of range.

    >>> Link(latency=0.01, bandwidth=1e6)
    Link(latency=0.01, bandwidth=1000000.0)
    """

    latency: Seconds = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        check_ranges(self, latency="in [0, inf) seconds", bandwidth="above 0 bytes/s")


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
