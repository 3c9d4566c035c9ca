"""Processor time that a small message costs a host, which gossip with few steps a round feels.

    python -m benchmarks.small_messages                       one line for each worker
    python -m benchmarks.small_messages --before OTHER/src    alternates with another version

Two workers without training send each other some small messages, and go on to the next round
when as many have arrived. Everything that a worker does is there: admission, numbers, statuses,
and the log of its events. The figure is the processor time of a worker's process, all threads
and both the user's and the kernel's share, over the messages that it has sent and received.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm, Traits
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Message,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    Started,
    WorkerState,
)
from edgegossip.contract.schema import MessageSpec
from edgegossip.contract.topology import complete
from edgegossip.net.address import Address
from edgegossip.net.host.host import Host
from edgegossip.net.host.settings import HostServices, HostSettings
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.launch import free_ports
from edgegossip.real.worker_files import WorkerEventLog
from edgegossip.runs.process import one_intra_op_thread

NUM_WARM = 50


@dataclass(slots=True, kw_only=True)
class ChatState(WorkerState):
    """State of a worker that chats; `num_received` counts since the beginning."""

    num_received: int = 0


@dataclass(frozen=True, kw_only=True)
class Chat(Algorithm[ChatState]):
    """Send `burst` messages to the other worker, and as many again when as many have come."""

    num_rounds: int
    burst: int
    numel: int
    marks: dict[int, tuple[float, float]]

    @property
    def traits(self) -> Traits:
        return Traits(topology=complete(2), num_rounds=self.num_rounds)

    def role(self, rank: Rank) -> Role:
        return Role("talker", has_data=False)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        return {"chat": MessageSpec({"x": torch.zeros(self.numel)}, numbers={"share": (0, 1)})}

    def init(self, rank: Rank, params: Tensor) -> ChatState:
        return ChatState(rank=rank, params=params)

    def handle(self, state: ChatState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                return self._talk(state)
            case Received():
                state.num_received += 1
                if state.num_received == self.burst * state.round:
                    if state.round in (NUM_WARM, self.num_rounds):
                        self.marks[state.round] = time.process_time(), time.perf_counter()
                    return [Finish()] if state.round == self.num_rounds else self._talk(state)
        return []

    def _talk(self, state: ChatState) -> list[Effect]:
        state.round += 1
        to, numbers = 1 - state.rank, {"share": 0.25}
        # A tensor for each, as the algorithms send them.
        tensors = [torch.ones(self.numel) for _ in range(self.burst)]
        return [Send(to, Message("chat", state.round, {"x": x}, numbers)) for x in tensors]


class _NoTrainer:
    """A worker that only talks never trains."""

    num_samples, epoch_cost, setup_cost, num_units, layout = 0, 0.0, 0.0, 0, None

    def cancel(self) -> None:
        return

    def state_dict(self) -> dict[str, object]:
        return {}


def _talk(rank: Rank, ports: list[int], options: argparse.Namespace, out: Path) -> None:
    one_intra_op_thread()
    marks: dict[int, tuple[float, float]] = {}
    chat = Chat(
        num_rounds=NUM_WARM + options.rounds,
        burst=options.burst,
        numel=options.bytes // 4,
        marks=marks,
    )
    ends = [f"tcp/127.0.0.1:{port}" for port in ports]
    transport = ZenohTransport(
        run="chat",
        rank=rank,
        num_workers=2,
        address=Address(listen=(ends[rank],), connect=tuple(ends[:rank])),
    )
    log = WorkerEventLog(out / f"events{rank}.jsonl")
    host = Host(
        chat,
        rank,
        2,
        torch.zeros(1),
        _NoTrainer(),  # type: ignore[arg-type]
        transport,
        settings=HostSettings(run=b"chatting"),
        services=HostServices(observer=log, save=lambda _: True),
    )
    host.run()
    (begin, began), (end, ended) = marks[NUM_WARM], marks[chat.num_rounds]
    number = 2 * options.burst * options.rounds
    found = f"{1e6 * (end - begin) / number:.1f} {1e6 * (ended - began) / number:.1f}"
    (out / f"found{rank}").write_text(found)


def measure(options: argparse.Namespace) -> None:
    """Print what a message costs each of two workers: processor time, and time, both in us."""
    ports, context = free_ports(2), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        both = [
            context.Process(target=_talk, args=(rank, ports, options, Path(folder)))
            for rank in range(2)
        ]
        for each in both:
            each.start()
        for each in both:
            each.join()
        for rank in range(2):
            print(Path(folder, f"found{rank}").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--burst", type=int, default=3)
    parser.add_argument("--bytes", type=int, default=400)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--before", help="src folder of another version")
    options = parser.parse_args()
    if options.before is None:
        measure(options)
        return
    now = os.environ.get("PYTHONPATH", "")  # empty where the package is installed
    versions = {"before": f"{options.before}:{now}", "now": now}
    found: dict[str, list[list[float]]] = {name: [] for name in versions}
    words = [
        *("--rounds", str(options.rounds)),
        *("--burst", str(options.burst)),
        *("--bytes", str(options.bytes)),
    ]
    for turn in range(options.turns):
        for name in [*versions][:: 1 if turn % 2 else -1]:
            said = subprocess.run(
                [sys.executable, "-m", "benchmarks.small_messages", *words],
                env={**os.environ, "PYTHONPATH": versions[name]},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            lines = said.stdout.splitlines()
            found[name] += [[float(x) for x in line.split()] for line in lines]
    for name, rows in found.items():
        cpu, wall = (statistics.median(each) for each in zip(*rows, strict=True))
        print(f"{name}: {cpu:.0f} us of processor time a message, {wall:.0f} us of time")


if __name__ == "__main__":
    main()
