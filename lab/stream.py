"""One end of messages from many hosts to host 0, over the transport of real workers.

    python -m lab.stream --rank R --at S1 S2 ... --size BYTES --go FILE --addresses A0 A1 ...

Says "ready" when all links are open, and waits until FILE names a time of day. `--at` has the
seconds after it at which hosts 1, 2, ... send. Host 0 prints "times" and the seconds at which
each message was there, in a list by sender, and ends when it has them all; the others wait to
be killed.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from edgegossip.contract.protocol import Rank
from edgegossip.net.address import Address
from edgegossip.net.transport import Incarnation, Listener
from edgegossip.net.zenoh.transport import ZenohTransport

LEASE = 10.0
"""Seconds: a link that shares 20 Mbit/s with others must not be given up for being slow."""


class Arrivals(Listener):
    """A listener that counts who is there and times what comes."""

    def __init__(self) -> None:
        self.appearances = threading.Semaphore(0)
        self.messages: queue.SimpleQueue[tuple[Rank, float]] = queue.SimpleQueue()

    def received(self, sender: Rank, frame: memoryview) -> None:
        self.messages.put((sender, time.time()))

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        self.appearances.release()

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None:
        raise RuntimeError(f"lost host {rank}")

    def interrupted(self, rank: Rank, incarnation: Incarnation) -> None:
        raise RuntimeError(f"lost messages to host {rank}")

    def refused(self, rank: Rank | None, reason: str) -> None:
        raise RuntimeError(f"refused what {rank} sent: {reason}")


def wait_for_go(go: Path) -> float:
    """When all begin."""
    print("ready", flush=True)
    while not (go.exists() and (text := go.read_text())):
        time.sleep(0.01)
    return float(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--at", type=float, nargs="+", required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--go", type=Path, required=True)
    parser.add_argument("--addresses", nargs="+", required=True)
    options = parser.parse_args(arguments)
    rank, endpoints = options.rank, [f"tcp/{each}:7447" for each in options.addresses]
    others = tuple(each for each in endpoints if each != endpoints[rank])
    transport = ZenohTransport(
        run="stream",
        rank=rank,
        num_workers=len(endpoints),
        address=Address(listen=(endpoints[rank],), connect=others),
        insecure=True,
        lease=LEASE,
    )
    arrivals = Arrivals()
    transport.open(arrivals)
    for _ in others:
        arrivals.appearances.acquire()
    began = wait_for_go(options.go)
    if rank:
        time.sleep(max(0.0, began + options.at[rank - 1] - time.time()))
        transport.send(0, [bytes(options.size)])
        time.sleep(3600)
    times = dict(arrivals.messages.get() for _ in others)
    seconds = [times[sender] - began for sender in sorted(times)]
    print(f"times {json.dumps(seconds)}", flush=True)


if __name__ == "__main__":
    main()
