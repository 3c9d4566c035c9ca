"""Workers that are killed, stopped and started again, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from tests.transports import OverZenoh

from edgegossip.contract.protocol import Rank
from edgegossip.net.transport import Incarnation

pytestmark = pytest.mark.slow

LEASE = 1.5
NOTICED_WITHIN = 2 * LEASE


class Processes(OverZenoh):
    """Some ends are in this process, others in processes of their own."""

    lease = LEASE

    def __init__(self) -> None:
        super().__init__()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, rank: Rank, incarnation: Incarnation) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.transport_process"),
                *(str(LEASE), str(rank), str(incarnation), *self.endpoints),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        # Its imports may take half a minute on a busy machine, which no test is to measure.
        assert lines(process, 1) == ["ready"]
        return process

    def close(self) -> None:
        super().close()
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def network() -> Iterator[Processes]:
    network = Processes()
    yield network
    network.close()


def lines(process: subprocess.Popen[str], number: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(number)]


def test_a_killed_worker_is_missed_and_found_again_when_it_is_restarted(
    network: Processes,
) -> None:
    # Rank 0 is whom the others call, and so the one whose return is hard to notice.
    a = network.open(1)
    process = network.start(0, 100)
    assert a.events.next(30.0) == ("appeared", 0, 100)
    a.send(0, bytes(1_000_000))
    assert lines(process, 2) == ["appeared 1 101", "received 1 1000000"]

    process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    assert a.events.next() == ("disappeared", 0, 100)
    assert time.monotonic() - began < NOTICED_WITHIN
    a.send(0, bytes(50_000_000))

    process = network.start(0, 200)
    assert a.events.next(30.0) == ("appeared", 0, 200)
    a.send(0, b"hello")
    assert lines(process, 2) == ["appeared 1 101", "received 1 5"]


def test_a_stopped_worker_holds_up_nobody_else_and_is_missed_and_found_again(
    network: Processes,
) -> None:
    a, b = network.open(0), network.open(1)
    assert a.events.next() == ("appeared", 1, 101)
    process = network.start(2, 102)
    assert a.events.next(30.0) == ("appeared", 2, 102)

    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    thread = threading.Thread(target=a.send, args=(2, bytes(100_000_000)))
    thread.start()
    while time.monotonic() < began + 1.5:
        a.send(1, bytes(100_000))
        time.sleep(0.02)
    assert thread.is_alive()
    a.send(1, b"last")
    waits = time.monotonic()
    b.events.until(("received", 0, b"last"))
    assert time.monotonic() - waits < 0.5
    assert a.events.next() == ("disappeared", 2, 102)
    assert time.monotonic() - began < NOTICED_WITHIN
    thread.join(1.0)
    assert not thread.is_alive()

    process.send_signal(signal.SIGCONT)
    assert a.events.next() == ("appeared", 2, 102)
    a.send(2, b"hello")
    while (line := lines(process, 1)[0]) != "received 0 5":
        assert line.startswith(("appeared", "disappeared"))


def test_closing_does_not_wait_long_for_a_stopped_worker(network: Processes) -> None:
    a = network.open(0)
    process = network.start(1, 101)
    assert a.events.next(30.0) == ("appeared", 1, 101)
    process.send_signal(signal.SIGSTOP)
    thread = threading.Thread(target=a.send, args=(1, bytes(100_000_000)))
    thread.start()
    time.sleep(0.2)
    began = time.monotonic()
    a.transport.close()
    thread.join()
    assert time.monotonic() - began < 2 * NOTICED_WITHIN


def test_what_a_process_sends_before_it_ends_arrives(network: Processes) -> None:
    a = network.open(0)
    process = network.start(1, 101)
    assert a.events.next(30.0) == ("appeared", 1, 101)
    assert lines(process, 1) == ["appeared 0 100"]
    process.communicate("".join(f"send 0 {size}\n" for size in (30_000_000, 10, 5_000_000)))
    assert process.returncode == 0
    events = a.events.take(4)
    assert [(what[0], len(what[2])) for what in events[:3]] == [
        ("received", 30_000_000),
        ("received", 10),
        ("received", 5_000_000),
    ]
    assert events[3] == ("disappeared", 1, 101)
