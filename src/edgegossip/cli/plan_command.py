"""The command that recommends an algorithm for real machines; importing this imports torch."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from edgegossip.cli.commands import repeatable
from edgegossip.cli.plan_candidates import Proposal, candidates
from edgegossip.cli.plan_ranking import Outlook, ranked, reason
from edgegossip.cli.plan_study import Stage, cells_of, measured_cost, measured_throughput
from edgegossip.cli.recipe import parse_recipe, recipe_name
from edgegossip.cli.study_command import carry_out
from edgegossip.cli.swept_values import SeveralSeeds, split_values
from edgegossip.core.errors import UsageError
from edgegossip.core.protocol import Seconds
from edgegossip.core.ranges import check_range, check_ranges
from edgegossip.experiments.exhibits import Exhibits, Figure, Panel, Series, Table
from edgegossip.experiments.experiment import Comparison
from edgegossip.experiments.halving import Cost, ladders, most_whole_runs, total_cost
from edgegossip.experiments.machine_list import Machine, read_machines
from edgegossip.experiments.run_folder import read_json
from edgegossip.experiments.study import STUDY, Row, Study
from edgegossip.recipes.studies.server_tuning import TUNING_SEED
from edgegossip.report import units

OWN = ("--machines", "--target", "--max-seconds", "--held-out", "--budget")
"""Options of the plan, which its candidates do not have."""
WHOLE_RUNS = 6.0
"""Tuning of each candidate without a budget: enough for 27 settings and three rungs, the last
one with whole runs."""
SHOWN = 5
"""Candidates whose curves are drawn."""
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|runs)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SeveralSeeds):
    """Options for planning; each option of the recipe may have several values to try.

    Args:
        machines: TOML file with a [[machine]] table for each machine, in order of ranks: name,
            speed (relative to this machine), samples_per_second or profile, mbits, latency_ms,
            count, endpoint.
        budget: Time that the plan may take on this machine, such as 90s, 20m or 2h, or its
            number of simulated runs of full length, such as 60runs, which does not depend on
            this machine; by default six runs for the tuning of each algorithm.
        target: Accuracy to reach, in (0, 1); by default the best found less one point.
        max_seconds: Virtual seconds of a full run; by default as many samples as in the recipe.
    """

    machines: Path
    budget: str | None = None
    target: float | None = None
    max_seconds: Seconds | None = None
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, target="in (0, 1) or None", held_out="in (0, 1)")
        check_range("max_seconds", self.max_seconds, "above 0 and finite, or None")
        if self.budget is not None and _BUDGET.fullmatch(self.budget) is None:
            raise ValueError(
                f"budget must be a time, such as 90s, 20m or 2h, or a number of full runs, "
                f"such as 60runs; got {self.budget!r}"
            )
        if clash := [seed for seed in self.seeds if seed >= TUNING_SEED]:
            raise ValueError(
                f"seeds must be below {TUNING_SEED}, because tuning has those from there on; "
                f"got {clash[0]}"
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
        proposals: Settings to try of each algorithm.
        wall_seconds: Expected duration; None if it was not estimated.
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
    options, plan = parse_plan(arguments)
    print(_announcement(plan), flush=True)
    rows = carry_out(plan.study, options, repeatable("plan", arguments))
    target, order = ranked(_ranking(rows), options.target)
    print_ranking(order, target)
    for line in advice(target, order, plan):
        print(line)
    return 0


def parse_plan(arguments: Sequence[str]) -> tuple[PlanOptions, Plan]:
    """Make a study of all algorithms of a recipe, tuned within the budget.

    Raises:
        UsageError: If the recipe, one of its settings, or a machine is invalid, or the budget
            is too small.
    """
    began = time.perf_counter()
    name, words = recipe_name("plan", arguments)
    values = split_values("plan", name, words)
    _, options, _ = parse_recipe("plan", PlanOptions, [name, *values.fixed])
    machines = read_machines(options.machines)
    comparison, proposals = candidates(name, values, OWN, len(machines))
    kept = _measured_before(options)
    measured = kept.samples_per_second or _measured(machines, comparison)
    stage = Stage(
        machines=machines,
        measured=measured or 1.0,
        seconds=options.max_seconds or _duration(comparison, machines, measured or 1.0),
        held_out=options.held_out,
        target=options.target,
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
        exhibit=partial(_exhibits, options.target),
    )
    plan = Plan(
        study=study, stage=stage, proposals=proposals, wall_seconds=effort.wall_seconds
    )
    return options, plan


@dataclass(frozen=True, kw_only=True)
class _Before:
    """Measurements of an interrupted plan, which hold for all of it."""

    samples_per_second: float | None = None
    whole_runs: float | None = None


def _measured_before(options: PlanOptions) -> _Before:
    if not options.resume or options.out is None or not (options.out / STUDY).exists():
        return _Before()
    settings = read_json(options.out / STUDY)["settings"]
    return _Before(**{name: settings.get(name) for name in ("samples_per_second", "whole_runs")})


def _measured(machines: Sequence[Machine], comparison: Comparison) -> float | None:
    """Speed of this machine, if that of another is relative to it."""
    if all(machine.samples_per_second is not None for machine in machines):
        return None
    return measured_throughput(comparison.experiments[comparison.baseline])


def _duration(
    comparison: Comparison, machines: Sequence[Machine], measured: float
) -> Seconds:
    """Time in which the machines could process as many samples as those of the recipe.

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
    """Share the budget out to all candidates.

    Raises:
        UsageError: If it is too small for the runs that rank them.
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
    whole_runs = most_whole_runs(numbers, costs, len(options.seeds), allowed)
    if whole_runs is None:
        least = total_cost(ladders(numbers, 0.0), costs, len(options.seeds)) / processes
        needed = f"{math.ceil(least)}runs" if unit == "runs" else _told(least)
        raise UsageError(
            f"a budget of {options.budget} is too small: {len(numbers)} algorithms with "
            f"{len(options.seeds)} seeds need {needed} without any tuning; give a larger "
            "--budget, fewer --seeds, or a lower --max-seconds"
        )
    if unit == "runs":
        return _Effort(whole_runs=whole_runs)
    expected = total_cost(ladders(numbers, whole_runs), costs, len(options.seeds)) / processes
    return _Effort(whole_runs=whole_runs, wall_seconds=expected)


def _told(seconds: Seconds) -> str:
    """A duration for people.

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


# Results.


def _ranking(rows: Mapping[str, Row]) -> list[Row]:
    return [row for row in rows.values() if "rung" not in row]


def print_ranking(order: Sequence[Outlook], target: float) -> None:
    """Print the ranked table."""
    table = RichTable(box=None, padding=(0, 1))
    for column in ("", f"time to {units.percent(target)}", "sent", "idle", "accuracy"):
        justify: Any = "right" if column else "left"
        table.add_column(column, justify=justify, no_wrap=bool(column))
    for each in order:
        table.add_row(
            escape(each.run),
            each.told_time,
            units.data_size(each.num_bytes),
            units.percent(each.idle, 0),
            units.percent(each.accuracy),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def advice(target: float, order: Sequence[Outlook], plan: Plan) -> Iterator[str]:
    """Write the recommendation, its reason, and the commands."""
    best = order[0]
    if math.isinf(best.seconds):
        yield (
            f"no candidate reaches {units.percent(target)}; {best.run} comes closest, with "
            f"{units.percent(best.accuracy)}; give a lower --target, or more --max-seconds"
        )
        return
    yield f"best: {best.run}: {units.percent(target)} after {best.told_time}"
    yield reason(order)
    chosen = plan.known[best.run]
    yield from _at_an_end(chosen, plan.proposals[chosen.only])
    yield f"try it on this machine: {chosen.command('launch', plan.stage.seconds)}"
    start = chosen.command("worker", plan.stage.seconds)
    endpoints = [machine.endpoint for machine in plan.stage.machines]
    if None in endpoints:
        yield f"on machine R: {start} --rank R"
        return
    for rank, machine in enumerate(plan.stage.machines):
        others = " ".join(each for each in endpoints[:rank] if each)
        connect = f" --connect {others}" if others else ""
        yield (
            f"on {machine.name}: {start} --rank {rank} --listen {machine.endpoint}{connect}"
        )


def _at_an_end(chosen: Proposal, tried: Sequence[Proposal]) -> Iterator[str]:
    """Name settings whose best value is the least or the greatest that was tried."""
    for option, value in zip(chosen.words[::2], chosen.words[1::2], strict=False):
        numbers = _numbers(option, tried)
        if len(numbers) > 1 and float(value) in (min(numbers), max(numbers)):
            end = "least" if float(value) == min(numbers) else "greatest"
            yield f"note: {option} {value} is the {end} value tried; beyond it may be a better one"


def _numbers(option: str, tried: Sequence[Proposal]) -> set[float]:
    found = set()
    for each in tried:
        if option in each.words:
            found.add(each.words[each.words.index(option) + 1])
    try:
        return {float(value) for value in found}
    except ValueError:
        return set()


def _exhibits(target: float | None, rows: Mapping[str, Row]) -> Exhibits:
    ranking = _ranking(rows)
    if not ranking:
        return Exhibits()
    goal, order = ranked(ranking, target)
    first = min(row["seed"] for row in ranking)
    shown = {each.run for each in order[:SHOWN]}
    curves = tuple(
        Series(name=row["run"], x=tuple(row["times"]), y=tuple(row["accuracies"]))
        for row in ranking
        if row["seed"] == first and row["run"] in shown
    )
    panel = Panel(
        title="The best candidates",
        kind="lines",
        x_label="virtual time",
        x_unit="seconds",
        y_label="accuracy",
        y_unit="percent",
        series=curves,
    )
    figure = Figure(
        name="plan",
        heading="Accuracy over time",
        caption="On virtual machines like those that were given; one seed.",
        panels=(panel,),
    )
    return Exhibits(
        figures=(figure,), tables=(_ranking_table(order, goal), *_tuning_tables(rows))
    )


def _ranking_table(order: Sequence[Outlook], goal: float) -> Table:
    return Table(
        heading="Candidates, best first",
        columns=(
            ("run", "text"),
            ("time to target", "seconds"),
            ("soonest", "seconds"),
            ("latest", "seconds"),
            ("accuracy", "percent"),
            ("sent", "bytes"),
            ("samples", "number"),
            ("idle", "percent"),
            ("busiest uplink", "percent"),
        ),
        rows=tuple(_line(each) for each in order),
        note="Medians over the seeds, judged by samples held out of the training data, with "
        f"seeds that no setting was chosen by; the target is {goal:.2%}. {reason(order)} Sent "
        "and samples: of all machines, up to the target. Idle: share of the machines' capacity "
        "that does not train; a server's machine does not. Busiest uplink: share of time in "
        "which it sends.",
    )


def _line(each: Outlook) -> tuple[str | float | None, ...]:
    times = (each.seconds, min(each.times), max(each.times))
    known = (None if math.isinf(time) else time for time in times)
    counts = (each.num_bytes, each.samples, each.idle, each.uplink)
    return (each.run, *known, each.accuracy, *counts)


def _tuning_tables(rows: Mapping[str, Row]) -> Iterator[Table]:
    tried = [row for row in rows.values() if "rung" in row]
    if not tried:
        return
    lines = [
        (
            row["run"],
            f"{row['rung']} of {row['num_rungs']}",
            row["times"][-1] if row["times"] else None,
            max(row["accuracies"], default=None),
        )
        for row in tried
    ]
    yield Table(
        heading="Tuning",
        columns=(
            ("run", "text"),
            ("rung", "text"),
            ("duration", "seconds"),
            ("best accuracy", "percent"),
        ),
        rows=tuple(lines),
        note="Each rung keeps the best third, for runs that are three times as long; a dash: "
        "it diverged.",
    )
