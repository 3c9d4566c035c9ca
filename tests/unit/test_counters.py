"""Counters of the actual machine and process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from edgegossip.machine.counters import SystemCounters

BUSY = "import time\nwhile time.process_time() < 0.12: pass\nprint(flush=True)\ninput()"


def test_our_own_work_counts_as_ours() -> None:
    counters = SystemCounters()
    before = counters.read()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    after = counters.read()
    assert after.own.cores - before.own.cores == pytest.approx(0.1, abs=0.05)
    # All of it is in the count of the machine, which ticks in hundredths of a second.
    assert after.machine.cores - before.machine.cores > 0.05


def test_totals_never_exceed_what_the_cores_can_do() -> None:
    counters = SystemCounters()
    start, before = time.monotonic(), counters.read()
    time.sleep(0.05)
    after, seconds = counters.read(), time.monotonic() - start
    used = after.machine.cores - before.machine.cores
    assert 0 <= used <= counters.num_cores * (seconds + 0.05)
    assert 0 < counters.quota <= counters.num_cores


def test_children_count_as_ours_while_they_run_and_after() -> None:
    command = [sys.executable, "-S", "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        counters = SystemCounters()
        alive = counters.read().own.cores
        without = sum(psutil.Process().cpu_times()[:4])
        assert alive - without > 0.08
        child.communicate(b"\n")
    assert counters.read().own.cores == pytest.approx(alive, abs=0.05)


def test_named_processes_count_as_ours_wherever_they_come_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [])
    command = [sys.executable, "-S", "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        counters = SystemCounters(own_processes=[other.pid])
        without = SystemCounters().read().own.cores
        assert counters.read().own.cores - without > 0.08
        other.communicate(b"\n")
    counters = SystemCounters(own_processes=[other.pid])  # it has ended
    assert counters.read().own.cores > 0


def test_the_host_says_what_its_transport_sent() -> None:
    counters = SystemCounters(own_network_bytes=lambda: 1234.0)
    assert counters.read().own.network == 1234.0


def test_loopback_is_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def traffic(pernic: bool) -> dict[str, object]:
        assert pernic
        return {name: _Traffic(10, 20) for name in ("lo", "eth0", "wlan0")}

    monkeypatch.setattr(psutil, "net_io_counters", traffic)
    stats = {"lo": _Card("up,loopback,running"), "eth0": _Card("up,broadcast")}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    assert SystemCounters().read().machine.network == 60


def test_a_core_that_is_switched_off_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = SystemCounters()
    few = psutil.cpu_times(percpu=True)[:-1]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: few)
    assert counters.read().machine.cores >= 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_only_cores_that_we_may_use_count() -> None:
    everything = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everything)})
    try:
        assert SystemCounters().num_cores == 1
    finally:
        os.sched_setaffinity(0, everything)
    assert SystemCounters().num_cores == len(everything)


class _Traffic:
    def __init__(self, sent: int, received: int) -> None:
        self.bytes_sent, self.bytes_recv = sent, received


class _Card:
    def __init__(self, flags: str) -> None:
        self.flags = flags
