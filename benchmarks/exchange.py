"""How long two processes take to exchange a float32 vector, both at once, and average it.

    python -m benchmarks.exchange           a table
    python -m benchmarks.exchange --json    one JSON object

Milliseconds on loopback, the median over repetitions in which the three take turns in random
order:

- ours: message, envelope with checksum, pieces, zenoh, all checks of what arrives;
- zenoh: a bare script with zenoh's own settings; the raw vector in pieces of 256 KiB,
  unchecked;
- gloo: `torch.distributed` isend and recv.

All average by the same call. The last two keep the buffer that they receive into; ours is a
new one each time, as it becomes the algorithm's own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.synchronize
import os
import queue
import statistics
import time
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
import torch
import torch.distributed
import zenoh
from benchmarks.kept import about
from torch import Tensor

from edgegossip.contract.protocol import Message, Rank
from edgegossip.contract.schema import MessageSpec, TensorSpec
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.net.address import Address
from edgegossip.net.guard.admission import Admission, Admitted
from edgegossip.net.guard.envelope import Envelope, pack
from edgegossip.net.transport import Incarnation, Listener
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.launch import free_ports

MEGABYTES = (0.25, 1.0, 10.0, 100.0)
PIECE = 256 * 1024
RUN = b"exchange"


class Exchange(Protocol):
    """One of two processes that exchange vectors."""

    def prepare(self, size: int) -> None:
        """Vectors of `size` numbers are next; not timed."""

    def swap(self, vector: Tensor) -> Tensor:
        """Send `vector`, and return the other's."""

    def close(self) -> None: ...


class Ours(Listener):
    """A listener that admits what arrives in the thread that waits for it, as the host does."""

    def __init__(self, rank: Rank, ports: list[int]) -> None:
        self._rank = rank
        self._number = 0
        self._frames: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[Incarnation] = queue.SimpleQueue()
        endpoints = [f"tcp/127.0.0.1:{port}" for port in ports]
        self._transport = ZenohTransport(
            run="exchange",
            rank=rank,
            num_workers=2,
            address=Address(listen=(endpoints[rank],), connect=tuple(endpoints[:rank])),
        )
        self._transport.open(self)
        self._arrivals.get()

    def received(self, sender: Rank, frame: memoryview) -> None:
        self._frames.put(frame)

    def appeared(self, rank: Rank, incarnation: Incarnation) -> None:
        self._arrivals.put(incarnation)

    def disappeared(self, rank: Rank, incarnation: Incarnation) -> None: ...

    def interrupted(self, rank: Rank, incarnation: Incarnation) -> None: ...

    def refused(self, rank: Rank | None, reason: str) -> None:
        raise AssertionError(reason)

    def prepare(self, size: int) -> None:
        self._admission = Admission(
            run=RUN,
            rank=self._rank,
            num_workers=2,
            schema={"params": MessageSpec({"params": TensorSpec(torch.float32, (size,))})},
        )

    def swap(self, vector: Tensor) -> Tensor:
        self._number += 1
        envelope = Envelope(RUN, self._rank, 1, 1, self._number)
        message = Message("params", self._number, {"params": vector})
        self._transport.send(1 - self._rank, pack(envelope, message))
        verdict = self._admission.admit(1 - self._rank, self._frames.get(), self._number)
        assert isinstance(verdict, Admitted), verdict
        return verdict.message.payload["params"]

    def close(self) -> None:
        self._transport.close()


class BareZenoh:
    def __init__(self, rank: Rank, ports: list[int]) -> None:
        config = zenoh.Config()
        listen, connect = (
            [f"tcp/127.0.0.1:{port}" for port in some] for some in ([ports[rank]], ports[:rank])
        )
        config.insert_json5("listen/endpoints", json.dumps(listen))
        config.insert_json5("connect/endpoints", json.dumps(connect))
        config.insert_json5("scouting/multicast/enabled", "false")
        self._session = zenoh.open(config)
        self._filled = 0
        self._is_full: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._buffer = np.empty(0, np.uint8)
        self._session.declare_subscriber(
            f"bare/{rank}", zenoh.handlers.Callback(self._take, indirect=False)
        )
        self._publisher = self._session.declare_publisher(
            f"bare/{1 - rank}",
            congestion_control=zenoh.CongestionControl.BLOCK,
            reliability=zenoh.Reliability.RELIABLE,
        )
        while not self._publisher.matching_status.matching:  # type: ignore[attr-defined]
            time.sleep(0.01)

    def _take(self, sample: zenoh.Sample) -> None:
        piece = sample.payload.to_bytes()
        self._buffer.data[self._filled : self._filled + len(piece)] = piece
        self._filled += len(piece)
        if self._filled == len(self._buffer):
            self._filled = 0
            self._is_full.put(None)

    def prepare(self, size: int) -> None:
        self._buffer = np.empty(4 * size, np.uint8)

    def swap(self, vector: Tensor) -> Tensor:
        self.send(vector)
        return self.receive()

    def send(self, vector: Tensor) -> None:
        raw = memoryview(vector.numpy()).cast("B")  # type: ignore[arg-type]
        for begin in range(0, len(raw), PIECE):
            self._publisher.put(bytes(raw[begin : begin + PIECE]))

    def receive(self) -> Tensor:
        self._is_full.get()
        return torch.from_numpy(self._buffer.view(np.float32))

    def close(self) -> None:
        self._session.close()  # type: ignore[no-untyped-call]


class Gloo:
    def __init__(self, rank: Rank, ports: list[int]) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=2
        )
        self._other = 1 - rank

    def prepare(self, size: int) -> None:
        self._buffer = torch.empty(size)

    def swap(self, vector: Tensor) -> Tensor:
        sending = torch.distributed.isend(vector, self._other)
        torch.distributed.recv(self._buffer, self._other)
        assert sending is not None
        sending.wait()
        return self._buffer

    def close(self) -> None:
        torch.distributed.destroy_process_group()


SYSTEMS: dict[str, type[Ours] | type[BareZenoh] | type[Gloo]] = {
    "ours": Ours,
    "zenoh": BareZenoh,
    "gloo": Gloo,
}


def work(
    rank: Rank,
    ports: list[int],
    repetitions: dict[float, int],
    barrier: multiprocessing.synchronize.Barrier,
    results: Connection,
) -> None:
    """Exchange all vectors; sends {megabytes: {system: [seconds]}}."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    systems: dict[str, Exchange] = {
        name: make(rank, ports[2 * number : 2 * number + 2])
        for number, (name, make) in enumerate(SYSTEMS.items())
    }
    measured: dict[float, dict[str, list[float]]] = {}
    order = np.random.default_rng(0)  # the same in both processes
    for megabytes, number in repetitions.items():
        vector = torch.full((int(megabytes * 1e6) // 4,), float(rank))
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for system in systems.values():
            system.prepare(len(vector))
        for _ in range(number + 1):
            # Whoever comes after gloo, whose threads linger, is slower.
            for name in order.permutation([*systems]):
                vector.fill_(float(rank))
                barrier.wait()
                began = time.perf_counter()
                vector.lerp_(systems[name].swap(vector), 0.5)
                seconds[name].append(time.perf_counter() - began)
                assert vector[0] == vector[-1] == 0.5
        measured[megabytes] = {name: each[1:] for name, each in seconds.items()}
    barrier.wait()
    for system in systems.values():
        system.close()
    results.send(measured)


def measure(repetitions: dict[float, int]) -> dict[float, dict[str, float]]:
    """Milliseconds by megabytes and system; of the two processes, the one that takes longer."""
    context = multiprocessing.get_context("spawn")
    barrier, ports = context.Barrier(2), free_ports(2 * len(SYSTEMS))
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=work, args=(rank, ports, repetitions, barrier, pipes[rank][1]))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    both = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join()
    return {
        megabytes: {
            name: 1e3
            * statistics.median(
                max(pair)
                for pair in zip(*(each[megabytes][name] for each in both), strict=True)
            )
            for name in SYSTEMS
        }
        for megabytes in repetitions
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=float, default=30.0, help="about how long to measure")
    arguments = parser.parse_args()
    origin = about(arguments)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # for the processes to come
    # A fourth of the time each; 1.5 ns a byte and system, and 1 ms.
    repetitions = {
        size: max(5, int(arguments.seconds / 4 / 3 / (1e-3 + 1.5e-3 * size)))
        for size in MEGABYTES
    }
    measured = measure(repetitions)
    rows = [
        {"megabytes": size, **row, "ratio": row["zenoh"] / row["ours"]}
        for size, row in measured.items()
    ]
    if arguments.json:
        print(json.dumps({**origin, "unit": "ms", "exchange": rows}))
        return
    print("      MB    ours   zenoh    gloo  zenoh/ours  gloo/ours")
    for row in rows:
        gloo = row["gloo"] / row["ours"]
        print(
            f"{row['megabytes']:8g}{row['ours']:8.2f}{row['zenoh']:8.2f}{row['gloo']:8.2f}"
            f"{row['ratio']:12.2f}{gloo:11.2f}"
        )


if __name__ == "__main__":
    main()
