"""Does the simulator's downlink take as long as a real one?

    sudo python -m benchmarks.downlink [--repeats 5] [--only NAME...] [--json]

Four hosts of the lab send a message each to a fifth, over the transport of real workers. All
cables are limited by `tc tbf`. The simulator is told their bandwidths less the headers of
Ethernet, IP and TCP (`lab.lab.GOODPUT`), the sizes, and when each host begins. `tbf` counts
whole frames, headers included; its burst passes 2.5 ms' worth at once, its queue of 0.2 s only
delays bytes, and what it drops is dropped before it has taken any of its rate. So nothing else
has to be accounted for.

Compared is when the last message is there. What TCP and the simulator do with the others
differs: TCP shares the downlink, the simulator serves one message after the other. Exits with 1
if a median differs by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import about
from lab.lab import GOODPUT, HostSpec, Lab, Process
from lab.machine import missing
from lab.network import BURST_SECONDS, QUEUE_SECONDS

from edgegossip.contract.algorithm import Algorithm
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
    SetTimer,
    Started,
    TimerFired,
    WorkerState,
)
from edgegossip.contract.trainer import Trainer
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator

MBIT = 1e6 / 8
SIZE = 2_000_000
"""Bytes of a message: long against bursts and the start of TCP."""
ALLOWED = 0.10


@dataclass(frozen=True, slots=True)
class Setting:
    """The senders' speeds and starting times.

    Attributes:
        downlink: Mbit/s of the receiver's cable.
        uplinks: Mbit/s of the senders' cables; None for no limit.
        starts: When each sender begins, in seconds.
    """

    downlink: float
    uplinks: tuple[float | None, ...]
    starts: tuple[Seconds, ...] = (0.0,) * 4


SETTINGS = {
    "one sender": Setting(20.0, (None,), (0.0,)),
    "senders without limit": Setting(20.0, (None,) * 4),
    "as fast as the receiver": Setting(20.0, (20.0,) * 4),
    "wider only together": Setting(20.0, (8.0,) * 4),
    "narrower even together": Setting(20.0, (4.0,) * 4),
    "uneven": Setting(20.0, (3.0, 10.0, 20.0, 100.0)),
    "one after the other": Setting(20.0, (None,) * 4, (0.0, 0.5, 1.0, 1.5)),
    "fast ones behind slow ones": Setting(20.0, (5.0, 5.0, 50.0, 50.0), (0.0, 0.0, 1.0, 1.0)),
}


# The lab.


def measure(setting: Setting) -> list[Seconds]:
    """When the message of each sender is there."""
    mbits = (setting.downlink, *setting.uplinks)
    hosts = [HostSpec(bandwidth=None if mbit is None else mbit * MBIT) for mbit in mbits]
    with tempfile.TemporaryDirectory() as folder, Lab(hosts) as lab:
        go = Path(folder) / "go"
        words = ["--at", *map(str, setting.starts), "--size", str(SIZE), "--go", str(go)]
        module = [sys.executable, "-m", "lab.stream", *words, "--addresses", *lab.addresses]
        children = [
            lab.start(rank, [*module, "--rank", str(rank)], output=subprocess.PIPE)
            for rank in range(len(hosts))
        ]
        for child in children:
            _read(child, "ready")
        _write(go, str(time.time() + 0.5))
        times: list[Seconds] = json.loads(_read(children[0], "times ").removeprefix("times "))
    for child in children:
        assert child.stdout is not None
        child.stdout.close()
    return times


def _read(child: Process, beginning: str) -> str:
    """The next line that begins so."""
    assert child.stdout is not None
    said: list[str] = []
    for line in child.stdout:
        said.append(str(line.decode()).strip())
        if said[-1].startswith(beginning):
            return said[-1]
    raise RuntimeError(f"a host failed; the last that it said: {said[-5:]}")


def _write(path: Path, text: str) -> None:
    """All at once: others look for it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


# The simulator.


@dataclass(frozen=True)
class SendAt(Algorithm[WorkerState]):
    """Workers 1, 2, ... send a message to worker 0, which notes when it comes, by sender."""

    starts: Sequence[Seconds]
    times: dict[Rank, Seconds]

    def init(self, rank: Rank, params: torch.Tensor) -> WorkerState:
        return WorkerState(rank=rank, params=params)

    def role(self, rank: Rank) -> Role:
        return Role("end", has_data=False)

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started() if state.rank:
                return [SetTimer("send", self.starts[state.rank - 1])]
            case Started():
                return [Finish()]
            case TimerFired():
                return [Send(0, Message("data", 0, {"x": state.params})), Finish()]
            case Received(sender):
                self.times[sender] = now
        return []


def simulate(setting: Setting) -> list[Seconds]:
    """When the message of each sender is there."""

    def no_trainer(rank: Rank, incarnation: int) -> Trainer:
        raise AssertionError("nobody trains")

    senders = [
        Platform(throughput=1.0, uplink=math.inf if mbit is None else mbit * MBIT * GOODPUT)
        for mbit in setting.uplinks
    ]
    receiver = Platform(throughput=1.0, downlink=setting.downlink * MBIT * GOODPUT)
    algorithm = SendAt(setting.starts, {})
    Simulator(algorithm, [receiver, *senders], torch.zeros(SIZE // 4), no_trainer).run()
    return [algorithm.times[rank] for rank in sorted(algorithm.times)]


# Both.


def compare(setting: Setting, repeats: int) -> dict[str, Any]:
    """Times of both, and by how much the end of all differs."""
    measured = [measure(setting) for _ in range(repeats)]
    simulated = simulate(setting)
    ends = [max(times) for times in measured]
    error = max(simulated) / statistics.median(ends) - 1
    return {
        "setting": asdict(setting),
        "measured": measured,
        "simulated": simulated,
        "end": {
            "simulated": max(simulated),
            "median": statistics.median(ends),
            "min": min(ends),
            "max": max(ends),
        },
        "error": error,
        "is_kept": abs(error) <= ALLOWED,
    }


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"{'':28}{'measured':>9}{'from':>8}{'to':>8}{'simulated':>11}{'error':>8}")
    for name, row in found.items():
        end = row["end"]
        seconds = f"{end['median']:9.3f}{end['min']:8.3f}{end['max']:8.3f}"
        print(f"{name:28}{seconds}{end['simulated']:11.3f}{row['error']:+8.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if lacks := missing():
        print(f"no lab here, as this is missing: {'; '.join(lacks)}")
        return 0
    origin = about(options)
    found = {name: compare(SETTINGS[name], options.repeats) for name in options.only}
    if options.json:
        kept = {
            **origin,
            "num_bytes": SIZE,
            "goodput": GOODPUT,
            "tbf": {"burst_seconds": BURST_SECONDS, "queue_seconds": QUEUE_SECONDS},
            "seeds": "none: nothing is drawn",
            "result": found,
        }
        print(json.dumps(kept, indent=1))
    else:
        show(found)
    return not all(row["is_kept"] for row in found.values())


if __name__ == "__main__":
    sys.exit(main())
