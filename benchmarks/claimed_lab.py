"""Is each unit of claimed work done once, where real machines come late, die and are cut off?

    sudo python -m benchmarks.claimed_lab [--epochs 30] [--out DIR] [--json FILE]

Eight hosts of the lab, with 0.1 to 0.3 of a core, train LeNet-5 on MNIST (from
$EDGEGOSSIP_DATA) with `EpochGossip` in `ClaimedWork`, as an open run. Three come late, two are
killed, one of these comes back, and the mesh is cut in two twice (`SCRIPT`). Each worker writes
down the units that it has trained on, and in which epoch. Counted are the pairs of an epoch and
a unit that were done once, more often, and never. A unit that a killed worker was training on
when it died counts if it had finished it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.kept import about, rounded
from lab.lab import HostSpec, Lab
from lab.machine import missing

import edgegossip as eg
from edgegossip.algorithms.wrappers.claimed.state import ClaimedState
from edgegossip.contract import Effect, Event, Seconds, Trained
from edgegossip.recipes.call import RecipeCall
from edgegossip.runs.files import write_json

CORES = (0.3, 0.3, 0.25, 0.2, 0.2, 0.15, 0.1, 0.1)
NUM_HOSTS = len(CORES)
LATE = (5, 6, 7)
SCRIPT: tuple[tuple[Seconds, str, tuple[int, ...]], ...] = (
    *((15.0 + 10.0 * k, "start", (host,)) for k, host in enumerate(LATE)),
    (50.0, "kill", (1,)),
    (60.0, "kill", (6,)),
    (75.0, "start", (1,)),
    (95.0, "cut", (0, 1, 2, 3)),
    (105.0, "mend", ()),
    (130.0, "cut", (2,)),
    (140.0, "mend", ()),
)
"""Seconds since the first five hosts have all begun to train, an action and its hosts."""
VISITS = "EDGEGOSSIP_VISITS"
LIMIT: Seconds = 900.0


@dataclass(frozen=True, kw_only=True)
class WrittenDown(eg.ClaimedWork):
    """`ClaimedWork` whose workers append the units that they have done to a file."""

    def handle(self, state: ClaimedState, event: Event, now: Seconds) -> list[Effect]:
        held = state.held
        effects = super().handle(state, event, now)
        if isinstance(event, Trained) and held is not None and not event.has_gone_back:
            line = json.dumps([held[0], [*held[1]], state.num_units]) + "\n"
            with Path(os.environ[VISITS], f"{state.rank}.jsonl").open("a") as file:
                file.write(line)
        return effects


def visits(num_epochs: int = 30) -> eg.Experiment:
    """MNIST with LeNet-5 on eight machines that can all read it."""
    given = {"num_workers": NUM_HOSTS, "num_epochs": num_epochs, "shared": True}
    made = RecipeCall("mnist-lenet5", given).make()
    assert isinstance(made, eg.Comparison)
    experiment = made.experiments["edge-gossip"]
    inner = eg.EpochGossip(topology=eg.complete(NUM_HOSTS), num_rounds=num_epochs)
    return replace(experiment, algorithm=WrittenDown(inner=inner), max_seconds=None)


def counts(folder: Path, num_epochs: int) -> dict[str, Any]:
    """How often each unit of each epoch was done."""
    done: Counter[tuple[int, int]] = Counter()
    num_units = 0
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            epoch, units, num_units = json.loads(line)
            done.update((epoch, unit) for unit in units)
    number = num_epochs * num_units
    once = sum(each == 1 for each in done.values())
    return {
        "units": number,
        "once": once / number,
        "more often": (len(done) - once) / number,
        "never": (number - len(done)) / number,
        "needless visits": (done.total() - len(done)) / number,
        "more often by epoch": Counter(epoch for (epoch, _), n in done.items() if n > 1),
        "never by epoch": Counter(
            epoch
            for epoch in range(num_epochs)
            for unit in range(num_units)
            if (epoch, unit) not in done
        ),
    }


def run(out: Path, num_epochs: int) -> dict[str, Any]:
    """Carry out `SCRIPT` in a lab, until all present workers have ended."""
    written = out / "visits"
    written.mkdir(parents=True)
    env = {**os.environ, VISITS: str(written)}
    specs = [HostSpec(cpu=each, bandwidth=100e6 / 8) for each in CORES]
    with Lab(specs) as lab:
        endpoints = [f"tcp/{address}:7447" for address in lab.addresses]

        def start(host: int) -> None:
            others = [*endpoints[:host], *endpoints[host + 1 :]]
            words = ["worker", f"{__file__}:visits", "--rank", str(host)]
            words += ["--num-epochs", str(num_epochs), "--open", "--insecure"]
            words += ["--listen", endpoints[host], "--connect", *others]
            words += ["--out", str(out / "workers" / str(host)), "--no-snapshots"]
            with (out / f"{host}.txt").open("ab") as log:
                command = [sys.executable, "-m", "edgegossip", *words]
                running[host] = lab.start(host, command, env=env, output=log)

        running: dict[int, Any] = {}
        for host in range(NUM_HOSTS):
            if host not in LATE:
                start(host)
        while len([*written.iterdir()]) < NUM_HOSTS - len(LATE):
            time.sleep(0.1)
        began = time.monotonic()
        for at, action, hosts in SCRIPT:
            time.sleep(max(0.0, began + at - time.monotonic()))
            print(f"{at:g} s: {action} {hosts}", file=sys.stderr)
            if action == "start":
                start(*hosts)
            elif action == "kill":
                lab.kill(hosts[0])
                del running[hosts[0]]
            elif action == "cut":
                lab.cut(hosts, [host for host in range(NUM_HOSTS) if host not in hosts])
            else:
                lab.mend()
        codes = {
            host: child.wait(max(1.0, began + LIMIT - time.monotonic()))
            for host, child in running.items()
        }
    return {
        "exit codes": codes,
        "seconds": time.monotonic() - began,
        **counts(written, num_epochs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/claimed-lab"))
    parser.add_argument("--json", type=Path, help="file of the figures")
    options = parser.parse_args()
    if lacks := missing():
        print(f"a lab needs what is missing here: {', '.join(lacks)}")
        return 0
    found = {**about(options), "cores": CORES, "script": SCRIPT, "load": os.getloadavg()[0]}
    found |= run(options.out.absolute(), options.epochs)
    print(json.dumps(rounded(found), indent=1))
    if options.json:
        write_json(options.json, rounded(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
