"""How soon does a machine train after `edgegossip join`, with a model of one megabyte?

    python -m benchmarks.newcomers [--newcomers 3] [--json]

`edgegossip invite` runs on this machine, and two workers that have joined train a model of
1.05 MB (GoSGD) without a pause. Then newcomers join one after the other, each with an
invitation of its own, and leave after their first step. Measured is the time from the start of
the `edgegossip join` process until the first `trained` in the newcomer's `events.jsonl`, and
when its certificate and its folder were there. All processes share this machine, so the first
two workers, which would have machines of their own, have the lowest priority; the load of the
minute before is noted. Exits with 1 if one takes longer than 10 s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.kept import about, rounded

from edgegossip.contract.protocol import Seconds
from edgegossip.real.launch import free_ports

ALLOWED: Seconds = 10.0
PATIENCE: Seconds = 180.0
RECIPE = """
from dataclasses import replace
from functools import partial

import edgegossip as eg
from edgegossip.recipes.quickstart import DEFAULTS, quickstart

def megabyte(num_workers: int = 3):
    "A model of (64 + 1 + 10) * 3500 + 10 parameters of 4 bytes."
    settings = replace(DEFAULTS, num_workers=num_workers, num_epochs=100_000)
    made = quickstart(settings).experiments["gosgd"]
    model = partial(eg.mlp, (1, 8, 8), 10, hidden=(3500,))
    return replace(made, task=replace(made.task, model=model))
"""


def start(folder: Path, name: str, *words: str) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "edgegossip", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def wait_for(condition: Callable[[], bool]) -> Seconds:
    """The time of day at which `condition` has become true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it did not happen; look at what the processes printed")
        time.sleep(0.02)
    return time.time()


def has_trained(folder: Path) -> bool:
    paths = folder.glob("workers/*/events.jsonl")
    return any('"trained"' in path.read_text() for path in paths)


def invitation(folder: Path, name: str, *words: str) -> tuple[str, subprocess.Popen[bytes]]:
    """An invitation, and the process that has printed it."""
    process, log = start(folder, name, "invite", *words), folder / f"{name}.txt"
    wait_for(lambda: "edgegossip join" in log.read_text())
    [line] = re.findall(r"edgegossip join (\S+)", log.read_text())
    return line, process


def measure(num_newcomers: int, folder: Path, stack: ExitStack) -> list[dict[str, Seconds]]:
    (folder / "own.py").write_text(RECIPE)
    service, router = free_ports(2)
    ports = ["--port", str(service), "--router-port", str(router)]
    invite = ["own.py:megabyte", "--num-workers", "3", "--host", "127.0.0.1", *ports]
    first, process = invitation(folder, "invite", *invite)
    stack.callback(process.terminate)
    second, _ = invitation(folder, "again", *invite)
    for name, line in {"a": first, "b": second}.items():
        words = ["join", line, "--name", name, "--out", name]
        process = start(folder, name, *words)
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        stack.callback(process.wait)
        stack.callback(process.terminate)
    wait_for(lambda: has_trained(folder / "a") and has_trained(folder / "b"))
    rows = []
    for number in range(num_newcomers):
        name = f"newcomer-{number}"
        line, _ = invitation(folder, f"invite-{number}", *invite)
        out, begun = folder / name, time.time()
        process = start(folder, name, "join", line, "--name", name, "--out", name)
        moments = {
            "certificate": wait_for((out / "joined.json").exists),
            "folder": wait_for(lambda out=out: any(out.glob("workers/*/experiment.json"))),  # type: ignore[misc]
            "first step": wait_for(lambda out=out: has_trained(out)),  # type: ignore[misc]
        }
        rows.append({what: at - begun for what, at in moments.items()})
        print(name, {what: round(s, 2) for what, s in rows[-1].items()}, file=sys.stderr)
        start(folder, f"leave-{number}", "leave", "--out", name).wait()
        process.wait()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--newcomers", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    found: dict[str, Any] = {**about(options), "load before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found["seconds"] = measure(options.newcomers, Path(folder), stack)
    if options.json:
        print(json.dumps(rounded(found), indent=1))
    return int(max(each["first step"] for each in found["seconds"]) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
