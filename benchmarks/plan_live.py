"""Does a live plan come true? `edgegossip plan --live` on the hosts of a lab.

    sudo EDGEGOSSIP_DATA=data python -m benchmarks.plan_live --out DIR [--turns 3]

Four hosts of unequal processors and cables (those of `benchmarks/plan_lab.py`) join a fifth, of
the machine's own speed, which plans. They measure themselves and their links, the winner of the
plan is started, and learns MNIST with LeNet-5; then the same workers run again with each
further seed of the plan. The forecast is the time to the target that the plan has printed, in
which the mean over its seeds reaches it. The measured time is the median over the runs of the
time in which the averaged model of the real workers reaches the target on the test split.
"Planning" is the time from the moment at which all hosts have joined until the winner is
started. Exits with 1 if a forecast is off by more than 15 %, or planning takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import statistics
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.fidelity import crossing
from benchmarks.kept import about, rounded
from benchmarks.plan_lab import ALLOWED, HOSTS, RECIPE
from lab.lab import HostSpec, Lab, Process
from lab.machine import missing

from edgegossip.cli.command import parse_recipe
from edgegossip.cli.worker_command import GatherOptions
from edgegossip.net.identity.joined import JoinedRun
from edgegossip.plan.ranking import ranked
from edgegossip.plan.results import ranking_rows
from edgegossip.real.gathering import WORKERS, Gathering
from edgegossip.runs.process import one_intra_op_thread
from edgegossip.runs.results import Results
from edgegossip.runs.study import STUDY

EDGEGOSSIP = [sys.executable, "-m", "edgegossip"]
DESK = len(HOSTS)
PATIENCE = 900.0
LONGEST = 120.0


def said(path: Path, pattern: str, desk: Process) -> list[str]:
    """Wait until the one that plans says this; return all that matches."""
    end = time.monotonic() + PATIENCE
    while True:
        text = path.read_text()
        if found := re.findall(pattern, text):
            return found
        if time.monotonic() > end or desk.poll() is not None:
            raise RuntimeError(f"it did not say {pattern!r}:\n{text}")
        time.sleep(0.1)


def lived(options: argparse.Namespace, out: Path) -> float:
    """Let the hosts join, plan and train in `out`; return the seconds that planning took."""
    words = ["plan", options.recipe, "--num-workers", str(len(HOSTS)), "--live", "--yes"]
    words += ["--only", *options.only, "--seeds", *options.seeds, "--target", options.target]
    words += ["--max-seconds", options.seconds, "--budget", options.budget]
    words += ["--processes", "2", "--machines", "machines.toml", "--out", "plan"]
    with Lab([*HOSTS, HostSpec()]) as lab:
        log = out / "plan.txt"
        with log.open("wb") as output:
            address = ["--host", lab.addresses[DESK]]
            desk = lab.start(DESK, [*EDGEGOSSIP, *words, *address], cwd=out, output=output)
        said(log, f"(?:edgegossip join \\S+\\s+){{{len(HOSTS)}}}", desk)
        invitations = re.findall(r"edgegossip join (\S+)", log.read_text())
        hosts = []
        for rank, invitation in enumerate(invitations):
            name = f"host{rank}"
            with (out / f"{name}.txt").open("wb") as output:
                join = ["join", invitation, "--name", name, "--out", name]
                hosts.append(lab.start(rank, [*EDGEGOSSIP, *join], cwd=out, output=output))
            # Ranks follow the order of joining, and the first host would serve.
            said(log, f"{name} is here", desk)
        began = time.monotonic()
        said(log, "started: ", desk)
        seconds = time.monotonic() - began
        _require_success([host.wait() for host in hosts], out)
        for rank in range(len(HOSTS)):
            first = out / f"host{rank}" / WORKERS / str(rank)
            shutil.copytree(first, _folder(out, options.seeds[0], rank))
        for seed in options.seeds[1:]:
            hosts = []
            for rank in range(len(HOSTS)):
                with (out / f"host{rank}.txt").open("ab") as output:
                    again = _again(out, rank, options.seeds[0], seed)
                    hosts.append(lab.start(rank, again, cwd=out, output=output))
            _require_success([host.wait() for host in hosts], out)
    return seconds


def _require_success(codes: list[int | None], out: Path) -> None:
    if any(codes):
        raise RuntimeError(f"hosts ended with {codes}; see {out}/host*.txt")


def _folder(out: Path, seed: str, rank: int) -> Path:
    return out / f"run{seed}" / WORKERS / str(rank)


def _again(out: Path, rank: int, first: str, seed: str) -> list[str]:
    """The command of a worker that the plan has started, with another seed."""
    with (_folder(out, first, rank) / "events.jsonl").open() as log:
        words = shlex.split(json.loads(log.readline())["command"])
    return [*EDGEGOSSIP, *words[1:], "--seed", seed, "--out", str(_folder(out, seed, rank))]


def turn(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """A live plan, and the run that it has started."""
    out.mkdir(parents=True)
    load = os.getloadavg()[0]
    planning = lived(options, out)
    target = float(options.target)
    cells = json.loads((out / "plan" / STUDY).read_text())["cells"]
    rows = {name: cell["row"] for name, cell in cells.items()}
    _, order = ranked(ranking_rows(rows), target)
    joined = JoinedRun.read(out / "host0")
    gathered = [_gathered(joined, out / f"run{seed}", seed) for seed in options.seeds]
    times = [crossing(each.history, target) or math.inf for each in gathered]
    measured, forecast = statistics.median(times), order[0].seconds
    return {
        "run": order[0].run,
        "planned": forecast,
        "planned_by_seed": list(order[0].times),
        "measured": measured,
        "measured_by_seed": times,
        "error": forecast / measured - 1,
        "samples_planned": statistics.median(
            row["samples"][-1] for row in ranking_rows(rows) if row["run"] == order[0].run
        ),
        "samples_measured": statistics.median(
            each.history[-1].samples_processed for each in gathered
        ),
        "planning_seconds": planning,
        "load_before": load,
        "machines": tomllib.loads((out / "machines.toml").read_text())["machine"],
        "notes": re.findall(r"^# (.*)$", (out / "machines.toml").read_text(), re.MULTILINE),
    }


def _gathered(joined: JoinedRun, run: Path, seed: str) -> Results:
    """The results of a planned run with one seed."""
    words = [*joined.words, "--seed", seed, "--out", str(run)]
    if "--max-seconds" in words:
        place = words.index("--max-seconds")
        del words[place : place + 2]
    call = parse_recipe("gather", GatherOptions, words)
    experiment = call.call.experiment(call.options.only)
    with one_intra_op_thread():
        return Gathering(experiment, run, call.call.name).finish()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--only", nargs="+", default=["gosgd", "epoch-gossip"])
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"])
    parser.add_argument("--target", default="0.97")
    parser.add_argument("--seconds", default="20", help="of each run")
    parser.add_argument("--budget", default="75s")
    options = parser.parse_args()
    origin = about(options)
    if lacks := missing():
        print(f"no lab can be made here, for want of {', '.join(lacks)}")
        return 0
    turns = []
    for number in range(options.turns):
        turns.append(turn(options, options.out.resolve() / str(number)))
        print(json.dumps(rounded(turns[-1])), file=sys.stderr, flush=True)
    print(json.dumps(rounded({**origin, "turns": turns}), indent=1))
    return not all(
        abs(each["error"]) <= ALLOWED and each["planning_seconds"] < LONGEST for each in turns
    )


if __name__ == "__main__":
    sys.exit(main())
