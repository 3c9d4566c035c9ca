"""The command that plans for real machines. Importing this module imports torch."""

from __future__ import annotations

import json
import math
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgegossip.cli.recipe import parse_recipe, pick, recipe_name
from edgegossip.cli.study_command import carry_out
from edgegossip.cli.swept_values import SeveralSeeds, split_values
from edgegossip.contract.errors import UsageError, unknown_name
from edgegossip.contract.metrics import MetricSpec
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_range, check_ranges
from edgegossip.plan.candidates import Proposal, candidates
from edgegossip.plan.halving import Cost, Ranking, ladders, most_whole_runs, total_cost
from edgegossip.plan.machines import Machine, read_machines
from edgegossip.plan.ranking import ranked
from edgegossip.plan.results import advice, exhibits, print_ranking, ranking_rows
from edgegossip.plan.study import Stage, cells_of, measured_cost, measured_throughput
from edgegossip.report import units
from edgegossip.runs.experiment import Comparison
from edgegossip.runs.files import read_json
from edgegossip.runs.study import STUDY, Study
from edgegossip.runs.tuning import TUNING_SEED

OWN = (
    "--machines",
    "--measure",
    "--only",
    "--target",
    "--max-seconds",
    "--held-out",
    "--budget",
)
"""Options of the plan itself, which its candidates do not have."""
WHOLE_RUNS = 6.0
"""Whole runs for tuning each algorithm if there is no budget: enough for 27 settings and three
rungs, the last of them with whole runs."""
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|runs)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SeveralSeeds):
    """Options for planning; each option of the recipe may have several values to try.

    Args:
        machines: TOML file with a [[machine]] table for each machine, in rank order: name,
            speed (relative to this machine), samples_per_second or profile, mbits, latency_ms,
            count, endpoint.
        measure: Measure this machine for this many seconds and print its table for the
            `--machines` file; nothing is planned.
        only: Algorithms to consider; by default, all algorithms of the recipe.
        budget: Time that the plan may take on this machine, such as 90s, 20m or 2h; or a number
            of full simulated runs, such as 60runs, independent of this machine's speed. By
            default, six runs to tune each algorithm.
        target: Value of the task's metric to reach; by default, one percentage point short of
            the best value found, or one percent if the metric is not a share; beyond the
            untrained model's value in any case.
        max_seconds: Virtual seconds of a full run; by default, the time to process as many
            samples as in the recipe.
    """

    machines: Path | None = None
    measure: Seconds | None = None
    only: tuple[str, ...] = ()
    budget: str | None = None
    target: float | None = None
    max_seconds: Seconds | None = None
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, held_out="in (0, 1)")
        if self.target is not None and not math.isfinite(self.target):
            raise ValueError(f"target must be finite, got {self.target!r}")
        check_ranges(self, max_seconds="above 0 and finite, or None")
        check_ranges(self, measure="above 0 and finite, or None")
        if (self.machines is None) == (self.measure is None):
            raise ValueError(
                "plan needs --machines FILE.toml with a table for each machine; on each of "
                "them, --measure 10 prints its table"
            )
        if self.budget is not None and _BUDGET.fullmatch(self.budget) is None:
            raise ValueError(
                f"budget must be a time, such as 90s, 20m or 2h, or a number of full runs, "
                f"such as 60runs; got {self.budget!r}"
            )
        if max(self.seeds) + 2 * len(self.seeds) >= TUNING_SEED:
            raise ValueError(
                f"seeds, and twice as many after the last one for the finalists, must be below "
                f"{TUNING_SEED}, where those of the tuning begin; got {self.seeds}"
            )

    @property
    def budget_amount(self) -> tuple[float, str]:
        """Number and unit; the unit is empty without a budget."""
        found = _BUDGET.fullmatch(self.budget or "")
        return (float(found[1]), found[2]) if found else (WHOLE_RUNS, "")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan before its runs.

    Args:
        study: All runs.
        stage: The machines.
        proposals: Settings to try for each algorithm.
        wall_seconds: Expected wall-clock duration; None if it was not estimated.
    """

    study: Study
    stage: Stage
    proposals: Mapping[str, Sequence[Proposal]]
    wall_seconds: Seconds | None

    @property
    def known(self) -> dict[str, Proposal]:
        """Proposals by label."""
        return {each.label: each for some in self.proposals.values() for each in some}


def plan_command(arguments: list[str]) -> int:
    """`edgegossip plan`."""
    if any(word.partition("=")[0] == "--measure" for word in arguments):
        print(measured_machine(arguments))
        return 0
    options, plan = parse_plan(arguments)
    print(_announcement(plan), flush=True)
    rows = carry_out(plan.study, options, "plan", arguments)
    target, order = ranked(ranking_rows(rows), options.target)
    print_ranking(order, target)
    for line in advice(target, order, plan.stage, plan.proposals):
        print(line)
    return 0


def measured_machine(arguments: Sequence[str]) -> str:
    """Measure this machine, and return its table for the `--machines` file."""
    name, options, chosen = parse_recipe("plan", PlanOptions, arguments)
    speed = measured_throughput(pick(name, chosen, None), options.measure or 0.0)
    return (
        f"[[machine]]\nname = {json.dumps(socket.gethostname())}\n"
        f"samples_per_second = {speed:.4g}\n"
        "# mbits = 100       # of its link, each way\n"
        "# latency_ms = 5    # a quarter of the time of `doctor --connect` without --tls\n"
    )


def parse_plan(arguments: Sequence[str]) -> tuple[PlanOptions, Plan]:
    """Make a study of all algorithms of a recipe, tuned within the budget.

    Raises:
        UsageError: If the recipe, one of its settings, or a machine is invalid, or the budget
            is too small.
    """
    began = time.perf_counter()
    name, words = recipe_name("plan", PlanOptions, arguments)
    values = split_values("plan", name, words)
    _, options, _ = parse_recipe("plan", PlanOptions, [name, *values.fixed])
    assert options.machines is not None
    machines = read_machines(options.machines)
    comparison, every = candidates(name, values, OWN, len(machines))
    proposals = _chosen(every, options.only)
    kept = _measured_before(options)
    measured = kept.samples_per_second or _measured(machines, comparison)
    stage = Stage(
        machines=machines,
        measured=measured or 1.0,
        seconds=options.max_seconds or _duration(comparison, machines, measured or 1.0),
        held_out=options.held_out,
        target=_target(options, comparison.metric),
    )
    effort = _effort(options, stage, proposals, kept.whole_runs, began)
    found = ladders({only: len(some) for only, some in proposals.items()}, effort.whole_runs)
    study = Study(
        name=f"plan/{name.rpartition(':')[2]}",
        title=f"What should these machines run to learn {name}?",
        printed=(),
        settings={
            "recipe": name,
            "arguments": values.kept(*OWN),
            "values": {only: [each.told for each in some] for only, some in proposals.items()},
            "machines": [str(machine) for machine in machines],
            "samples_per_second": measured,
            "max_seconds": stage.seconds,
            "held_out": options.held_out,
            "target": options.target,
            "budget": options.budget,
            "whole_runs": effort.whole_runs,
        },
        cells=cells_of(stage, proposals, found, options.seeds),
        exhibit=partial(exhibits, options.target),
    )
    plan = Plan(study=study, stage=stage, proposals=proposals, wall_seconds=effort.wall_seconds)
    return options, plan


def _target(options: PlanOptions, metric: MetricSpec) -> float | None:
    if metric.is_share:
        check_range("target", options.target, "in (0, 1) or None")
    return options.target


def _chosen(
    every: Mapping[str, list[Proposal]], only: Sequence[str]
) -> dict[str, list[Proposal]]:
    """The proposals of the named algorithms, or of all algorithms if none are named."""
    if unknown := [name for name in only if name not in every]:
        raise UsageError(unknown_name("algorithm", unknown[0], every))
    return {name: some for name, some in every.items() if name in only or not only}


@dataclass(frozen=True, kw_only=True)
class _Before:
    """Measurements made before a plan was interrupted, which apply to the whole plan."""

    samples_per_second: float | None = None
    whole_runs: float | None = None


def _measured_before(options: PlanOptions) -> _Before:
    if not options.resume or options.out is None or not (options.out / STUDY).exists():
        return _Before()
    settings = read_json(options.out / STUDY)["settings"]
    return _Before(
        **{name: settings.get(name) for name in ("samples_per_second", "whole_runs")}
    )


def _measured(machines: Sequence[Machine], comparison: Comparison) -> float | None:
    """Speed of this machine; None if no machine's speed is relative to it."""
    if all(machine.samples_per_second is not None for machine in machines):
        return None
    return measured_throughput(comparison.experiments[comparison.baseline])


def _duration(comparison: Comparison, machines: Sequence[Machine], measured: float) -> Seconds:
    """Time in which `machines` process as many samples as the recipe's machines in a run.

    Raises:
        UsageError: If no run of the recipe has a time limit.
    """
    experiments = sorted(
        (each for each in comparison.experiments.values() if each.max_seconds is not None),
        key=lambda each: -len(each.data_ranks),
    )
    if not experiments:
        raise UsageError("the runs of this recipe have no time limit; give --max-seconds")
    longest = experiments[0]
    ranks = longest.data_ranks
    theirs = sum(longest.platforms[rank].total_throughput for rank in ranks)
    ours = sum(machines[rank].platform(measured).throughput for rank in ranks)
    return float(f"{(longest.max_seconds or 0.0) * theirs / ours:.3g}")


# The budget.


@dataclass(frozen=True, kw_only=True)
class _Effort:
    whole_runs: float
    wall_seconds: Seconds | None = None


def _effort(
    options: PlanOptions,
    stage: Stage,
    proposals: Mapping[str, Sequence[Proposal]],
    before: float | None,
    began: float,
) -> _Effort:
    """Divide the budget among all candidates.

    Raises:
        UsageError: If the budget is too small for the runs that rank the candidates.
    """
    amount, unit = options.budget_amount
    if before is not None or not unit:
        return _Effort(whole_runs=amount if before is None else before)
    numbers = {only: len(some) for only, some in proposals.items()}
    if unit == "runs":
        costs = dict.fromkeys(numbers, Cost(start=0.0, whole=1.0))
        processes, allowed = 1, amount
    else:
        costs = {only: measured_cost(stage, some[0]) for only, some in proposals.items()}
        processes = options.num_processes
        allowed = (amount * _SECONDS[unit] - (time.perf_counter() - began)) * processes
    ranking = Ranking(len(numbers), len(options.seeds))
    whole_runs = most_whole_runs(numbers, costs, ranking, allowed)
    if whole_runs is None:
        least = total_cost(ladders(numbers, 0.0), costs, ranking) / processes
        needed = f"{math.ceil(least)}runs" if unit == "runs" else _told(least)
        raise UsageError(
            f"a budget of {options.budget} is too small: {len(numbers)} algorithms with "
            f"{len(options.seeds)} seeds need {needed} without any tuning; give a larger "
            "--budget, fewer --seeds, or a lower --max-seconds"
        )
    if unit == "runs":
        return _Effort(whole_runs=whole_runs)
    expected = total_cost(ladders(numbers, whole_runs), costs, ranking) / processes
    return _Effort(whole_runs=whole_runs, wall_seconds=expected)


def _told(seconds: Seconds) -> str:
    """Format a duration in readable form.

    >>> _told(29.2), _told(61.0)
    ('30s', '2m')
    """
    return f"{math.ceil(seconds)}s" if seconds <= 60 else f"{math.ceil(seconds / 60)}m"


def _announcement(plan: Plan) -> str:
    num_tuning = sum(cell.group == "tuning" for cell in plan.study.cells)
    num_settings = sum(len(some) for some in plan.proposals.values())
    num_ranking = len(plan.study.cells) - num_tuning
    about = f", about {_told(plan.wall_seconds)}" if plan.wall_seconds else ""
    return (
        f"{len(plan.proposals)} algorithms with {num_settings} settings on "
        f"{len(plan.stage.machines)} machines: {num_tuning} runs to tune, {num_ranking} of "
        f"{units.seconds(plan.stage.seconds)} to rank{about}"
    )
