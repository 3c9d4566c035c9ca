"""Energy by a stated model: watts of machines that work or idle, and joules per byte sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_range

IDLE_WATTS: Final = 2.7
"""Default power of an idle machine: a Raspberry Pi 4 B, booted and without load
(https://www.pidramble.com/wiki/benchmarks/power-consumption)."""
BUSY_WATTS: Final = 6.4
"""Default power of a machine that works: the same board with all four cores loaded (ibid.)."""
JOULES_PER_BYTE: Final = 5e-6
"""Default energy per byte over a link: two ends with Wi-Fi.

A phone took 2.2 microjoules to receive a byte at 5 Mbit/s
(http://mobiledevices.kom.aau.dk/research/energy_measurements_on_mobile_phones). That sending
takes about as much is our assumption."""
OMIT_DEFAULT: Final[Mapping[str, Any]] = {"omits_default": True}
"""Metadata of a dataclass field that a description of the object omits at its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Joules that a run has taken so far, by cause.

    Attributes:
        busy: Joules of machines while they work, their idle power included.
        idle: Joules of machines that are on and do not work: they wait, only send or receive,
            or have finished.
        links: Joules of transmission: bytes sent x joules per byte.

    >>> Energy(busy=3.0, idle=2.0, links=0.5).total
    5.5
    """

    busy: float = 0.0
    idle: float = 0.0
    links: float = 0.0

    @property
    def total(self) -> float:
        """All joules."""
        return self.busy + self.idle + self.links

    def __add__(self, other: Energy) -> Energy:
        return Energy(
            busy=self.busy + other.busy,
            idle=self.idle + other.idle,
            links=self.links + other.links,
        )


def machine_energy(
    idle_watts: float, busy_watts: float, *, on: Seconds, busy: Seconds
) -> Energy:
    """Energy of one machine, without its links.

    Args:
        idle_watts: Power while it is on and does not work.
        busy_watts: Power while it works.
        on: Seconds for which it was on.
        busy: Seconds of these for which it worked.

    >>> machine_energy(2.0, 6.0, on=10.0, busy=4.0)
    Energy(busy=24.0, idle=12.0, links=0.0)
    """
    # The two are sums of the same spans in different orders, so they may differ by a hair.
    return Energy(busy=busy_watts * busy, idle=idle_watts * max(0.0, on - busy))


def check_watts(idle_watts: float, busy_watts: float) -> None:
    """Check the powers of a machine.

    Raises:
        ValueError: If a power is negative or not finite, or a busy machine takes less than an
            idle one.
    """
    check_range("idle_watts", idle_watts, "in [0, inf) W")
    check_range("busy_watts", busy_watts, "in [0, inf) W")
    if busy_watts < idle_watts:
        raise ValueError(
            f"busy_watts must be at least idle_watts, got {busy_watts!r} and {idle_watts!r}; "
            "give the power of the whole machine for both"
        )
