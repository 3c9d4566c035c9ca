"""How long a commit to a parameter server takes, beside two bare exchanges of as many bytes.

    python -m benchmarks.commit           a table
    python -m benchmarks.commit --json    one JSON object

A commit is a vector to the server and the model in return, over loopback: `ASP` with one worker
whose training takes no time, in two processes with all that a run has (admission, account of
messages, statuses). An exchange is a bare script over zenoh (`benchmarks/exchange.py`), where
both send at once. The two take turns; milliseconds are medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.synchronize
import statistics
import time
from multiprocessing.connection import Connection

import torch
from benchmarks.exchange import BareZenoh, free_ports
from torch import nn

from edgegossip.algorithms.parameter_server.asp import ASP
from edgegossip.core.protocol import Rank
from edgegossip.deploy.training_loop import TrainingLoop
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.net.address import Address
from edgegossip.net.zenoh_transport import ZenohTransport

TURNS = 7
NUM_COMMITS = 60
NUM_UNTIMED = 10
NUM_EXCHANGES = 60


class Model(nn.Module):
    """A vector of `megabytes` that nobody trains."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(int(megabytes * 1e6 / 4)))


def commits(rank: Rank, megabytes: float, ports: list[int], turn: int) -> float:
    """Take part in a run; returns the seconds of a commit, as the worker sees them."""
    endpoints = [f"tcp/127.0.0.1:{port}" for port in ports]
    transport = ZenohTransport(
        run=f"commit-{turn}",
        rank=rank,
        num_workers=2,
        address=Address(listen=(endpoints[rank],), connect=tuple(endpoints[:rank])),
    )
    algorithm = ASP(num_workers=1, num_rounds=NUM_COMMITS + NUM_UNTIMED)
    loop = TrainingLoop(
        Model(megabytes), algorithm, rank, 2, transport, num_samples=1, name="commit"
    )
    times = []
    with loop:
        while not loop.is_over:
            loop.step(0.0, num_samples=1)
            times.append(time.perf_counter())
    timed = times[NUM_UNTIMED:] or [0.0, 0.0]
    return (timed[-1] - timed[0]) / max(1, len(timed) - 1)


def exchanges(system: BareZenoh, megabytes: float) -> float:
    """Swap vectors; returns the seconds of one."""
    vector = torch.zeros(int(megabytes * 1e6 / 4))
    system.prepare(len(vector))
    began = 0.0
    for number in range(NUM_EXCHANGES + NUM_UNTIMED):
        if number == NUM_UNTIMED:
            began = time.perf_counter()
        (vector + system.swap(vector)).div_(2)
    return (time.perf_counter() - began) / NUM_EXCHANGES


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
    found: dict[str, list[float]] = {"commit": [], "exchange": []}
    for turn in range(TURNS):
        barrier.wait()
        found["exchange"].append(exchanges(bare, megabytes))
        barrier.wait()
        own = ports[2 + 2 * turn : 4 + 2 * turn]
        found["commit"].append(commits(rank, megabytes, own, turn))
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
    found = measure(options.megabytes)
    middle = {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()}
    pairs = zip(found["commit"], found["exchange"], strict=True)
    ratios = sorted(commit / (2 * exchange) for commit, exchange in pairs)
    row = {
        "megabytes": options.megabytes,
        "commit_ms": middle["commit"],
        "exchange_ms": middle["exchange"],
        "commit_over_two_exchanges": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "turns": TURNS,
        "torch": torch.__version__,
    }
    if options.json:
        print(json.dumps(row, indent=2))
        return
    print(
        f"{options.megabytes:g} MB: commit {row['commit_ms']:.2f} ms, "
        f"exchange {row['exchange_ms']:.2f} ms, {row['commit_over_two_exchanges']:.2f} times "
        f"two ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


if __name__ == "__main__":
    main()
