"""Ten runs on the cores of one machine: in parallel, and one after another.

    EDGEGOSSIP_DATA=FOLDER python -m benchmarks.many_runs --repeats 3 --json FILE

`edgegossip sweep` trains ten seeds of EdgeGossip in three ways, in an order that rotates: as it
does by default (one process per core, one thread each), one run after another with one thread
per core, and one after another with one thread.

How much two cores can gain is measured beside them. `raw`: time of raw training loops (LeNet-5)
at once on all cores, relative to the same loops one after another; it would be 0.5 if two cores
were twice as fast as one. `busy`: share of the cores' time that runs one after another with one
thread per core already use; the parallel runs cannot take less than that share of their time
unless they need less processor time.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.kept import about, rounded
from benchmarks.simulator import NUM_CORES, alone, raw_speed

from edgegossip.runs.files import write_json

RECIPE = "systems/har-cnn"
OPTIONS = ["--only", "edge-gossip", "--num-epochs", "4", "--seeds", "0..9"]
RAW_STEPS = 3000
WAYS = {
    "parallel": ["--processes", str(NUM_CORES)],
    "all_threads": ["--processes", "1", "--threads", str(NUM_CORES)],
    "one_thread": ["--processes", "1", "--threads", "1"],
}


def sweep(way: str) -> dict[str, float]:
    """Wall-clock and processor seconds of one sweep, with its start and its report."""
    with tempfile.TemporaryDirectory() as folder:
        command = [RECIPE, *OPTIONS, *WAYS[way], "--out", f"{folder}/sweep"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "edgegossip", "sweep", *command],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "processor_seconds": processor}


def raw_share() -> float:
    """Time of raw loops on all cores at once, relative to one after another."""
    one, all_cores = (
        alone(raw_speed, "processes contiguous", RAW_STEPS, num_loops)
        for num_loops in (1, NUM_CORES)
    )
    return one / all_cores


def measure(num_repeats: int) -> dict[str, Any]:
    """All turns and their median ratios."""
    turns: list[dict[str, Any]] = []
    for turn in range(num_repeats):
        ways = [*WAYS][turn % len(WAYS) :] + [*WAYS][: turn % len(WAYS)]
        turns.append({**{way: sweep(way) for way in ways}, "raw": raw_share()})
        print(json.dumps(rounded(turns[-1])), file=sys.stderr)

    def ratio(above: str, below: str) -> dict[str, Any]:
        each = sorted(turn[above]["seconds"] / turn[below]["seconds"] for turn in turns)
        return {"median": statistics.median(each), "all": each}

    busy = [
        turn["all_threads"]["processor_seconds"] / NUM_CORES / turn["all_threads"]["seconds"]
        for turn in turns
    ]
    return {
        "parallel_over_all_threads": ratio("parallel", "all_threads"),
        "parallel_over_one_thread": ratio("parallel", "one_thread"),
        "raw": statistics.median(turn["raw"] for turn in turns),
        "busy": statistics.median(busy),
        "turns": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    origin = about(arguments)
    found = {
        **origin,
        "recipe": RECIPE,
        "recipe_options": OPTIONS,
        **measure(arguments.repeats),
    }
    print(json.dumps(rounded(found), indent=2))
    if arguments.json:
        write_json(arguments.json, rounded(found))


if __name__ == "__main__":
    main()
