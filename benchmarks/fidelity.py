"""Does the simulator tell the truth? The same runs in the lab and simulated, side by side.

    sudo python -m benchmarks.fidelity [--only NAME...] [--out DIR] [--json]

Four hosts with speeds 1 : 0.8 : 0.33 : 0.25 and links of 100, 100, 50 and 20 Mbit/s train
LeNet-5 on MNIST (from $EDGEGOSSIP_DATA) by EpochGossip, GoSGD and EdgeGossip, each host of a
lab with an `edgegossip worker`; with a server, a fifth host of 100 Mbit/s, also by BSP and
ADSP, for `--seconds`. Just before and just after, all hosts train for some seconds
without the network. The machine, which must have nothing else to do, becomes faster and slower
all the same, so that something that never changes is timed on each of its cores all the while
(`lab/pace.py`). The simulator is told the bandwidths, the mean of the speeds found
before and after, how the cores' speed has changed during the run, and nothing else. "Drift" is
by how much the two means differ where that change is accounted for.

An epoch is a round, or, for GoSGD, BSP and ADSP, as many samples as there are. Bytes are those
of an epoch, or, where there is a server, of a commit and its answer. Exits with 1 if something
differs by more than it may.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from benchmarks.kept import about
from benchmarks.lab_runs import Setting, calibrate, run_in_lab, run_simulated, time_limit
from lab.lab import HostSpec
from lab.machine import missing
from lab.pace import Pace, follow, platform

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.runs.folder import load_results
from edgegossip.runs.results import Evaluation, Results
from edgegossip.sim.platform import UNEVEN_SPEEDS

GOSSIP = ("epoch-gossip", "gosgd", "edge-gossip")
SERVERS = ("bsp", "adsp")
MBITS = (100.0, 100.0, 50.0, 20.0)


def hosts(fastest: float) -> tuple[HostSpec, ...]:
    """Four of unequal speed, of which the fastest has so many cores."""
    return tuple(
        HostSpec(cpu=fastest * speed, bandwidth=mbit * 1e6 / 8)
        for speed, mbit in zip(UNEVEN_SPEEDS, MBITS, strict=True)
    )


PEERS = hosts(fastest=0.6)
"""All together use 1.43 of two cores."""
SERVED = (HostSpec(cpu=0.35, bandwidth=100e6 / 8), *hosts(fastest=0.45))
"""A server and its workers; as many cores."""
SERVED_OPTIONS = {"window": 5.0, "min-interval": 0.25, "validation-share": 0.02}
"""Two searches in a run. The server looks at 1200 pictures seven times in a window."""
WINDOW = 1.0
"""Seconds over which the pace of a core is averaged."""
ALLOWED = {
    "seconds an epoch": 0.10,
    "seconds a commit": 0.10,
    "seconds to target": 0.10,
    "bytes an epoch": 0.01,
    "bytes a commit": 0.01,
}
"""By how much what is compared may differ."""
Measured: TypeAlias = Mapping[str, float | None]
"""Costs of a run, by the names of `ALLOWED`; None where it never reached the target.

An epoch's seconds are those from the beginning to the end of the last whole one, on average."""


# The compared runs.


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a run, measured and simulated; None where the target was not reached."""

    algorithm: str
    quantity: str
    measured: float | None
    simulated: float | None

    @property
    def error(self) -> float | None:
        """Simulated over measured, less 1."""
        if not self.measured or self.simulated is None:
            return None
        return self.simulated / self.measured - 1

    @property
    def is_kept(self) -> bool:
        return self.error is not None and abs(self.error) <= ALLOWED[self.quantity]


def measure(folder: Path, target: float) -> Measured:
    """Read what a run took from its run folder."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    history = load_results(folder).history
    sends = [line for line in lines if line["type"] == "sent"]
    num_commits = sum(line["kind"] == "commit" for line in sends)
    epochs, end = _whole_rounds(sends, lines[0]["num_workers"])
    if num_commits or not epochs:  # it has no rounds
        epochs, end = history[-1].epochs, history[-1].time
    num_bytes = sum(line["num_bytes"] for line in sends if line["time"] <= end)
    found = {"seconds an epoch": end / epochs, "seconds to target": crossing(history, target)}
    if num_commits:
        each = {
            "seconds a commit": end / num_commits,
            "bytes a commit": num_bytes / num_commits,
        }
        return {**found, **each}
    return {**found, "bytes an epoch": num_bytes / epochs}


def _whole_rounds(sends: Sequence[dict[str, Any]], num_workers: int) -> tuple[float, float]:
    """How many rounds all workers have sent their parameters of, and when the last had."""
    ends: dict[tuple[int, int], float] = {}
    for line in sends:
        if line["kind"] == "params":
            key = (line["rank"], line["round"])
            ends[key] = max(line["end"], ends.get(key, 0.0))
    last = min(
        max((number for other, number in ends if other == rank), default=-1)
        for rank in range(num_workers)
    )
    return last + 1, max(ends.get((rank, last), 0.0) for rank in range(num_workers))


def crossing(history: Sequence[Evaluation], target: float) -> float | None:
    """Time at which accuracy first reached `target`, interpolated between two evaluations."""
    before: Evaluation | None = None
    for each in history:
        if each.accuracy >= target:
            if before is None:
                return each.time
            share = (target - before.accuracy) / (each.accuracy - before.accuracy)
            return before.time + share * (each.time - before.time)
        before = each
    return None


def compare(algorithm: str, measured: Measured, simulated: Measured) -> list[Row]:
    """The numbers of a run, side by side."""
    return [
        Row(algorithm, quantity, measured[quantity], simulated[quantity])
        for quantity in ALLOWED
        if quantity in measured
    ]


def are_equal(one: Results, other: Results) -> bool:
    """Whether two runs have ended with the same parameters, bit for bit."""
    return one.params.keys() == other.params.keys() and all(
        torch.equal(tensor, other.params[name]) for name, tensor in one.params.items()
    )


# The runs.


def check(setting: Setting, algorithm: str, pace: Pace) -> tuple[list[Row], dict[str, Any]]:
    """Run an algorithm both ways; returns what differs how much, and what was found besides."""
    experiment = setting.experiments[algorithm]
    before = calibrate(setting, algorithm, pace)
    limit = time_limit(experiment, setting.num_epochs, before.throughputs)
    real, num_bytes, began = run_in_lab(setting, algorithm, limit)
    until = began + real.history[-1].time
    traces = [pace.trace(core, began, until, WINDOW) for core in setting.cores]
    after = calibrate(setting, algorithm, pace)
    pairs = list(zip(before.samples_per_step, after.samples_per_step, strict=True))
    platforms = [
        platform((a + b) / 2, trace) for (a, b), trace in zip(pairs, traces, strict=True)
    ]
    simulated = run_simulated(setting, algorithm, platforms, limit)
    folders = [setting.out / algorithm / name for name in ("lab", "simulated")]
    rows = compare(algorithm, *(measure(folder, setting.target) for folder in folders))
    found = {
        "has_one_result": isinstance(experiment.algorithm, EpochGossip),
        "before": asdict(before),
        "after": asdict(after),
        "drift": [b / a - 1 for a, b in pairs],
        "paces": dict(zip(setting.cores, traces, strict=True)),
        "max_seconds": limit,
        "accuracy": [real.final_accuracy, simulated.final_accuracy],
        "sent_by_cards_over_messages": num_bytes / real.history[-1].bytes_sent,
        "equal_params": are_equal(real, simulated),
    }
    return rows, found


# For people and machines.


def show(rows: Sequence[Row]) -> None:
    """Print a table."""
    print(f"{'algorithm':14}{'':18}{'measured':>14}{'simulated':>14}{'error':>9}{'allowed':>9}")
    for row in rows:
        shown = ["-" if v is None else f"{v:.5g}" for v in (row.measured, row.simulated)]
        error = "-" if row.error is None else f"{row.error:+.1%}"
        allowed = f"{ALLOWED[row.quantity]:.0%}"
        verdict = "" if row.is_kept else "  too much"
        print(
            f"{row.algorithm:14}{row.quantity:18}{shown[0]:>14}{shown[1]:>14}"
            f"{error:>9}{allowed:>9}{verdict}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-epochs", type=int, default=6, help="where there is no server")
    parser.add_argument("--seconds", type=float, default=150.0, help="where there is one")
    parser.add_argument("--batch-size", type=int, default=256, help="where there is one")
    parser.add_argument("--served-target", type=float, default=0.95, help="where there is one")
    all_names = [*GOSSIP, *SERVERS]
    parser.add_argument("--only", nargs="+", choices=all_names, default=all_names)
    parser.add_argument("--target", type=float, default=0.97, help="where there is none")
    parser.add_argument(
        "--out", type=Path, default=time.strftime("runs/fidelity/%Y%m%d-%H%M%S")
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def setting(algorithm: str, options: argparse.Namespace) -> Setting:
    """How an algorithm is run."""
    out, epochs = Path(options.out), options.num_epochs
    if algorithm in GOSSIP:
        arguments = ("mnist-lenet5", "--num-epochs", str(epochs))
        return Setting(arguments, PEERS, options.target, out, epochs)
    chosen = {**SERVED_OPTIONS, "batch-size": options.batch_size, "seconds": options.seconds}
    flags = [text for name, value in chosen.items() for text in (f"--{name}", str(value))]
    return Setting(("adsp/mnist-lenet5", *flags), SERVED, options.served_target, out)


def main() -> int:
    options = parse()
    if lacks := missing():
        print(f"no lab here, as this is missing: {'; '.join(lacks)}")
        return 0
    origin = about(options)
    Path(options.out).mkdir(parents=True)
    rows: list[Row] = []
    found: dict[str, Any] = {}
    settings = {name: setting(name, options) for name in options.only}
    with follow({core for each in settings.values() for core in each.cores}) as pace:
        for algorithm, each in settings.items():
            new, found[algorithm] = check(each, algorithm, pace)
            rows += new
            if not options.json:
                show(new)
                print(json.dumps(found[algorithm]), flush=True)
    is_kept = all(row.is_kept for row in rows) and all(
        each["equal_params"] for each in found.values() if each["has_one_result"]
    )
    if options.json:
        listed = [{**asdict(row), "error": row.error, "is_kept": row.is_kept} for row in rows]
        told = {"rows": listed, "runs": found, "is_kept": is_kept}
        print(json.dumps(origin | told, indent=2))
    return not is_kept


if __name__ == "__main__":
    sys.exit(main())
