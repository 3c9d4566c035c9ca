"""Is the first choice of `edgegossip plan` the best? Six set-ups drawn by seed, run in full.

    EDGEGOSSIP_DATA=data python -m benchmarks.plan_choice --out DIR [--set-ups 0 1 2 3 4 5]

A seed draws a task (digits and MNIST with small MLPs, MNIST with LeNet-5, activities with a
small CNN), three to six machines, their speeds (up to eight times apart), bandwidths and
latencies. `plan` tunes and ranks ten systems within its budget, on samples held out of the
training data. Then all ten, with the settings that plan has found, learn from all training
samples, with seeds that plan never used, and are measured on the test split. The best one is
the one whose mean accuracy over the seeds first reaches the best one's final accuracy less a
point. A repeated command goes on with an interrupted one, in the same folder.

Prints one JSON object, and exits with 1 if the first choice is the best in fewer than all
set-ups but one, or takes more than 5 % longer than the best in that one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kept import about

from edgegossip.cli.plan_command import parse_plan
from edgegossip.plan.candidates import Proposal
from edgegossip.plan.planning import Plan
from edgegossip.plan.ranking import Outlook, ranked
from edgegossip.plan.study import Fleet
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.study import STUDY, Cell, Row, Session, Study, run_study

TASKS: Mapping[str, tuple[str, ...]] = {
    "systems/quickstart": ("--num-epochs", "30"),
    "systems/mnist-mlp": ("--num-train", "4000", "--num-test", "2000", "--num-epochs", "16"),
    "systems/mnist-lenet5": ("--num-train", "2000", "--num-test", "1000", "--num-epochs", "8"),
    "systems/har-cnn": ("--num-train", "2000", "--num-test", "1000", "--num-epochs", "8"),
}
NUM_MACHINES = (3, 6)
FASTEST = (300.0, 3000.0)
"""Samples per second of the fastest machine."""
SPREAD = (1.5, 8.0)
"""The fastest machine over the slowest."""
MBITS = (2.0, 200.0)
LATENCY_MS = (1.0, 40.0)
TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """One machine, as in the file for `plan`."""

    samples_per_second: float
    mbits: float
    latency_ms: float


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """A task, and the machines to learn it on."""

    seed: int
    recipe: str
    words: tuple[str, ...]
    machines: tuple[Machinery, ...]

    @property
    def toml(self) -> str:
        """The file of machines."""
        tables = []
        for rank, each in enumerate(self.machines):
            values = {"name": f'"m{rank}"', **asdict(each)}
            lines = [f"{key} = {value}" for key, value in values.items()]
            tables.append("\n".join(["[[machine]]", *lines, ""]))
        return "\n".join(tables)


def draw(seed: int) -> SetUp:
    """The set-up of a seed.

    >>> draw(3) == draw(3), draw(3) == draw(4)
    (True, False)
    """
    stream = random.Random(f"plan/{seed}")

    def between(least: float, most: float) -> float:
        """A number whose logarithm is uniform, with three digits."""
        return float(f"{math.exp(stream.uniform(math.log(least), math.log(most))):.3g}")

    recipe = stream.choice([*TASKS])
    fastest, spread = between(*FASTEST), between(*SPREAD)
    num_machines = stream.randint(*NUM_MACHINES)
    return SetUp(
        seed=seed,
        recipe=recipe,
        words=TASKS[recipe],
        machines=tuple(
            Machinery(
                samples_per_second=between(fastest / spread, fastest),
                mbits=between(*MBITS),
                latency_ms=between(*LATENCY_MS),
            )
            for _ in range(num_machines)
        ),
    )


# The runs.


def planned(set_up: SetUp, folder: Path, budget: str) -> tuple[Plan, list[Row]]:
    """Plan as the command does, and return the rows of the ranking."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "machines.toml"
    file.write_text(set_up.toml)
    out = folder / "plan"
    resumed = ["--resume"] if (out / STUDY).exists() else []
    words = [set_up.recipe, *set_up.words, "--machines", str(file), "--budget", budget]
    _, plan = parse_plan([*words, "--out", str(out), *resumed])
    rows = run_study(plan.study, out=out, resume=bool(resumed), num_threads=0)
    return plan, [row for row in rows.values() if "rung" not in row]


def in_full(
    plan: Plan, chosen: Sequence[Proposal], seeds: Sequence[int], folder: Path
) -> list[Row]:
    """Run proposals on all training samples, and measure them on the test split."""
    fleet = replace(plan.fleet, held_out=0.0)
    cells = tuple(
        Cell(
            name=f"{proposal.only}/seed{seed}",
            group="full",
            work=partial(_run, fleet, proposal, seed),
        )
        for proposal in chosen
        for seed in seeds
    )
    study = Study(
        name="plan-choice",
        title="",
        printed=(),
        settings={"proposals": [each.label for each in chosen], "stage": str(fleet)},
        cells=cells,
        exhibit=lambda _: Exhibits(),
    )
    out = folder / "full"
    rows = run_study(study, out=out, resume=(out / STUDY).exists(), num_threads=0)
    return [*rows.values()]


def _run(fleet: Fleet, proposal: Proposal, seed: int, session: Session) -> Row:
    return fleet.row(proposal, seed, 1.0, session)


def judge(set_up: SetUp, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Plan, run all candidates in full, and compare."""
    folder, began = out / f"set-up-{set_up.seed}", time.process_time()
    plan, ranking = planned(set_up, folder, options.budget)
    plan_seconds = time.process_time() - began
    expected, order = ranked(ranking, None)
    chosen = [plan.known[each.run] for each in order]
    target, truth = ranked(in_full(plan, chosen, options.full_seeds, folder), None)
    places = {each.run: place for place, each in enumerate(truth)}
    first = truth[places[order[0].run]]
    return {
        "set_up": asdict(set_up),
        "max_seconds": plan.fleet.seconds,
        "whole_runs": plan.study.settings["whole_runs"],
        "planned": {"target": expected, "order": [_plain(each) for each in order]},
        "in_full": {"target": target, "order": [_plain(each) for each in truth]},
        "place_of_first_choice": places[order[0].run] + 1,
        "longer_than_best": first.seconds / truth[0].seconds - 1,
        "process_seconds": [plan_seconds, time.process_time() - began - plan_seconds],
    }


def _plain(outlook: Outlook) -> dict[str, Any]:
    found = asdict(outlook)
    return {name: _rounded(value) for name, value in found.items()}


def _rounded(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, tuple | list):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def is_good(found: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the first choice is the best in all set-ups but one, and nearly so there."""
    others = [each for each in found if each["place_of_first_choice"] > 1]
    return len(others) <= 1 and all(each["longer_than_best"] <= TOLERANCE for each in others)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set-ups", type=int, nargs="+", default=[*range(6)])
    parser.add_argument("--budget", default="90runs", help="of each plan")
    parser.add_argument("--full-seeds", type=int, nargs="+", default=[*range(10, 20)])
    options = parser.parse_args()
    origin = about(options)
    found = []
    for seed in options.set_ups:
        found.append(judge(draw(seed), options.out, options))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    told = {
        **origin,
        "set_ups": found,
        "num_best": sum(each["place_of_first_choice"] == 1 for each in found),
        "is_good": is_good(found),
    }
    print(json.dumps(told, indent=1))
    return not told["is_good"]


if __name__ == "__main__":
    sys.exit(main())
