"""Can the simulator predict a run of another hour? Hosts are measured once, and run much later.

    sudo python -m benchmarks.prediction calibrate DIR [--only NAME...]
    sudo python -m benchmarks.prediction run DIR [--only NAME...] [--repeats N] [--json FILE]

`benchmarks.fidelity` replays: it measures speeds just before and after a run, follows the
cores' pace, and tells the simulator all of it. Here the simulator knows what a user knows in
advance. `calibrate` lets the hosts of `fidelity` train for some seconds without the network,
simulates each algorithm at these speeds, which stay constant, and keeps what it found. `run`,
an hour or a day later, runs each algorithm in the lab several times, in turns, and compares.
Nothing of these runs reaches the simulator. "Pace" is the speed of the cores during a run,
relative to their speed during the calibration, from a computation that never changes: an error
of the machine's own making.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.fidelity import GOSSIP, measure, setting
from benchmarks.kept import about, rounded
from benchmarks.lab_runs import Setting, calibrate, run_in_lab, run_simulated, time_limit
from lab.machine import missing
from lab.pace import follow

from edgegossip.runs.files import write_json
from edgegossip.sim.platform import Platform

CALIBRATION = "calibration.json"


def settings_of(
    names: Sequence[str], chosen: Mapping[str, Any], out: Path
) -> dict[str, Setting]:
    """The set-up of each algorithm: that of `fidelity`."""
    epochs, target = chosen["num_epochs"], chosen["target"]
    own = argparse.Namespace(out=out, num_epochs=epochs, target=target)
    return {name: setting(name, own) for name in names}


def predict(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the hosts, and simulate at their speeds."""
    found: dict[str, dict[str, Any]] = {}
    chosen = settings_of(options.only, vars(options), options.folder)
    with follow({core for each in chosen.values() for core in each.cores}) as pace:
        for name, each in chosen.items():
            found[name] = asdict(calibrate(each, name, pace))
    for name, each in chosen.items():
        throughputs = found[name]["throughputs"]
        limit = time_limit(each.experiments[name], each.num_epochs, throughputs)
        platforms = [Platform(throughput=throughput) for throughput in throughputs]
        run_simulated(each, name, platforms, limit)
        told = measure(each.out / name / "simulated", each.target)
        found[name] |= {"max_seconds": limit, "predicted": told}
    return {
        "calibrated": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "num_epochs": options.num_epochs,
        "target": options.target,
        "only": options.only,
        "algorithms": found,
    }


def run(options: argparse.Namespace, calibration: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run those algorithms of `calibration` that are wanted, in turns."""
    names = [name for name in calibration["only"] if name in options.only]
    if not names:
        raise SystemExit(
            f"{options.folder} has calibrations of {', '.join(calibration['only'])}; name one "
            "of these with --only, or calibrate in another folder"
        )
    runs = []
    first = len([*options.folder.glob("turn*")])
    for turn in range(first, first + options.repeats):
        folder = options.folder / f"turn{turn}"
        folder.mkdir()
        chosen = settings_of(names, calibration, folder)
        with follow({core for each in chosen.values() for core in each.cores}) as pace:
            for name, each in chosen.items():
                told = calibration["algorithms"][name]
                real, _, began = run_in_lab(each, name, told["max_seconds"])
                until = began + real.history[-1].time
                now = statistics.fmean(pace.mean(core, began, until) for core in each.cores)
                speed = statistics.fmean(told["paces"]) / now
                measured = measure(each.out / name / "lab", each.target)
                runs.append({"turn": turn, "algorithm": name, "pace": speed, **measured})
                print(json.dumps(runs[-1]), flush=True)
    return runs


def errors(
    runs: Sequence[Mapping[str, Any]], calibration: Mapping[str, Any]
) -> dict[str, dict[str, list[float]]]:
    """Predicted over measured, less 1, of each quantity that both have reached."""
    found: dict[str, dict[str, list[float]]] = {}
    for each in runs:
        predicted = calibration["algorithms"][each["algorithm"]]["predicted"]
        own = found.setdefault(each["algorithm"], {})
        for quantity, expected in predicted.items():
            if each[quantity] and expected is not None:
                own.setdefault(quantity, []).append(expected / each[quantity] - 1)
    return found


def show(found: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Print the median error of each quantity, its range, and how many runs reached it."""
    for name, quantities in found.items():
        for quantity, values in quantities.items():
            median, low, high = statistics.median(values), min(values), max(values)
            print(
                f"{name:14}{quantity:20}{median:+8.1%}  ({low:+.1%} to {high:+.1%}), "
                f"{len(values)} runs"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("calibrate", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=GOSSIP, default=[*GOSSIP])
    parser.add_argument("--num-epochs", type=int, default=6)
    parser.add_argument("--target", type=float, default=0.97)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if lacks := missing():
        raise SystemExit(f"no lab here, as this is missing: {'; '.join(lacks)}")
    origin = about(options)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.step == "calibrate":
        write_json(options.folder / CALIBRATION, {"calibration": origin, **predict(options)})
        return
    calibration = json.loads((options.folder / CALIBRATION).read_text())
    begun = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    runs = run(options, calibration)
    found = errors(runs, calibration)
    show(found)
    if options.json:
        kept = {
            **origin,
            **calibration,
            "run": begun,
            "runs": runs,
            "errors": found,
        }
        write_json(options.json, rounded(kept))


if __name__ == "__main__":
    main()
