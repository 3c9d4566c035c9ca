"""The command that recommends an algorithm for real machines. Importing it imports torch."""

from __future__ import annotations

import math
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edgegossip.cli.recipe import parse_recipe, pick, recipe_name
from edgegossip.cli.study_command import carry_out
from edgegossip.cli.swept_values import SeveralSeeds, SweptValues, Words, label, split_values
from edgegossip.core.errors import UsageError
from edgegossip.core.metric_spec import MetricSpec
from edgegossip.core.protocol import Seconds, Steps, Train
from edgegossip.core.ranges import check_range, check_ranges
from edgegossip.experiments.exhibits import Exhibits, Figure, Panel, Series, Table
from edgegossip.experiments.experiment import Comparison, Experiment
from edgegossip.experiments.machine_list import Machine, links_between, read_machines
from edgegossip.experiments.run_folder import read_json
from edgegossip.experiments.study import STUDY, Cell, Row, Session, Study
from edgegossip.experiments.threads import one_intra_op_thread
from edgegossip.learning.task import Workload
from edgegossip.recipes.studies.learning_curve import (
    learning_curve,
    metric_of,
    unit_of,
    values_of,
)
from edgegossip.recipes.studies.scoreboard import time_to
from edgegossip.recipes.studies.server_contest import slug
from edgegossip.recipes.studies.server_tuning import without_test_data
from edgegossip.report import units

OWN = ("--machines", "--target", "--max-seconds", "--held-out")
"""Options of the plan that its candidates do not have."""
MEASURED = "samples_per_second"
"""The setting that holds the speed of this machine."""
SHOWN = 5
"""Number of candidates to print; the report has all."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SeveralSeeds):
    """Options for planning; each option of the recipe may have several values.

    Args:
        machines: TOML file with a [[machine]] table for each machine, in order of ranks: name,
            speed (relative to this machine) or samples_per_second, mbits, latency_ms, count.
        target: Value of the task's metric to reach; by default the best found less one point
            of a percentage, or one percent of other values.
        max_seconds: Virtual seconds for each candidate; unlimited by default.
    """

    machines: Path
    target: float | None = None
    max_seconds: Seconds | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, held_out="in (0, 1)")
        if self.target is not None and not math.isfinite(self.target):
            raise ValueError(f"target must be finite, got {self.target!r}")
        check_range("max_seconds", self.max_seconds, "above 0 and finite, or None")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """An algorithm of a recipe, with settings.

    Args:
        recipe: Name of the recipe.
        only: Name of the algorithm.
        words: The recipe's options as typed.
        told: Settings in which candidates differ, in words.
    """

    recipe: str
    only: str
    words: tuple[str, ...]
    told: str

    @property
    def label(self) -> str:
        """Name for tables."""
        return f"{self.only}, {self.told}" if self.told else self.only

    def command(self, start: str) -> str:
        """Command that starts it on real machines."""
        return shlex.join(
            ["edgegossip", *start.split(), self.recipe, "--only", self.only, *self.words]
        )


def plan_command(arguments: list[str]) -> int:
    """`edgegossip plan`."""
    options, study, candidates = parse_plan(arguments)
    rows = carry_out(study, options, "plan", arguments)
    for line in advice(ranked(rows.values(), options.target), candidates):
        print(line)
    return 0


def parse_plan(arguments: Sequence[str]) -> tuple[PlanOptions, Study, dict[str, Proposal]]:
    """Make a study of all algorithms of a recipe, with all given values of its options.

    Raises:
        UsageError: If the recipe, one of its settings, or a machine is invalid.
    """
    name, words = recipe_name("plan", PlanOptions, arguments)
    values = split_values("plan", name, words)
    _, options, _ = parse_recipe("plan", PlanOptions, [name, *values.fixed])
    machines = read_machines(options.machines)
    candidates, runs = _candidates(name, values, len(machines))
    if runs[0].task.metric.is_share:
        check_range("target", options.target, "in (0, 1) or None")
    measured = None
    if any(machine.samples_per_second is None for machine in machines):
        measured = _measured_before(options) or measured_throughput(runs[0])
    cells = tuple(
        Cell(
            name=f"{slug(told)}/seed{seed}",
            group="plan",
            work=partial(_run, candidate, options, machines, measured or 1.0, seed),
        )
        for told, candidate in candidates.items()
        for seed in options.seeds
    )
    study = Study(
        name=f"plan/{name.rpartition(':')[2]}",
        title=f"What should these machines run to learn {name}?",
        printed=(),
        settings={
            "recipe": name,
            "arguments": values.kept(*OWN),
            "machines": [str(machine) for machine in machines],
            MEASURED: measured,
            "max_seconds": options.max_seconds,
            "held_out": options.held_out,
        },
        cells=cells,
        exhibit=partial(_exhibits, options.target),
    )
    return options, study, candidates


def _candidates(
    name: str, values: SweptValues, num_machines: int
) -> tuple[dict[str, Proposal], list[Experiment]]:
    """All algorithms with all combinations of values, and the runs of each."""
    found, runs = {}, list[Experiment]()
    for point in values.points:
        comparison, more = _made_for(num_machines, name, [*values.fixed, *point])
        runs += comparison.experiments.values()
        for only in comparison.experiments:
            words = (*values.kept(*OWN), *point, *more)
            candidate = Proposal(recipe=name, only=only, words=words, told=label(point))
            found[candidate.label] = candidate
    return found, runs


def _made_for(wanted: int, name: str, words: Words) -> tuple[Comparison, Words]:
    """Make the recipe for the given number of machines, which may include its server."""
    for num_workers in (wanted, wanted - 1):
        more = ["--num-workers", str(num_workers)]
        _, _, chosen = parse_recipe("plan", PlanOptions, [name, *words, *more])
        if not isinstance(chosen, Comparison):
            raise UsageError(f"recipe {name!r} is a single run; plan needs a comparison")
        if {each.num_workers for each in chosen.experiments.values()} == {wanted}:
            return chosen, more
    raise UsageError(f"recipe {name!r} cannot be made for {wanted} machines")


def _measured_before(options: PlanOptions) -> float | None:
    """The speed that an interrupted plan has measured, which holds for all its candidates."""
    if not options.resume or options.out is None or not (options.out / STUDY).exists():
        return None
    found: float | None = read_json(options.out / STUDY)["settings"].get(MEASURED)
    return found


def measured_throughput(experiment: Experiment, seconds: Seconds = 2.0) -> float:
    """Measure how many training samples per second one core of this machine processes."""
    ranks = experiment.data_ranks
    workload = Workload(experiment.task, ranks, experiment.seed, experiment.algorithm.role)
    trainer, params = workload.make_trainer(ranks[0]), workload.initial_params(ranks[0])
    num_samples, began = 0, None
    with one_intra_op_thread():
        while began is None or time.perf_counter() - began < seconds:
            result = trainer.train(Train(params, Steps(5)))
            if began is None:  # the first steps get ready
                began = time.perf_counter()
            else:
                num_samples += result.num_samples
    return num_samples / (time.perf_counter() - began)


def _run(
    candidate: Proposal,
    options: PlanOptions,
    machines: Sequence[Machine],
    measured: float,
    seed: int,
    session: Session,
) -> Row:
    kept = [candidate.recipe, *candidate.words, "--seed", str(seed)]
    _, _, chosen = parse_recipe(
        "plan", PlanOptions, [*kept, "--machines", str(options.machines)]
    )
    experiment = pick(candidate.recipe, chosen, candidate.only)
    dataset = without_test_data(experiment.task.dataset, options.held_out)
    platforms = tuple(machine.platform(measured) for machine in machines)
    experiment = replace(
        experiment,
        task=replace(experiment.task, dataset=dataset),
        platforms=platforms,
        links=links_between(machines),
        max_seconds=options.max_seconds or experiment.max_seconds,
        profiles={},
    )
    results = session.run(experiment)
    history = results.history
    last, workers = history[-1], experiment.data_ranks
    capacity = sum(platforms[rank].total_throughput for rank in workers) * last.time
    return {
        "run": candidate.label,
        "seed": seed,
        **learning_curve(results),
        "bytes": last.bytes_sent / last.time / len(workers),
        "used": last.samples_processed / capacity,
    }


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The expected figures of a candidate: medians over the seeds.

    Attributes:
        run: Label of the candidate.
        times: Time to the target for each seed; infinite if never reached.
        value: Value of the metric at the end.
        metric: The metric.
        bytes_per_second: Bytes per second sent by each worker.
        used: Share of the workers' capacity that is used for training.
    """

    run: str
    times: tuple[Seconds, ...]
    value: float
    metric: MetricSpec
    bytes_per_second: float
    used: float

    @property
    def seconds(self) -> Seconds:
        """Median time to the target."""
        return statistics.median(self.times)


def ranked(rows: Iterable[Row], target: float | None) -> tuple[float, list[Outlook]]:
    """Order the candidates by time to the target, then by value; return the target too."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)

    def middle(some: list[Row], value: Callable[[Row], float]) -> float:
        return statistics.median(map(value, some))

    metric = metric_of(next(iter(runs.values()))[0])
    best = {
        run: middle(some, lambda row: metric.best(values_of(row))) for run, some in runs.items()
    }
    goal = metric.easier(metric.best(best.values()), 0.01) if target is None else target
    found = []
    for run, some in runs.items():
        reached = [time_to(row, goal) for row in some]
        found.append(
            Outlook(
                run=run,
                times=tuple(math.inf if each is None else each for each in reached),
                value=middle(some, lambda row: values_of(row)[-1]),
                metric=metric,
                bytes_per_second=middle(some, lambda row: row["bytes"]),
                used=middle(some, lambda row: row["used"]),
            )
        )
    sign = -1 if metric.higher_is_better else 1
    return goal, sorted(found, key=lambda each: (each.seconds, sign * each.value))


def advice(
    found: tuple[float, Sequence[Outlook]], candidates: Mapping[str, Proposal]
) -> Iterator[str]:
    """Write the recommendation, its reason and the commands."""
    target, order = found
    best, *others = order
    goal = units.metric_value(target, best.metric)
    easier = "a lower" if best.metric.higher_is_better else "a higher"
    if math.isinf(best.seconds):
        yield (
            f"no candidate reaches {goal}; {best.run} comes closest, with "
            f"{units.metric_value(best.value, best.metric)}; give {easier} --target, or more "
            "--max-seconds"
        )
        return
    yield f"best: {best.run}: {goal} after {units.seconds(best.seconds)}"
    names = {best.run.partition(",")[0]}
    for other in others:
        name = other.run.partition(",")[0]
        if name in names or len(names) > SHOWN:
            continue
        names.add(name)
        after = "never" if math.isinf(other.seconds) else units.seconds(other.seconds)
        yield f"  {other.run}: {after}{_why(best, other)}"
    chosen = candidates[best.run]
    yield f"try it on this machine: {chosen.command('launch')}"
    yield f"on machine R: {chosen.command('worker')} --rank R"


def _why(best: Outlook, other: Outlook) -> str:
    """Say why the runner-up is slower."""
    reasons = []
    if other.used < 0.95 * best.used:
        reasons.append(f"uses {other.used:.0%} of the machines, not {best.used:.0%}")
    if other.bytes_per_second > 1.1 * best.bytes_per_second:
        ratio = other.bytes_per_second / max(best.bytes_per_second, 1e-9)
        reasons.append(f"sends {ratio:.3g} times as much a second")
    return f" ({', '.join(reasons)})" if reasons else ""


def _exhibits(target: float | None, rows: Mapping[str, Row]) -> Exhibits:
    if not rows:
        return Exhibits()
    goal, order = ranked(rows.values(), target)
    metric = order[0].metric
    goal_text = f"{goal:.2%}" if metric.is_share else units.metric_value(goal, metric)
    table = Table(
        heading="Candidates, best first",
        columns=(
            ("run", "text"),
            ("time to target", "seconds"),
            ("soonest", "seconds"),
            ("latest", "seconds"),
            (metric.name, unit_of(metric)),
            ("sent a second", "bytes"),
            ("used", "percent"),
        ),
        rows=tuple(_line(each) for each in order),
        note="Medians over the seeds, judged by samples held out of the training data; the "
        f"target is {goal_text}. Sent: by each worker. Used: share of the workers' capacity "
        "that trains on samples; a server's is not counted.",
    )
    return Exhibits(figures=(_figure(rows.values(), order),), tables=(table,))


def _figure(rows: Iterable[Row], order: Sequence[Outlook]) -> Figure:
    rows, metric = list(rows), order[0].metric
    first = min(row["seed"] for row in rows)
    curves = tuple(
        Series(name=row["run"], x=tuple(row["times"]), y=tuple(values_of(row)))
        for row in rows
        if row["seed"] == first and row["run"] in {each.run for each in order[:SHOWN]}
    )
    panel = Panel(
        title="The best candidates",
        kind="lines",
        x_label="virtual time",
        x_unit="seconds",
        y_label=metric.name,
        y_unit=unit_of(metric),
        series=curves,
    )
    return Figure(
        name="plan",
        heading=f"{units.capitalized(metric.name)} over time",
        caption="On virtual machines like those that were given; one seed.",
        panels=(panel,),
    )


def _line(each: Outlook) -> tuple[str | float | None, ...]:
    times = (each.seconds, min(each.times), max(each.times))
    known = (None if math.isinf(time) else time for time in times)
    return (each.run, *known, each.value, each.bytes_per_second, each.used)
