"""A plan: which algorithm and settings of a recipe suit given machines, within a budget."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from edgegossip.contract.errors import UsageError, unknown_name
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_range, check_ranges
from edgegossip.plan.candidates import Proposal, candidates
from edgegossip.plan.grid import Grid
from edgegossip.plan.halving import Cost, Ranking, ladders, most_whole_runs, total_cost
from edgegossip.plan.machines import Machine
from edgegossip.plan.results import answered
from edgegossip.plan.study import LOOKS, Fleet, cells_of, measured_cost, measured_throughput
from edgegossip.recipes.call import RecipeCall
from edgegossip.report import units
from edgegossip.runs.experiment import Comparison
from edgegossip.runs.study import Study
from edgegossip.runs.tuning import TUNING_SEED, check_seeds

WHOLE_RUNS = 6.0
"""Whole runs for tuning each algorithm if there is no budget: enough for 27 settings and three
rungs, the last of them with whole runs."""
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|runs)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class BudgetError(UsageError):
    """A budget is too small.

    Attributes:
        least: The least budget, without any tuning, in whole runs: such as 27runs.
    """

    def __init__(self, message: str, least: str) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Settings of a plan.

    Args:
        only: Algorithms to consider; by default, all algorithms of the recipe.
        budget: Time that the plan may take on this machine, such as 90s, 20m or 2h, after which
            only each algorithm's first ranking run still begins; or a number of full simulated
            runs, such as 60runs, independent of this machine's speed. By
            default, six runs to tune each algorithm.
        target: Value of the task's metric to reach; by default, one percentage point short of
            the best value found, or one percent if the metric is not a share; beyond the
            untrained model's value in any case.
        max_seconds: Virtual seconds of a full run; by default, the time to process as many
            samples as in the recipe.
        seeds: Seeds for each setting, e.g. 0 1 2 or 0..4.
        held_out: Share of the training samples to hold out for ranking settings.

    Raises:
        ValueError: If a setting is out of range.
    """

    only: tuple[str, ...] = ()
    budget: str | None = None
    target: float | None = None
    max_seconds: Seconds | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    held_out: float = 0.1

    def __post_init__(self) -> None:
        check_seeds(self.seeds)
        check_ranges(self, held_out="in (0, 1)")
        if self.target is not None and not math.isfinite(self.target):
            raise ValueError(f"target must be finite, got {self.target!r}")
        check_ranges(self, max_seconds="above 0 and finite, or None")
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
        fleet: The machines.
        proposals: Settings to try for each algorithm.
        wall_seconds: Expected wall-clock duration; None if it was not estimated.
    """

    study: Study
    fleet: Fleet
    proposals: Mapping[str, Sequence[Proposal]]
    wall_seconds: Seconds | None

    @property
    def known(self) -> dict[str, Proposal]:
        """Proposals by label."""
        return {each.label: each for some in self.proposals.values() for each in some}

    @property
    def announcement(self) -> str:
        """A line about the runs of the plan."""
        num_tuning = sum(cell.group == "tuning" for cell in self.study.cells)
        num_settings = sum(len(some) for some in self.proposals.values())
        num_ranking = len(self.study.cells) - num_tuning
        about = f", about {_duration_text(self.wall_seconds)}" if self.wall_seconds else ""
        untuned = "" if num_tuning else "; the budget allows no tuning, only the first setting"
        return (
            f"{len(self.proposals)} algorithms with {num_settings} settings on "
            f"{len(self.fleet.machines)} machines: {num_tuning} runs to tune, {num_ranking} of "
            f"{units.seconds(self.fleet.seconds)} to rank{about}{untuned}"
        )


def make_plan(
    call: RecipeCall,
    machines: Sequence[Machine],
    settings: PlanSettings = PlanSettings(),
    *,
    values: Grid | None = None,
    num_processes: int = 1,
    earlier: Mapping[str, Any] | None = None,
) -> Plan:
    """Make a study of all algorithms of a recipe, tuned within the budget.

    ::

        plan = make_plan(RecipeCall("quickstart", {"batch_size": 8}), read_machines(path))
        rows = run_study(plan.study, out="runs/plan")
        target, order = ranked(ranking_rows(rows), None)

    Args:
        call: The recipe, with the arguments that all candidates have.
        machines: One for each rank.
        settings: Settings of the plan.
        values: Values to try of further arguments, instead of those of the recipe.
        num_processes: Number of parallel runs, for a budget in time.
        earlier: Settings of the study of the same plan before it was interrupted. What was
            measured then applies to the whole plan.

    Raises:
        UsageError: If the recipe or one of its arguments is invalid.
        BudgetError: If the budget is too small.
    """
    began, earlier = time.perf_counter(), earlier or {}
    comparison, every = candidates(call, values or {}, len(machines))
    proposals = proposals_of(every, settings.only)
    if comparison.metric.is_share:
        check_range("target", settings.target, "in (0, 1) or None")
    measured = earlier.get("samples_per_second") or _measured(machines, comparison)
    fleet = Fleet(
        machines=tuple(machines),
        measured=measured or 1.0,
        seconds=settings.max_seconds or _duration(comparison, machines, measured or 1.0),
        held_out=settings.held_out,
        target=settings.target,
    )
    whole_runs: float | None
    whole_runs, wall_seconds = earlier.get("whole_runs"), None
    if whole_runs is None:
        whole_runs, wall_seconds = _effort(settings, fleet, proposals, num_processes, began)
        fleet = _limited(fleet, settings, proposals, whole_runs, began)
    cells = cells_of(fleet, proposals, whole_runs, settings.seeds)
    ranking = {cell.name for cell in cells if cell.group == "ranking"}
    study = Study(
        name=f"plan/{call.name.rpartition(':')[2]}",
        title=f"What should these machines run to learn {call.name}?",
        printed=(),
        settings=_recorded(call, settings, fleet, proposals, measured, whole_runs),
        cells=cells,
        exhibit=partial(answered, settings.target, fleet, proposals, ranking),
    )
    return Plan(study=study, fleet=fleet, proposals=proposals, wall_seconds=wall_seconds)


def on_machines(call: RecipeCall, machines: Sequence[Machine]) -> Comparison:
    """Make a recipe's comparison with simulated platforms and links like real machines.

    All runs last until these machines could process as many samples as the recipe's could, and
    are evaluated at the same times.

    Args:
        call: The recipe, with its arguments.
        machines: One for each rank.

    Raises:
        UsageError: If the recipe cannot be made for so many machines, or has no time limit.
    """
    comparison, _ = candidates(call, {}, len(machines))
    measured = _measured(machines, comparison) or 1.0
    fleet = Fleet(
        machines=tuple(machines),
        measured=measured,
        seconds=_duration(comparison, machines, measured),
        held_out=0.0,
        target=None,
    )
    return replace(
        comparison,
        experiments={
            name: fleet.placed(experiment, fleet.seconds, LOOKS)
            for name, experiment in comparison.experiments.items()
        },
    )


def _recorded(
    call: RecipeCall,
    settings: PlanSettings,
    fleet: Fleet,
    proposals: Mapping[str, Sequence[Proposal]],
    measured: float | None,
    whole_runs: float,
) -> dict[str, Any]:
    """The settings of the study, which a resumed plan must have, too."""
    return {
        "recipe": call.name,
        "arguments": call.words()[1:],
        "values": {only: [x.setting.label for x in some] for only, some in proposals.items()},
        # Endpoints affect only the commands that are printed.
        "machines": [str(replace(machine, endpoint=None)) for machine in fleet.machines],
        "samples_per_second": measured,
        "max_seconds": fleet.seconds,
        "held_out": settings.held_out,
        "target": settings.target,
        "budget": settings.budget,
        "whole_runs": whole_runs,
    }


def proposals_of(
    every: Mapping[str, list[Proposal]], only: Sequence[str]
) -> dict[str, list[Proposal]]:
    """The proposals of the named algorithms, or of all algorithms if none are named.

    Raises:
        UsageError: If there is no such algorithm.
    """
    if unknown := [name for name in only if name not in every]:
        raise UsageError(unknown_name("algorithm", unknown[0], every))
    return {name: some for name, some in every.items() if name in only or not only}


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


def _effort(
    settings: PlanSettings,
    fleet: Fleet,
    proposals: Mapping[str, Sequence[Proposal]],
    num_processes: int,
    began: float,
) -> tuple[float, Seconds | None]:
    """Whole runs to tune each algorithm within the budget; and the plan's duration, if timed.

    Raises:
        BudgetError: If the budget is too small for the runs that rank the candidates.
    """
    amount, unit = settings.budget_amount
    if not unit:
        return amount, None
    numbers = {only: len(some) for only, some in proposals.items()}
    unit_costs = dict.fromkeys(numbers, Cost(start=0.0, whole=1.0))
    if unit == "runs":
        costs = unit_costs
        processes, allowed = 1, amount
    else:
        costs = {only: measured_cost(fleet, some[0]) for only, some in proposals.items()}
        processes = num_processes
        allowed = (amount * _SECONDS[unit] - (time.perf_counter() - began)) * processes
    ranking = Ranking(len(numbers), len(settings.seeds))
    whole_runs = most_whole_runs(numbers, costs, ranking, allowed)
    if whole_runs is None:
        untuned = ladders(numbers, 0.0)
        least = total_cost(untuned, costs, ranking) / processes
        least_runs = f"{math.ceil(total_cost(untuned, unit_costs, ranking))}runs"
        needed = least_runs if unit == "runs" else _duration_text(least)
        raise BudgetError(
            f"a budget of {settings.budget} is too small: {len(numbers)} algorithms with "
            f"{len(settings.seeds)} seeds need {needed} without any tuning; give a larger "
            f"--budget, fewer --seeds, or a --max-seconds below {fleet.seconds:g}, which they "
            "have now",
            least_runs,
        )
    if unit == "runs":
        return whole_runs, None
    return whole_runs, total_cost(ladders(numbers, whole_runs), costs, ranking) / processes


def _limited(
    fleet: Fleet,
    settings: PlanSettings,
    proposals: Mapping[str, Sequence[Proposal]],
    whole_runs: float,
    began: float,
) -> Fleet:
    """The fleet with the times at which a budget in time ends, for tuning and for the rest.

    Runs may take longer than their beginnings promised. Tuning then ends with its share of the
    budget, as planned, and so leaves the rest to the ranking.
    """
    amount, unit = settings.budget_amount
    if unit not in _SECONDS:
        return fleet
    now, left = time.time(), amount * _SECONDS[unit] - (time.perf_counter() - began)
    numbers = {only: len(some) for only, some in proposals.items()}
    alike = dict.fromkeys(numbers, Cost(start=0.0, whole=1.0))
    ranking = Ranking(len(numbers), len(settings.seeds)).cost(alike)
    tuning = sum(each.cost(alike[only]) for only, each in ladders(numbers, whole_runs).items())
    share = tuning / (tuning + ranking)
    return replace(fleet, tuning_until=now + share * left, until=now + left)


def _duration_text(seconds: Seconds) -> str:
    """Format a duration in readable form.

    >>> _duration_text(29.2), _duration_text(61.0)
    ('30s', '2m')
    """
    return f"{math.ceil(seconds)}s" if seconds <= 60 else f"{math.ceil(seconds / 60)}m"
