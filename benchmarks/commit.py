"""How long a commit to a parameter server takes, beside bare scripts that move as many bytes.

    python -m benchmarks.commit           a table
    python -m benchmarks.commit --json    one JSON object

A commit is a vector to the server and the model in return, over loopback: `ASP` with one worker
whose training takes no time, in two processes with all that a run has (admission, account of
messages, statuses). Two bare scripts over zenoh stand beside it (`benchmarks/exchange.py`):

- two exchanges: both ends send at once, twice;
- ping-pong: vector there, sum, vector back, one after the other as in a commit.

The three take turns. A turn's number is the median over its repetitions, without those in which
the heap still grows; milliseconds and ratios are medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.synchronize
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.connection import Connection

import torch
from benchmarks.exchange import BareZenoh
from benchmarks.kept import about
from torch import Tensor, nn

from edgegossip.algorithms.server.methods import ASP
from edgegossip.algorithms.server.worker import SERVER
from edgegossip.contract.protocol import Rank
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.net.address import Address
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.launch import free_ports
from edgegossip.real.training_loop import TrainingLoop

TURNS = 7
NUM_TIMED = 100
NUM_UNTIMED = 100
"""So long memory is taken from the system, in pages that are empty at first."""


class Model(nn.Module):
    """A vector of `megabytes` that nobody trains."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(int(megabytes * 1e6 / 4)))


def commits(rank: Rank, megabytes: float, ports: list[int], turn: int) -> list[float]:
    """Take part in a run; returns when the worker's commits were answered."""
    endpoints = [f"tcp/127.0.0.1:{port}" for port in ports]
    transport = ZenohTransport(
        run=f"commit-{turn}",
        rank=rank,
        num_workers=2,
        address=Address(listen=(endpoints[rank],), connect=tuple(endpoints[:rank])),
    )
    algorithm = ASP(num_workers=1, num_rounds=NUM_UNTIMED + NUM_TIMED)
    loop = TrainingLoop(
        Model(megabytes), algorithm, rank, 2, transport, num_samples=1, name="commit"
    )
    times = []
    with loop:
        while not loop.is_over:
            loop.step(0.0, num_samples=1)
            times.append(time.perf_counter())
    return times


def exchanges(system: BareZenoh, vector: Tensor) -> list[float]:
    """Swap vectors and average them; returns when each was."""
    times = []
    for _ in range(NUM_UNTIMED + NUM_TIMED):
        vector = (vector + system.swap(vector)).div_(2)
        times.append(time.perf_counter())
    return times


def ping_pongs(system: BareZenoh, rank: Rank, vector: Tensor) -> list[float]:
    """Have vectors added up by rank 0; returns when each sum was there."""
    times = []
    for _ in range(NUM_UNTIMED + NUM_TIMED):
        if rank == SERVER:
            vector = vector + system.receive()
            system.send(vector)
        else:
            system.send(vector)
            vector = system.receive().clone()
        times.append(time.perf_counter())
    return times


def seconds(times: Sequence[float]) -> float:
    """The median time between two of the later `times`; 0 where there are none."""
    return statistics.median([b - a for a, b in pairwise(times)][NUM_UNTIMED:] or [0.0])


def work(
    rank: Rank,
    megabytes: float,
    ports: list[int],
    barrier: multiprocessing.synchronize.Barrier,
    results: Connection,
) -> None:
    """Take turns; sends the seconds of each commit and each exchange."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    bare = BareZenoh(rank, ports[:2])
    vector = torch.zeros(int(megabytes * 1e6 / 4))
    bare.prepare(len(vector))
    found: dict[str, list[float]] = {"commit": [], "exchange": [], "ping_pong": []}
    for turn in range(TURNS):
        barrier.wait()
        found["exchange"].append(seconds(exchanges(bare, vector)))
        barrier.wait()
        found["ping_pong"].append(seconds(ping_pongs(bare, rank, vector)))
        barrier.wait()
        own = ports[2 + 2 * turn : 4 + 2 * turn]
        found["commit"].append(seconds(commits(rank, megabytes, own, turn)))
    bare.close()
    results.send(found)


def measure(megabytes: float) -> dict[str, list[float]]:
    """Run server and worker; the worker's numbers."""
    context = multiprocessing.get_context("spawn")
    ports, barrier = free_ports(2 + 2 * TURNS), context.Barrier(2)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=work, args=(rank, megabytes, ports, barrier, pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    found = [pipe[0].recv() for pipe in pipes]
    for process in processes:
        process.join()
    numbers: dict[str, list[float]] = found[1]
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    origin = about(options)
    found = measure(options.megabytes)
    bases = {
        "two_exchanges": [2 * each for each in found["exchange"]],
        "ping_pong": found["ping_pong"],
    }
    row: dict[str, object] = {"megabytes": options.megabytes}
    row |= {f"{name}_ms": 1e3 * statistics.median(found[name]) for name in found}
    row |= {f"least_{name}_ms": 1e3 * min(found[name]) for name in found}
    for name, base in bases.items():
        ratios = sorted(a / b for a, b in zip(found["commit"], base, strict=True))
        row[f"commit_over_{name}"] = statistics.median(ratios)
        row[f"least_and_most_over_{name}"] = [ratios[0], ratios[-1]]
    row |= {"turns": TURNS}
    if options.json:
        print(json.dumps(origin | row, indent=2))
        return
    for name, value in row.items():
        print(f"{name:32}{value}")


if __name__ == "__main__":
    main()
