"""How soon do workers train that come late, one of four or several at the same moment?

    python -m benchmarks.late_joiners [--only gossip gosgd] [--repeats 2] [--json]

Some of four workers of the quickstart recipe begin, as processes that meet over zenoh on
loopback; once each of them has trained, the one to three others are started. Measured is the
time from the last one's start until each late one has trained once (the first `trained` in its
`events.jsonl`), and how much of it passed before its folder was there: starting Python,
importing PyTorch, measuring its speed. The rest is joining: meeting the others, taking a model
and a round from them, and training. All share this machine, where the first ones train without
a pause, so that starting takes longer than it would on a machine of its own; the load of the
minute before is noted. The files are looked at each 20 ms. Exits with 1 if one takes longer
than 10 s, or never trains.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.kept import about

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.real.launch import free_ports

ALGORITHMS = ("gossip", "epoch-gossip", "gosgd", "edge-gossip")
NUM_WORKERS = 4
MEET: Seconds = 4.0
LIMIT: Seconds = 60.0
ALLOWED: Seconds = 10.0
Moments: TypeAlias = dict[Rank, Seconds | None]


def start(
    rank: Rank, algorithm: str, endpoints: Sequence[str], out: Path
) -> subprocess.Popen[bytes]:
    others = [*endpoints[:rank], *endpoints[rank + 1 :]]
    words = ["worker", "quickstart", "--num-workers", str(NUM_WORKERS), "--rank", str(rank)]
    words += ["--only", algorithm, "--meet-seconds", str(MEET), "--num-epochs", "20000"]
    words += ["--max-seconds", str(2 * LIMIT), "--min-workers", "1"]
    words += ["--listen", endpoints[rank], "--connect", *others, "--parent", str(os.getpid())]
    words += ["--out", str(out / str(rank))]
    with (out / f"{rank}.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "edgegossip", *words], stdout=log, stderr=log
        )


def measure(algorithm: str, num_late: int) -> dict[str, Any]:
    """Seconds since the late ones were started, by rank; the last `num_late` ranks are late."""
    endpoints = [f"tcp/127.0.0.1:{port}" for port in free_ports(NUM_WORKERS)]
    early = range(NUM_WORKERS - num_late)
    late, load = range(NUM_WORKERS - num_late, NUM_WORKERS), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        out, processes = Path(folder), []
        try:
            processes += [start(rank, algorithm, endpoints, out) for rank in early]
            if None in watch(out, early)["trained"].values():
                raise RuntimeError("the first workers did not begin to train")
            processes += [start(rank, algorithm, endpoints, out) for rank in late]
            return {"load": load, **watch(out, late)}
        finally:
            for process in processes:
                process.kill()
                process.wait()


def watch(out: Path, ranks: Sequence[Rank]) -> dict[str, Moments]:
    """When the folder of each of `ranks` was there, and when it had trained, from now on."""
    began = time.monotonic()
    is_there: Moments = dict.fromkeys(ranks)
    trained: Moments = dict.fromkeys(ranks)
    while time.monotonic() < began + LIMIT and None in trained.values():
        seconds = time.monotonic() - began
        for rank in ranks:
            if is_there[rank] is None and (out / str(rank) / "events.jsonl").exists():
                is_there[rank] = seconds
            if trained[rank] is None and has_trained(out / str(rank)):
                trained[rank] = seconds
        time.sleep(0.02)
    joining = {rank: _difference(trained[rank], is_there[rank]) for rank in ranks}
    return {"starting": is_there, "joining": joining, "trained": trained}


def _difference(a: Seconds | None, b: Seconds | None) -> Seconds | None:
    return None if a is None or b is None else a - b


def has_trained(folder: Path) -> bool:
    """Whether the log of a worker says that it has."""
    path = folder / "events.jsonl"
    return path.exists() and b'{"type":"trained"' in path.read_bytes()


def spread(runs: Sequence[dict[str, Any]], what: str) -> dict[str, Seconds]:
    """Median, least and most over all late workers of all `runs`; infinity for never."""
    all_seconds = [
        float("inf") if seconds is None else seconds
        for run in runs
        for seconds in run[what].values()
    ]
    return {
        "median": statistics.median(all_seconds),
        "min": min(all_seconds),
        "max": max(all_seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--late", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON as well")
    options = parser.parse_args()
    origin = about(options)
    rows: list[dict[str, Any]] = []
    for name in options.only:
        for num_late in options.late:
            runs = [measure(name, num_late) for _ in range(options.repeats)]
            row = {"algorithm": name, "num_late": num_late, "runs": runs}
            row |= {what: spread(runs, what) for what in ("starting", "joining", "trained")}
            rows.append(row | {"is_kept": spread(runs, "trained")["max"] <= ALLOWED})
            print(name, num_late, row["joining"], row["trained"], file=sys.stderr)
    if options.json:
        kept = {
            **origin,
            "seeds": "the recipe's: 0",
            "allowed_seconds": ALLOWED,
            "result": rows,
        }
        print(json.dumps(kept, indent=1))
    return not all(row["is_kept"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
