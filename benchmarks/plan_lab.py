"""Does a plan come true? Machines are measured, planned for, and put to work, in the lab.

    sudo EDGEGOSSIP_DATA=data python -m benchmarks.plan_lab --out DIR [--only NAME...]

Four hosts of unequal processors and links (`lab/`) learn MNIST with LeNet-5. The loop is that
of a user: each host runs `edgegossip plan RECIPE --measure`, what they print becomes the file
of machines, with the bandwidths of the cables, `edgegossip plan` tunes and ranks the
algorithms, and each of them is started with the command that plan has for it, as an
`edgegossip worker` on each host. The forecast of a run is what plan has printed: the time to
the target, medians over three seeds, on samples held out of the training data. What is measured
is the time at which the averaged model of the real workers reaches it on the test split, the
samples that they have processed at the end, and the bytes that they have sent.

Speeds are measured once before all runs, as users do, and after each run again: "drift" is by
how much all hosts together have become faster or slower since the file was made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fidelity import crossing
from benchmarks.kept import about
from benchmarks.lab_runs import Setting, run_in_lab
from lab.lab import GOODPUT, HostSpec, Lab
from lab.machine import missing

from edgegossip.cli.plan_command import parse_plan
from edgegossip.plan.candidates import Proposal
from edgegossip.plan.planning import Plan
from edgegossip.plan.ranking import Outlook, ranked
from edgegossip.plan.results import ranking_rows
from edgegossip.runs.study import STUDY, run_study

RECIPE = "systems/mnist-lenet5"
WORDS = ("--num-workers", "4")
HOSTS = tuple(
    HostSpec(cpu=cpu, bandwidth=mbits * 1e6 / 8)
    for cpu, mbits in ((0.45, 100.0), (0.45, 50.0), (0.3, 20.0), (0.2, 20.0))
)
"""The first one serves where there is a server. Together they use 1.4 of two cores."""
ALLOWED = 0.15


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a run, as planned and as measured; None where it never came."""

    algorithm: str
    quantity: str
    planned: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Planned over measured, less 1."""
        if not self.measured or self.planned is None:
            return None
        return self.planned / self.measured - 1


def measured_hosts(seconds: float) -> list[dict[str, Any]]:
    """Measure all hosts at once; return each one's own account, with the speed of its cable."""
    command = [sys.executable, "-m", "edgegossip", "plan", RECIPE, *WORDS]
    with Lab(HOSTS) as lab:
        children = [
            lab.start(rank, [*command, "--measure", str(seconds)], output=subprocess.PIPE)
            for rank in range(len(HOSTS))
        ]
        said = [child.communicate()[0].decode() for child in children]
    tables = [tomllib.loads(text)["machine"][0] for text in said]
    return [
        {**table, "name": f"host{rank}", "mbits": 8e-6 * GOODPUT * (host.bandwidth or 0.0)}
        for rank, (table, host) in enumerate(zip(tables, HOSTS, strict=True))
    ]


def written(machines: Sequence[Mapping[str, Any]]) -> str:
    """The file of machines."""
    lines = []
    for each in machines:
        lines += ["[[machine]]", *(f"{k} = {json.dumps(v)}" for k, v in each.items()), ""]
    return "\n".join(lines)


def planned(options: argparse.Namespace) -> tuple[Plan, float, list[Outlook]]:
    """Measure the hosts and plan; go on with an interrupted plan."""
    file, out = options.out / "machines.toml", options.out / "plan"
    if not file.exists():
        file.write_text(written(measured_hosts(options.measure_seconds)))
    resumed = ["--resume"] if (out / STUDY).exists() else []
    words = [RECIPE, "--machines", str(file), "--only", *options.only, "--out", str(out)]
    words += ["--budget", options.budget, "--target", str(options.target)]
    found, plan = parse_plan(
        [*words, "--max-seconds", str(options.seconds), "--processes", "2", *resumed]
    )
    rows = run_study(
        plan.study, out=out, resume=bool(resumed), num_processes=found.options.num_processes
    )
    target, order = ranked(ranking_rows(rows), options.target)
    return plan, target, order


def started(
    plan: Plan, proposal: Proposal, target: float, out: Path
) -> dict[str, float | None]:
    """Start a proposal on the hosts, by the command of the plan, and measure it."""
    seconds = plan.fleet.seconds
    words = proposal.lasting(seconds).words()
    setting = Setting(arguments=tuple(words), hosts=HOSTS, target=target, out=out)
    results, _, _ = run_in_lab(setting, proposal.only, None)
    last = results.history[-1]
    return {
        "seconds to target": crossing(results.history, target),
        "samples": last.samples_processed,
        "bytes": last.bytes_sent,
    }


def forecast(plan: Plan, outlook: Outlook, folder: Path) -> dict[str, float | None]:
    """The same numbers, as planned."""
    rows = [
        cell["row"]
        for cell in json.loads((folder / STUDY).read_text())["cells"].values()
        if cell["row"]["run"] == outlook.run and "rung" not in cell["row"]
    ]
    return {
        "seconds to target": outlook.seconds,
        "samples": statistics.median(row["samples"][-1] for row in rows),
        "bytes": statistics.median(row["bytes"][-1] for row in rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=["epoch-gossip", "gosgd", "bsp"])
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--budget", default="18runs")
    parser.add_argument("--measure-seconds", type=float, default=20.0)
    options = parser.parse_args()
    origin = about(options)
    if lacks := missing():
        print(f"no lab can be made here, for want of {', '.join(lacks)}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    plan, target, order = planned(options)
    before = [each.samples_per_second or 0.0 for each in plan.fleet.machines]
    rows, runs = list[Row](), {}
    for outlook in order:
        proposal = plan.known[outlook.run]
        load = os.getloadavg()[0]
        found = started(plan, proposal, target, options.out / "lab")
        after = [each["samples_per_second"] for each in measured_hosts(10.0)]
        expected = forecast(plan, outlook, options.out / "plan")
        new = [Row(outlook.only, name, expected[name], found[name]) for name in found]
        rows += new
        runs[outlook.only] = {
            "command": proposal.command("worker", plan.fleet.seconds),
            "times_of_seeds": outlook.times,
            "idle": outlook.idle,
            "drift": sum(after) / sum(before) - 1,
            "load_before": load,
        }
        for row in new:
            error = "-" if row.error is None else f"{row.error:+.1%}"
            print(row, error, file=sys.stderr, flush=True)
    told = {
        **origin,
        "machines": [str(each) for each in plan.fleet.machines],
        "rows": [
            {"algorithm": r.algorithm, "quantity": r.quantity, "planned": r.planned}
            | {"measured": r.measured, "error": r.error}
            for r in rows
        ],
        "runs": runs,
    }
    print(json.dumps(told, indent=1))
    times = [row for row in rows if row.quantity == "seconds to target"]
    return not all(row.error is not None and abs(row.error) <= ALLOWED for row in times)


if __name__ == "__main__":
    sys.exit(main())
