"""The lab keeps its promises: speeds, links, cuts, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lab.lab import GOODPUT, HostSpec, Lab, Process
from lab.machine import LabError
from lab.network import Network
from lab.relay import Shape

from lab import machine

pytestmark = pytest.mark.slow
MBIT = 1e6 / 8

ECHO = """
import socket
server = socket.create_server(("", 9000))
print("ready", flush=True)
while True:
    connection = server.accept()[0]
    for got in iter(lambda: connection.recv(64), b""):
        connection.sendall(got)
"""
ASK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 9000), timeout=3)
times = []
for _ in range(5):  # the machine may be busy
    started = time.perf_counter()
    connection.sendall(b"x")
    assert connection.recv(64) == b"x"
    times.append(time.perf_counter() - started)
print(min(times))
"""
SINK = """
import socket, time
server = socket.create_server(("", 9000))
print("ready", flush=True)
connection, got, buffer = server.accept()[0], 0, bytearray(1 << 20)
while got < 200_000:  # the burst that may pass at once is over
    got += connection.recv_into(buffer)
started, first = time.perf_counter(), got
while num_bytes := connection.recv_into(buffer):
    got, ended = got + num_bytes, time.perf_counter()
print((got - first) / (ended - started))
"""
SOURCE = """
import socket, sys
socket.create_connection((sys.argv[1], 9000)).sendall(bytes(int(sys.argv[2])))
"""
SPIN = """
import time
used, started = time.process_time(), time.perf_counter()
while time.perf_counter() < started + 2:
    pass
print((time.process_time() - used) / (time.perf_counter() - started))
"""


CHILDREN: list[Process] = []


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if lacks := machine.missing():
        pytest.skip(f"no lab here: {'; '.join(lacks)}")


@pytest.fixture(autouse=True)
def _leaves_nothing(_possible: None) -> Iterator[None]:
    before = _links()
    yield
    while CHILDREN:
        with CHILDREN.pop():  # closes its pipe, and waits
            pass
    assert _remains() == []
    assert _links() == before


def _links() -> str:
    return machine.call("ip", "-o", "link")


def _remains() -> list[str]:
    root = machine.cgroup_root()
    assert root is not None
    groups = [path.name for path in root.glob(f"{machine.PREFIX}-*")]
    return machine.namespaces() + groups


def _python(lab: Lab, host: int, code: str, *arguments: object) -> Process:
    words = [sys.executable, "-c", code, *map(str, arguments)]
    CHILDREN.append(lab.start(host, words, output=subprocess.PIPE))
    return CHILDREN[-1]


def _serve(lab: Lab, host: int, code: str) -> Process:
    server = _python(lab, host, code)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return server


def _ask(lab: Lab, host: int, other: int) -> str | None:
    """Seconds that the quickest answer took, or nothing where none came."""
    child = _python(lab, host, ASK, lab.addresses[other])
    said = child.communicate()[0].decode()
    assert child.returncode == 0 or "TimeoutError" in said or "No route" in said
    return said if child.returncode == 0 else None


@pytest.mark.parametrize(
    ("sender", "receiver", "slowest"),
    [(100, None, 100), (None, 100, 100), (20, 50, 20), (100, 20, 20)],
)
def test_links_carry_what_they_are_given(
    sender: float | None, receiver: float | None, slowest: float
) -> None:
    hosts = [
        HostSpec(bandwidth=None if mbit is None else mbit * MBIT) for mbit in (sender, receiver)
    ]
    with Lab(hosts) as lab:
        sink = _serve(lab, 1, SINK)
        _python(lab, 0, SOURCE, lab.addresses[1], round(1.5 * slowest * MBIT))
        rate = float(sink.communicate()[0])
        sent, received = lab.traffic(0)[0], lab.traffic(1)[1]
    assert rate == pytest.approx(slowest * MBIT * GOODPUT, rel=0.05)
    assert all(1 <= num_bytes / (1.5 * slowest * MBIT) < 1.3 for num_bytes in (sent, received))


def test_processes_of_a_host_get_their_share_of_the_processor_together() -> None:
    with Lab([HostSpec(cpu=0.15), HostSpec(cpu=0.6)]) as lab:
        spinning = [_python(lab, host, SPIN) for host in (0, 1, 1)]
        shares = [float(child.communicate()[0]) for child in spinning]
    assert shares[0] == pytest.approx(0.15, rel=0.05)
    assert shares[1] + shares[2] == pytest.approx(0.6, rel=0.05)


def test_latency_is_what_was_asked_for() -> None:
    with Lab([HostSpec(latency=0.02), HostSpec(latency=0.005, bandwidth=1e6)]) as lab:
        _serve(lab, 1, ECHO)
        answer = _ask(lab, 0, 1)
    assert answer is not None
    assert float(answer) == pytest.approx(0.05, abs=0.005)


def test_relays_carry_what_the_link_does() -> None:
    with Lab([HostSpec(latency=0.002, bandwidth=50 * MBIT), HostSpec()]) as lab:
        sink = _serve(lab, 1, SINK)
        _python(lab, 0, SOURCE, lab.addresses[1], round(2 * 50 * MBIT))
        rate = float(sink.communicate()[0])
    assert rate == pytest.approx(50 * MBIT * GOODPUT, rel=0.05)


def test_a_relay_follows_a_trace_and_loses_frames() -> None:
    # 1.6 and 0 Mbit/s in turn, and TCP makes up for what is lost.
    shape = Shape(latency=0.002, out=(20_000, 0), loss=0.02)
    with Lab([HostSpec(shape=shape), HostSpec()]) as lab:
        sink = _serve(lab, 1, SINK)
        _python(lab, 0, SOURCE, lab.addresses[1], 300_000)
        rate = float(sink.communicate()[0])
    assert 0.6e5 < rate < 1e5 * GOODPUT * 1.05


def test_a_relay_is_down_at_times() -> None:
    before = time.monotonic()
    with Lab([HostSpec(shape=Shape(up=5.0, period=10.0)), HostSpec()]) as lab:
        _serve(lab, 0, ECHO)
        assert _ask(lab, 1, 0)
        time.sleep(max(0.0, before + 6.0 - time.monotonic()))
        assert _ask(lab, 1, 0) is None  # it waits for three seconds
        time.sleep(max(0.0, before + 11.0 - time.monotonic()))
        assert _ask(lab, 1, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"latency": 10}, r"latency must be in \[0, 10\) seconds, got 10"),
        ({"loss": 1}, r"loss must be in \[0, 1\), got 1"),
        ({"up": 2.0}, "up must be above 0 and at most period"),
        ({"out": (0, 0)}, "slots must not be negative, nor all 0"),
    ],
)
def test_shapes_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape(**values)


def test_cut_hosts_do_not_reach_each_other_until_mended() -> None:
    with Lab([HostSpec()] * 3) as lab:
        for host in (1, 2):
            _serve(lab, host, ECHO)
        assert _ask(lab, 0, 1)
        lab.cut(0, 1)
        lab.cut(0, 1)  # twice does no harm
        assert _ask(lab, 0, 1) is None
        assert _ask(lab, 0, 2)
        lab.mend()
        assert _ask(lab, 0, 1)


def test_groups_are_cut_from_each_other_and_not_within() -> None:
    with Lab([HostSpec()] * 4) as lab:
        for host in (1, 3):
            _serve(lab, host, ECHO)
        lab.cut([0, 1], [2, 3])
        assert _ask(lab, 0, 1)
        assert _ask(lab, 2, 3)
        assert _ask(lab, 0, 3) is None
        lab.mend([0, 1], [3])
        assert _ask(lab, 0, 3)
        assert _ask(lab, 2, 1) is None


def test_hosts_share_no_memory() -> None:
    with Lab([HostSpec()] * 2) as lab:
        assert lab.start(0, ["touch", "/dev/shm/here"]).wait() == 0
        assert lab.start(1, ["test", "-e", "/dev/shm/here"]).wait() == 1
        assert not Path("/dev/shm/here").exists()


def test_an_open_connection_survives_a_short_cut() -> None:
    say = "time.sleep(0.1); print('ready', flush=True); time.sleep(0.3); "
    code = ASK.replace("range(5)", "range(1)").replace("started =", f"{say}started =")
    with Lab([HostSpec()] * 2) as lab:
        _serve(lab, 1, ECHO)
        asking = _python(lab, 0, code, lab.addresses[1])
        assert asking.stdout is not None
        assert asking.stdout.readline() == b"ready\n"
        lab.cut(0, 1)
        time.sleep(1)
        assert asking.poll() is None  # it waits, and was told nothing
        lab.mend(0, 1)
        assert 0.5 < float(asking.communicate()[0]) < 3


def test_killed_hosts_have_no_process_left_and_can_be_restarted() -> None:
    with Lab([HostSpec()]) as lab:
        first = lab.start(0, ["sh", "-c", "setsid sleep 60 & sleep 60"])
        _await(lambda: len(lab.processes(0)) == 3)
        lab.kill(0)
        assert lab.processes(0) == []
        assert first.wait() == -signal.SIGKILL
        again = lab.restart(0)
        _await(lambda: len(lab.processes(0)) == 3)
        lab.kill(0, signal.SIGTERM)
        assert again.wait() == -signal.SIGTERM


def test_labs_side_by_side_do_not_meet() -> None:
    with Lab([HostSpec()]) as one, Lab([HostSpec()] * 2) as other:
        _serve(other, 0, ECHO)
        assert _ask(other, 1, 0)
        assert one.addresses[0] == other.addresses[0]
        one.start(0, ["true"]).wait()


def test_an_error_in_the_block_leaves_nothing() -> None:
    with pytest.raises(LabError, match="no host 7"), Lab([HostSpec(latency=0.001)]) as lab:
        lab.kill(7, _when_running(lab))


def test_a_half_made_lab_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Network, host: int, bandwidth: float) -> None:
        raise LabError("no")

    monkeypatch.setattr(Network, "limit", refuse)
    with pytest.raises(LabError, match="no"), Lab([HostSpec(), HostSpec(bandwidth=1e6)]):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_leaves_nothing(number: signal.Signals) -> None:
    child = _run(["--hosts", "2"], ["sleep", "60"])
    _await(lambda: len(machine.namespaces()) == 3)
    child.send_signal(number)
    child.communicate(timeout=20)
    assert child.returncode == 128 + number


def test_the_next_lab_removes_what_a_killed_one_left() -> None:
    child = _run(["--hosts", "2"], ["sh", "-c", "echo up; sleep 60"])
    assert child.stdout is not None
    child.stdout.readline()
    child.kill()
    child.communicate()
    assert len(_remains()) == 4
    with Lab([HostSpec()]) as lab:
        assert len(_remains()) == 3
        assert len(lab.processes(0)) == 0


def test_command_line_fills_in_ranks_and_addresses_and_carries_out_faults() -> None:
    options = [
        "--hosts",
        "2",
        "--cpu",
        "0.5",
        "0.2",
        "--at",
        "0.5 kill 1",
        "--at",
        "1 restart 1",
    ]
    command = ["sh", "-c", "echo {rank} {address} {address0}; sleep 2; echo done"]
    child = _run(options, command)
    lines = sorted(child.communicate(timeout=20)[0].decode().splitlines())
    assert child.returncode == 0
    assert [line for line in lines if line[1] in "01"] == [
        "[0] 0 10.77.0.1 10.77.0.1",
        "[0] done",
        "[1] 1 10.77.0.2 10.77.0.1",
        "[1] 1 10.77.0.2 10.77.0.1",
        "[1] done",
    ]


def test_command_line_says_where_the_command_failed() -> None:
    child = _run(["--hosts", "2"], ["sh", "-c", "exit {rank}"])
    assert b"failed on hosts [1]" in child.communicate(timeout=20)[0]
    assert child.returncode == 1


def _when_running(lab: Lab) -> signal.Signals:
    lab.start(0, ["sleep", "60"])
    return signal.SIGKILL


def _run(options: Sequence[str], command: Sequence[str]) -> Process:
    child = subprocess.Popen(
        [sys.executable, "-m", "lab.run", *options, "--", *command],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    CHILDREN.append(child)
    return child


def _await(condition: object, patience: float = 10.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
