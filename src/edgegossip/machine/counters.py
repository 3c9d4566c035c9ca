"""Processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from edgegossip.contract.protocol import Seconds
from edgegossip.machine.quota import find_quota


def is_running(process: int) -> bool:
    """Whether a process exists and is not a zombie, regardless of its parent."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_descendants(process: int) -> None:
    """Kill all processes that `process` has started, and theirs."""
    with suppress(psutil.NoSuchProcess):
        for each in psutil.Process(process).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                each.kill()


# System counters: the total use of this machine, and our own share of it.


_READINGS_PER_LOOK = 10
"""Readings between two searches for our descendant processes; a search takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals since an arbitrary moment.

    Attributes:
        cores: Core-seconds.
        network: Bytes sent and received.
        disk: Bytes read and written.
    """

    cores: Seconds = 0.0
    network: float = 0.0
    disk: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A simultaneous reading of all counters.

    Attributes:
        machine: Total use, on the cores that we may use.
        own: Our own use.
        group: Core-seconds used by all processes under our quota; None without a quota.
    """

    machine: Usage
    own: Usage
    group: Seconds | None = None


class Counters(Protocol):
    """Counters for a monitor; `SystemCounters` reads this machine's.

    Attributes:
        num_cores: Number of cores that we may use.
        quota: Core-seconds per second that our quota allows, at most `num_cores`; without a
            quota, `num_cores`.
    """

    num_cores: int
    quota: float

    def read(self) -> Reading:
        """Current totals."""


class SystemCounters:
    """The counters of this machine and of our own process tree, from psutil.

    Only cores that this process may use count. Time that a hypervisor gave to other machines
    counts as used. Traffic within the machine (loopback) is excluded: it occupies no link, and
    its processor time is counted already.

    Args:
        own_network_bytes: Returns the bytes that we have sent and received, without loopback.
            Operating systems do not count traffic by process, so the code that sends and
            receives must report it.
        own_processes: IDs of processes outside our process tree that are also ours.
    """

    def __init__(
        self,
        own_network_bytes: Callable[[], float] = lambda: 0.0,
        own_processes: Sequence[int] = (),
    ) -> None:
        self._own_network_bytes = own_network_bytes
        self._own_processes = tuple(own_processes)
        self._process = psutil.Process()
        self._cores = _allowed_cores(self._process)
        self._quota = find_quota()
        self.num_cores = len(self._cores)
        limit = self.num_cores if self._quota is None else self._quota.cores
        self.quota = min(float(self.num_cores), limit)
        self._descendants: list[Any] = []
        self._num_readings = 0

    def read(self) -> Reading:
        # Our own counters last: what we use between the readings would otherwise count as use
        # by others.
        machine = Usage(self._busy(), _traffic(), _disk_traffic())
        group = None if self._quota is None else self._quota.used()
        return Reading(machine, self._own(), group)

    def _busy(self) -> Seconds:
        times = psutil.cpu_times(percpu=True)
        kinds = ("user", "nice", "system", "irq", "softirq", "steal", "interrupt", "dpc")
        return sum(
            sum(getattr(times[core], kind, 0.0) for kind in kinds)
            for core in self._cores
            if core < len(times)  # a core may have been switched off since
        )

    def _others(self) -> list[Any]:
        """Our processes beside this one."""
        found = self._process.children(recursive=True)
        known = {each.pid for each in found}
        for process_id in self._own_processes:
            with suppress(psutil.Error):  # it may have ended
                if process_id not in known:
                    found.append(psutil.Process(process_id))
        return found

    def _own(self) -> Usage:
        if self._num_readings % _READINGS_PER_LOOK == 0:
            self._descendants = self._others()
        self._num_readings += 1
        cores = disk = 0.0
        for process in (self._process, *self._descendants):
            # One that has ended is in the count of the parent that waited for it.
            with suppress(psutil.Error):
                cores += sum(process.cpu_times()[:4])
            with suppress(psutil.Error, AttributeError):  # macOS counts no bytes
                counts = process.io_counters()
                disk += counts.read_bytes + counts.write_bytes
        return Usage(cores, self._own_network_bytes(), disk)


def _allowed_cores(process: Any) -> list[int]:  # noqa: ANN401
    everything = list(range(len(psutil.cpu_times(percpu=True))))
    with suppress(AttributeError, psutil.Error):  # macOS knows no affinity
        allowed = set(process.cpu_affinity())
        # Counters of cores that are switched off are missing, and the others move up.
        if allowed < set(everything):
            return sorted(allowed)
    return everything


def _traffic() -> float:
    flags = {card: getattr(stats, "flags", "") for card, stats in psutil.net_if_stats().items()}
    return float(
        sum(
            counts.bytes_sent + counts.bytes_recv
            for card, counts in psutil.net_io_counters(pernic=True).items()
            if "loopback" not in flags.get(card, "").split(",")
        )
    )


def _disk_traffic() -> float:
    counts = psutil.disk_io_counters()
    # None on a machine without disks.
    return 0.0 if counts is None else float(counts.read_bytes + counts.write_bytes)
