"""The time to collect and store one sample of telemetry, as in the paper's Fig. 11.

    python -m benchmarks.telemetry           a table
    python -m benchmarks.telemetry --json    one JSON object

By workload: without a load, and while one process per core counts words or sorts a file.
Milliseconds: the median, and what 95 % of samples stay below. "collecting" is reading all
counters of this machine and of a process tree of `--children` children, and the mean of a
minute; "collecting and storing" adds one store. A Redis server is started if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.kept import about

from edgegossip.machine.counters import SystemCounters
from edgegossip.machine.loads import KINDS, MB, Load
from edgegossip.machine.monitor import LoadHistory
from edgegossip.machine.telemetry import Sample, TelemetryStore, open_telemetry


@contextmanager
def redis_url(folder: Path) -> Iterator[str | None]:
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--port", str(port), "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


@contextmanager
def children(num: int) -> Iterator[None]:
    program = [sys.executable, "-S", "-c", "input()"]
    started = [subprocess.Popen(program, stdin=subprocess.PIPE) for _ in range(num)]
    try:
        yield
    finally:
        for child in started:
            child.communicate(b"\n")


def measure(work: Callable[[], object], repeats: int) -> dict[str, float]:
    work()  # connects, imports
    times = []
    for _ in range(repeats):
        time.sleep(0.01)
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "median": statistics.median(times),
        "percentile_95": sorted(times)[int(0.95 * (repeats - 1))],
        "worst": max(times),
    }


def collect_and_store(collect: Callable[[], Sample], store: TelemetryStore) -> None:
    store.append(0, collect())


def measure_all(repeats: int, num_children: int) -> dict[str, dict[str, float]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(children(num_children))
        where: dict[str, str | None] = {
            "memory": "memory",
            "lines": str(folder / "telemetry.jsonl"),
            "redis": stack.enter_context(redis_url(folder)),
        }
        history = LoadHistory(SystemCounters(), time.monotonic)

        def collect() -> Sample:
            history.read()
            now = time.monotonic()
            means = history.mean_contention((now - 60, now))
            return Sample(time.time(), 60.0, means.cores, means.network, means.disk, 100.0)

        found = {"collecting": measure(collect, repeats)}
        for name, place in where.items():
            if place is None:
                continue
            with closing(open_telemetry(place, "benchmark")) as store:
                both = partial(collect_and_store, collect, store)
                found[f"collecting and storing, {name}"] = measure(both, repeats)
    return found


def by_workload(repeats: int, num_children: int) -> dict[str, dict[str, dict[str, float]]]:
    found = {"none": measure_all(repeats, num_children)}
    for kind in KINDS:
        load = Load(kind=kind, num_bytes=20 * MB, num_processes=os.cpu_count() or 1)
        with load.running():
            found[kind] = measure_all(repeats, num_children)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--children", type=int, default=4)
    options = parser.parse_args()
    origin = about(options)
    found = by_workload(options.repeats, options.children)
    if options.json:
        print(json.dumps({**origin, "milliseconds": found}))
        return
    for workload, rows in found.items():
        print(f"workload: {workload:20s} median ms    95 %   worst")
        for name, values in rows.items():
            print(
                f"{name:30s} {values['median']:10.2f} {values['percentile_95']:7.2f} "
                f"{values['worst']:7.2f}"
            )


if __name__ == "__main__":
    main()
