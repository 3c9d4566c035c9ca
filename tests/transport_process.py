"""A worker's end of a network in a process of its own, which does what it reads from stdin.

Run as `python -m tests.transport_process LEASE RANK INCARNATION ENDPOINT...`. It prints "ready"
and what its listener is told, and understands "send RECEIVER NUM_BYTES" and, as end of input,
"close".
"""

from __future__ import annotations

import sys

from tests.transports import OverZenoh

from edgegossip.contract.codec import Buffer
from edgegossip.contract.protocol import Rank
from edgegossip.net.transport import Incarnation, Listener


class Printer(Listener):
    def received(self, sender: Rank, frame: Buffer) -> None:
        print("received", sender, len(frame), flush=True)

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        print("appeared", rank, incarnation, flush=True)

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None:
        print("disappeared", rank, incarnation, flush=True)

    def interrupted(self, rank: Rank, incarnation: Incarnation) -> None:
        print("interrupted", rank, incarnation, flush=True)

    def refused(self, rank: Rank | None, reason: str) -> None:
        print("refused", rank, reason, flush=True)


def main() -> None:
    lease, rank, incarnation, *endpoints = sys.argv[1:]
    network = OverZenoh(len(endpoints))
    network.endpoints, network.lease = endpoints, float(lease)
    transport = network.transport(int(rank), int(incarnation))
    print("ready", flush=True)
    transport.open(Printer())
    for line in sys.stdin:
        _, receiver, num_bytes = line.split()
        transport.send(int(receiver), [bytes(int(num_bytes))])
    transport.close()


if __name__ == "__main__":
    main()
