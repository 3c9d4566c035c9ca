"""Counters and a clock that say what a test wants."""

from __future__ import annotations

from edgegossip.machine.counters import Reading, Usage


def added(total: Usage, more: Usage) -> Usage:
    return Usage(total.cores + more.cores, total.network + more.network, total.disk + more.disk)


class Counted:
    """A machine on which time passes, and is used, when a test says so."""

    def __init__(
        self, num_cores: int = 2, quota: float | None = None, has_group: bool = False
    ) -> None:
        self.num_cores = num_cores
        self.quota = float(num_cores) if quota is None else quota
        self.now = 0.0
        self.is_broken = False
        self._has_group = has_group
        self._machine = Usage(1000.0, 1e9, 1e9)
        self._own = Usage(10.0, 1e6, 1e6)
        self._group = 100.0

    def clock(self) -> float:
        return self.now

    def pass_by(
        self,
        seconds: float,
        machine: Usage = Usage(),
        own: Usage = Usage(),
        group: float = 0.0,
    ) -> None:
        self.now += seconds
        self._machine = added(self._machine, machine)
        self._own = added(self._own, own)
        self._group += group

    def read(self) -> Reading:
        if self.is_broken:
            raise OSError("no /proc")
        return Reading(self._machine, self._own, self._group if self._has_group else None)
