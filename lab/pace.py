"""How fast is each core of this machine, from moment to moment?

    python -m lab.pace CORE

Machines that share a processor with others become faster and slower within minutes, and all
hosts of a lab with them. Four times a second this takes a few training steps of LeNet-5, always
the same, and prints the time of day and the processor seconds that a step took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch.nn import functional

from edgegossip.contract.protocol import Seconds
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.models import lenet5
from edgegossip.sim.platform import Platform, ThrottlingTrace

Trace: TypeAlias = list[tuple[Seconds, float]]
"""Values, each with the time from which it holds."""

_EVERY: Seconds = 0.25
_STEPS = 3
_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast some cores were, from when they began to be followed; see `follow`.

    Attributes:
        folder: Has a file for each core.
    """

    folder: Path

    def trace(self, core: int, since: float, until: float, window: Seconds) -> Trace:
        """Processor seconds of a step on `core`: the mean of each window, counted from `since`.

        Args:
            core: One of those that are followed.
            since: Time of day in seconds.
            until: Likewise.
            window: Length.

        Raises:
            RuntimeError: If nothing was found in that time.
        """
        lines = self.path(core).read_text().splitlines()
        found = [(float(at), float(seconds)) for at, seconds in map(json.loads, lines)]
        return means(found, since, until, window)

    def mean(self, core: int, since: float, until: float) -> float:
        """Processor seconds of a step on `core` between two times of day."""
        return self.trace(core, since, until, until - since)[0][1]

    def path(self, core: int) -> Path:
        """The file with the measurements of `core`."""
        return self.folder / str(core)


@contextmanager
def follow(cores: Iterable[int]) -> Iterator[Pace]:
    """Follow the speed of some cores, which costs each a seventh of its time."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pace = Pace(Path(folder))
        for core in sorted(set(cores)):
            with pace.path(core).open("wb") as output:
                command = [sys.executable, "-m", "lab.pace", str(core)]
                child = stack.enter_context(subprocess.Popen(command, stdout=output))
                stack.callback(child.kill)
        yield pace


def means(found: Trace, since: float, until: float, window: Seconds) -> Trace:
    """The mean of each window from `since` to `until`; of one without any, that before it.

    >>> means([(10.5, 2.0), (11.5, 4.0), (13.2, 1.0)], since=10.0, until=14.0, window=2.0)
    [(0.0, 3.0), (2.0, 1.0)]
    """
    windows: dict[int, list[float]] = {}
    for at, value in found:
        if since <= at < until:
            windows.setdefault(int((at - since) / window), []).append(value)
    if not windows:
        raise RuntimeError(f"the pace was not measured in {until - since:.1f} s; try again")
    first, *others = sorted(windows)
    return [
        (0.0 if index == first else index * window, sum(windows[index]) / len(windows[index]))
        for index in (first, *others)
    ]


def platform(samples_per_step: float, pace: Trace) -> Platform:
    """A host whose core took so long for a step, from moment to moment."""
    fastest = min(seconds for _, seconds in pace)
    times = tuple(at for at, _ in pace)
    slow_downs = tuple(seconds / fastest for _, seconds in pace)
    return Platform(
        throughput=samples_per_step / fastest, throttling=ThrottlingTrace(times, slow_downs)
    )


def main() -> None:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    torch.set_num_threads(1)
    keep_freed_memory()
    model = lenet5((1, 28, 28), 10)
    x, y = torch.randn(_SAMPLES, 1, 28, 28), torch.arange(_SAMPLES) % 10

    def step() -> None:
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]

    parent = os.getppid()
    while os.getppid() == parent:
        step()  # others have filled the caches meanwhile
        began = time.thread_time()
        for _ in range(_STEPS):
            step()
        print(json.dumps([time.time(), (time.thread_time() - began) / _STEPS]), flush=True)
        time.sleep(_EVERY - time.time() % _EVERY)


if __name__ == "__main__":
    main()
