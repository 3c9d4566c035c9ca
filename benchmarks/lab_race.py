"""Which is first near the top on real processes? EpochGossip, EdgeGossip and GoSGD, each tuned.

    sudo python -m benchmarks.lab_race [--turns 5] [--seconds 50] [--out DIR] [--json FILE]

Four hosts with speeds 1 : 0.8 : 0.33 : 0.25 and links of 100 Mbit/s, as in the study
`edgegossip/rates`, train LeNet-5 on MNIST (from $EDGEGOSSIP_DATA), each with an `edgegossip
worker`. Each algorithm has the settings that the study chose on held-out samples. With these,
GoSGD pushes after each step, for which the fastest host would need 140 Mbit/s: pushes that wait
for the link join into one. So GoSGD runs a second time with the best settings whose pushes the
links carry. All run once in each turn, EpochGossip for twice as long; the first one of a turn
is the last one of the next.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fidelity import PEERS, crossing
from benchmarks.kept import about, rounded
from benchmarks.lab_runs import Setting, run_in_lab
from lab.machine import missing

from edgegossip.runs.files import write_json

TUNED: dict[str, Mapping[str, float]] = {
    "epoch-gossip": {"lr": 0.04},
    "edge-gossip": {"lr": 0.04},
    "gosgd": {"lr": 0.08, "exchange-probability": 1.0},
    "gosgd-fewer-pushes": {"lr": 0.04, "exchange-probability": 0.4},
}
TARGETS = (0.97, 0.98, 0.985)
HOSTS = tuple(replace(host, bandwidth=100e6 / 8) for host in PEERS)


def race(name: str, out: Path, seconds: float) -> dict[str, Any]:
    """Run an entry of `TUNED` once in the lab; its times to the targets, and where it ended."""
    flags = [text for key, value in TUNED[name].items() for text in (f"--{key}", str(value))]
    algorithm = name.removesuffix("-fewer-pushes")
    # More epochs than there is time for, so that EpochGossip is cut off like the others.
    arguments = ("mnist-lenet5", "--num-epochs", "100", *flags)
    setting = Setting(arguments, HOSTS, TARGETS[-1], out / name)
    results, num_bytes, _ = run_in_lab(setting, algorithm, seconds)
    history = results.history
    times = {f"to {target:.1%}": crossing(history, target) for target in TARGETS}
    best = max(each.accuracy for each in history)
    ends = {"best": best, "last": history[-1].accuracy, "seconds": history[-1].time}
    return times | ends | {"bytes": num_bytes}


def show(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print the median of each quantity, and its range; how many reached a target."""
    for name in TUNED:
        mine = [each for each in runs if each["algorithm"] == name]
        for quantity in [key for key in mine[0] if key not in ("algorithm", "turn")]:
            known = [each[quantity] for each in mine if each[quantity] is not None]
            told = "never"
            if known:
                told = f"{statistics.median(known):.5g} ({min(known):.5g} to {max(known):.5g})"
            print(f"{name:21}{quantity:10}{told}, {len(known)} of {len(mine)} runs")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=50.0, help="of each run but EpochGossip's"
    )
    parser.add_argument(
        "--out", type=Path, default=time.strftime("runs/lab-race/%Y%m%d-%H%M%S")
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if lacks := missing():
        print(f"no lab here, as this is missing: {'; '.join(lacks)}")
        return
    origin, runs = about(options), list[dict[str, Any]]()
    for turn in range(options.turns):
        for name in TUNED if turn % 2 == 0 else reversed(TUNED):
            seconds = options.seconds * (2 if name == "epoch-gossip" else 1)
            found = race(name, options.out / f"turn{turn}", seconds)
            runs.append({"turn": turn, "algorithm": name, **found})
            print(json.dumps(runs[-1]), flush=True)
            if options.json:
                write_json(options.json, rounded(origin | {"tuned": TUNED, "runs": runs}))
    show(runs)


if __name__ == "__main__":
    main()
