"""The load on a machine from everything but training: the U that a monitor measures."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contention:
    """Use of a machine's resources by everything except training.

    Args:
        cores: Used share of the cores available to this process, in [0, 1]; includes time that
            a hypervisor gave to other machines, but no waiting for disks.
        network: Bytes per second, both ways on all cards but loopback, at least 0.
        disk: Bytes per second, read and written, at least 0; without reads from the page cache.

    Raises:
        ValueError: If a number is out of range.
    """

    cores: float = 0.0
    network: float = 0.0
    disk: float = 0.0

    def __post_init__(self) -> None:
        is_finite = self.network < math.inf and self.disk < math.inf
        if not (0 <= self.cores <= 1 and self.network >= 0 and self.disk >= 0 and is_finite):
            raise ValueError(f"cores must be in [0, 1], the others finite and >= 0, got {self}")
