"""Systems in the environments: what becomes of the machines' time where some are slow or fail.

Fields of a row:
    algorithm: The algorithm, described.
    value: Value of the system's own setting.
    point: Steps of a trial's settings from the first ones (`studies.pattern_search`).
    error: Why the training of a trial failed; such a row has no values.
    times, accuracies or values, losses, bytes, samples, joules, node_seconds: One number per
        evaluation; bytes are per machine, joules and node-seconds those of all machines.
    metric: Metric of the values, unless it is accuracy.
    worst_worker: The metric of the worst worker's own model at the end.
    goodput, compute_used: See `edgegossip.machine.goodput.NodeUse`.
    total_speed, barrier_speed: Sum of the speeds of the environment's machines, and number of
        machines x the lowest speed, relative to the fastest machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np

import edgegossip as eg
from edgegossip.contract.errors import TrainingError, UsageError, unknown_name
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_range
from edgegossip.recipes.call import RecipeCall
from edgegossip.recipes.environment_tasks import PRESETS, TaskName, TaskSettings
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.systems import BASELINE, PROBABILITY, SYSTEMS, System
from edgegossip.runs.describe import describe
from edgegossip.runs.exhibits import Exhibits, Figure, Table, Unit
from edgegossip.runs.scoreboard import (
    Measures,
    bars,
    grouped,
    last_looks,
    learning_curve,
    metric_of,
    middle,
    score_table,
    scores,
    unit_of,
    values_of,
)
from edgegossip.runs.study import Row, Session, Study
from edgegossip.runs.tuning import without_test_data
from studies.contest import Attempt, StudySettings, Tried, TunedContest, contest_study
from studies.exhibits import Line, front_panel, table
from studies.pattern_search import Point, is_inside, next_point

TASKS: Mapping[str, tuple[TaskName, ...]] = {
    "halos": ("gpt-books", "gpt-books-by-author"),
    "stragglers": ("cifar10-dirichlet",),
    "churn": ("mnist",),
    "phones": ("har",),
    "one-slow": ("mnist",),
}
"""Tasks by environment."""
RATE_STEP = 3.0
"""Ratio of a learning rate to the next lower one that is tried."""
NUM_TRIALS = 12
NUM_EVALUATIONS = 60
NUM_TUNING_EVALUATIONS = 15
HELD_OUT = 0.1
SHORT: Mapping[str, Any] = {"num_epochs": 8.0, "num_workers": 3}
SHORT_RUNS = (BASELINE, "alone")
NUM_SHORT_TRIALS = 3


@dataclass(frozen=True, kw_only=True)
class WaitingContest(TunedContest):
    """All systems in one environment on one task, for the same time.

    Args:
        task: Task of the environment.
        names: Names of the systems.
        num_trials: Trials of each system.
        tuning_share: Length of a run that tries settings, as a share of a result's length.
        rival_share: Length of all but the baseline's runs, as a share of the baseline's.
        held_out: Share of the training samples on which trials are measured.
        arguments: Other arguments of the environment's recipe.
    """

    task: TaskName
    names: tuple[str, ...]
    num_trials: int
    tuning_share: float
    rival_share: float = 1.0
    held_out: float = HELD_OUT
    arguments: Mapping[str, Any] = field(default_factory=dict)

    tuned: ClassVar[tuple[str, ...]] = ("lr", "value")
    is_sequential: ClassVar[bool] = True

    def system(self, run: str) -> System:
        """The system whose setting a run tunes."""
        return SYSTEMS[run]

    def trials(self) -> Mapping[str, Mapping[str, Tried]]:
        return {
            name: {f"{self.folder}/tuning/{k}/{name}": {} for k in range(self.num_trials)}
            for name in self.names
        }

    def to_try(self, run: str, settings: Tried, earlier: Sequence[Row]) -> Tried:
        system = self.system(run)
        merits = {(*row["point"],): self.merit(row) for row in earlier}
        point = next_point(merits, (0, 0), partial(_exists, system))
        rate, own = point
        lr = float(f"{PRESETS[self.task].lr * RATE_STEP**rate:.3g}")
        return {"lr": lr, "value": _value(system, own), "point": [*point]}

    def merit(self, trial: Row) -> float:
        return _merit(trial)

    def comparison(self, data_dir: Path, attempt: Attempt) -> eg.Comparison:
        """The environment with the settings of an attempt; a trial is shorter."""
        num_epochs = self.arguments.get("num_epochs", PRESETS[self.task].num_epochs)
        if attempt.run != BASELINE:
            num_epochs *= self.rival_share
        given: dict[str, Any] = {
            **self.arguments,
            "task": self.task,
            "num_epochs": num_epochs * (self.tuning_share if attempt.is_tuning else 1.0),
            "num_evaluations": NUM_TUNING_EVALUATIONS if attempt.is_tuning else NUM_EVALUATIONS,
            "lr": attempt.settings["lr"],
            self.system(attempt.run).setting: attempt.settings["value"],
            "seed": attempt.seed,
            "data_dir": data_dir,
        }
        made = RecipeCall(f"environments/{self.group}", given).make()
        assert isinstance(made, eg.Comparison)
        return made

    def work(self, data_dir: Path, attempt: Attempt, session: Session) -> Row:
        comparison = self.comparison(data_dir, attempt)
        experiment = comparison.experiments[attempt.run]
        if attempt.is_tuning:  # measured on held-out samples
            held = without_test_data(experiment.task.dataset, self.held_out)
            task = replace(experiment.task, dataset=held)
            experiment = replace(experiment, task=task)
        try:
            results = session.run(experiment)
        except TrainingError as error:
            if not attempt.is_tuning:
                raise
            return {"error": str(error)}
        history, last = results.history, results.history[-1]
        assert last.use is not None  # known to this version
        return {
            "algorithm": describe(experiment.algorithm),
            **learning_curve(results),
            "losses": [each.loss for each in history],
            "bytes": [each.bytes_sent / experiment.num_workers for each in history],
            "samples": [each.samples_processed for each in history],
            "joules": [each.joules for each in history],
            "node_seconds": [each.use.node_seconds if each.use else None for each in history],
            "worst_worker": results.metric.worst(results.worker_values),
            "goodput": last.use.goodput,
            "compute_used": last.use.compute_used,
            # Of all machines of the environment, also for a system that uses one of them.
            **_speeds(comparison.experiments[BASELINE].platforms),
        }


def _value(system: System, steps: int) -> float:
    """The system's own setting this many steps from its first value."""
    _, usual, highest = sorted(system.values)
    value = system.values[0] * (highest / usual) ** steps
    return float(f"{value:.3g}") if system.setting == PROBABILITY else max(1, round(value))


def _exists(system: System, point: Point) -> bool:
    _, own = point
    if system.setting == PROBABILITY:
        return _value(system, own) <= 1.0
    return own >= 0 or _value(system, own) < _value(system, own + 1)  # at least one step


def _merit(trial: Row) -> float:
    if "error" in trial:
        return -math.inf
    value = last_looks(values_of(trial))
    if math.isnan(value):
        return -math.inf
    return value if metric_of(trial).higher_is_better else -value


def _speeds(platforms: Sequence[eg.Platform]) -> Row:
    speeds = [each.total_throughput for each in platforms]
    fastest = max(speeds)
    return {
        "total_speed": sum(speeds) / fastest,
        "barrier_speed": len(speeds) * min(speeds) / fastest,
    }


def waiting(
    settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4)),
    *,
    environments: tuple[str, ...] = tuple(TASKS),
    tasks: tuple[TaskName, ...] = (),
    num_trials: int = NUM_TRIALS,
    tuning_share: float = 0.5,
    rival_share: float = 1.0,
    width: int | None = None,
    held_out: float = HELD_OUT,
    target: float | None = None,
    drift: float = 1.0,
    loads: bool = False,
    momentum: float = 0.0,
) -> Study:
    """Equally tuned systems in five environments: time, bytes, energy, goodput.

    Each system tries equally many settings: a pattern search over its learning rate and a
    setting of its own, on a grid that grows until the best settings are inside. Trials take a
    part of a run's time, on held-out data and with a seed that no result has. They fix the
    target: the best value of `diloco`. The report shows the Pareto fronts.

    Data: books, CIFAR-10, MNIST, HAR and the list of phones. Duration: days; `--only halos`
    runs one environment.

    Args:
        settings: Settings of the study.
        environments: Environments, such as halos churn.
        tasks: Tasks for each of them; by default each environment's own.
        num_trials: Trials of each system, at least 1.
        tuning_share: Length of a trial, as a share of a result's length, in (0, 1].
        rival_share: Length of the results of all but the baseline, as a share of the
            baseline's, in (0, 1]: where they come to its best value much sooner, the rest of
            their runs need not be computed.
        width: Width of the GPT, a multiple of 4; by default 128, with a million parameters. 64
            has 0.3 million. Tasks without a GPT need None.
        held_out: Share of the training samples on which trials are measured, in (0, 1). Of the
            books, 0.01 are as many samples as results are measured on.
        target: Target of the metric; by default the best value of the baseline's trials.
        drift: Largest slowdown of machines whose speeds drift, hidden from their monitors; 1
            for none.
        loads: Whether jobs like WordCount and Sort run on the machines during training.
        momentum: Momentum of the workers' own steps, in [0, 1), beside any outer momentum; a
            GPT needs 0.

    Raises:
        UsageError: If an environment or a task is unknown.
        ValueError: If a number is out of range, or a task has no such setting.
    """
    changed = speeds_that_change(drift, loads=loads)
    if momentum:
        changed["momentum"] = momentum
    check_range("num_trials", num_trials, "at least 1")
    check_range("tuning_share", tuning_share, "in (0, 1]")
    check_range("held_out", held_out, "in (0, 1)")
    check_range("rival_share", rival_share, "in (0, 1]")
    if width is not None:
        changed["width"] = width
    varied = {**changed, "rival_share": rival_share} if rival_share < 1 else changed
    for given, known in ((environments, TASKS), (tasks, get_args(TaskName))):
        if unknown := [each for each in given if each not in known]:
            raise UsageError(unknown_name("environment or task", unknown[0], known))
    names = tuple(SYSTEMS)
    if settings.short:
        environments, tasks, names = ("one-slow",), ("digits",), SHORT_RUNS
        num_trials = NUM_SHORT_TRIALS
    contests = [
        WaitingContest(
            problem=Problem(name=environment, dataset=task, model=eg.mlp),
            setting=task,
            task=task,
            names=names,
            num_trials=num_trials,
            tuning_share=tuning_share,
            held_out=held_out,
            rival_share=rival_share,
            arguments={**(SHORT if settings.short else {}), **changed},
            seeds=settings.seeds,
        )
        for environment in environments
        for task in tasks or TASKS[environment]
    ]
    for each in contests:
        TaskSettings(task=each.task, momentum=momentum, width=width)  # raises what does not fit
    return contest_study(
        "environments/waiting",
        "Who is soonest where machines are uneven, links are slow and workers fail?",
        settings,
        contests,
        partial(exhibits, target, BASELINE, SYSTEMS.__getitem__),
        printed=(
            "HALoS (arXiv:2506.04531) is 7.5 times sooner at a loss than synchronous DiLoCo, "
            "and 2.1 times sooner than Async Local-SGD, in its environment.",
            "DivShare (arXiv:2410.12918) is 3.9 times sooner at an accuracy than AD-PSGD, with "
            "communication stragglers.",
            "Decoupled DiLoCo (arXiv:2604.21428) keeps a goodput of 88 to 93 % under failures.",
        ),
        environments=environments,
        tasks=[each.task for each in contests],
        rate_step=RATE_STEP,
        num_trials=num_trials,
        tuning_share=tuning_share,
        held_out=held_out,
        target=target,
        **varied,
    )  # without the systems, so that `--resume` can add new ones


def speeds_that_change(drift: float, *, loads: bool) -> dict[str, Any]:
    """Arguments of an environment, and settings of a study; none if speeds are constant."""
    check_range("drift", drift, "at least 1 and finite")
    return {"drift": drift, "loads": loads} if drift > 1 or loads else {}


NOTE = (
    "Medians over the seeds; a dash: never, or not known. The value is the mean of the last "
    "five of sixty evaluations of the averaged model on test data; a run may be shorter than "
    "the baseline's (`rival_share`). The worst worker is the "
    "worst of the models that are averaged. The target is fixed before the results: the best "
    "value of the baseline's trials, on held-out data, or one that was given. Bytes are the "
    "total sent, divided by the number of machines. Energy and node-seconds are those of all "
    "machines; a server is an additional machine, and alone uses one. The speed-up is "
    "the baseline's time to its own best value with the same seed / the run's time to that "
    "value; the bound is that in the environment, with the same seed. The loss at equal "
    "samples is the run's after as many samples as the baseline processes in all, divided by "
    "its last."
)
TRIALS_NOTE = (
    "The settings that won a pattern search over the learning rate and the system's own "
    "setting, with equally many trials of each system. If all neighbors of the best settings "
    "on the grid were tried, these are not at an edge of what was tried."
)
AXES: tuple[tuple[str, str, Unit], ...] = (
    ("times", "virtual time", "seconds"),
    ("bytes", "sent per machine", "bytes"),
)


def exhibits(
    target: float | None,
    baseline: str,
    system: Callable[[str], System],
    rows: Mapping[str, Row],
) -> Exhibits:
    """Figures and tables of one contest or several.

    Args:
        target: Target of the metric; None for the best value of the baseline's trials.
        baseline: Run with which the others are compared.
        system: The system whose setting a run tunes.
        rows: Rows of all cells.
    """
    results = [row for row in rows.values() if not row["is_tuning"]]
    if not results:
        return Exhibits()
    trials = [row for row in rows.values() if row["is_tuning"]]
    contests = grouped(results, "group", "setting")
    figures, tables = [], [_bounds(contests, baseline)]
    for (environment, task), mine in contests.items():
        own = [row for row in trials if (row["group"], row["setting"]) == (environment, task)]
        goal = target if target is not None else _target(own, baseline)
        found = scores(mine, baseline, 0.0, partial(_measures, goal, baseline))
        first = [row for row in mine if row["seed"] == min(each["seed"] for each in mine)]
        figures.append(
            Figure(
                name=f"{environment}-{task}",
                heading=f"{environment}, {task}",
                caption="Curves: one seed; dashed, the Pareto front: the best value of any "
                "system for at most this much. Bars: median and range over the seeds.",
                panels=(
                    *(front_panel(first, *axis) for axis in AXES),
                    bars(found, "time to target", y_label="seconds"),
                    bars(found, "goodput", y_label="goodput"),
                ),
            )
        )
        tables.append(score_table(found, heading=f"{environment}, {task}", note=NOTE))
    if trials:
        by_run = grouped(trials, "group", "setting", "run")
        chosen = (_chosen(mine, system(run)) for (*_, run), mine in by_run.items())
        tables.append(table("Trials", chosen, TRIALS_NOTE))
    return Exhibits(figures=tuple(figures), tables=tuple(tables))


def _target(trials: Sequence[Row], baseline: str) -> float | None:
    """The best value of the baseline's trials; None before there is one."""
    mine = [row for row in trials if row["run"] == baseline and "error" not in row]
    if not mine:
        return None
    return metric_of(mine[0]).best(last_looks(values_of(row)) for row in mine)


def _chosen(trials: Sequence[Row], system: System) -> Line:
    """The settings of a system that won, and whether all settings around them were tried."""
    best = max(trials, key=_merit)
    merits = {(*row["point"],): _merit(row) for row in trials}
    rates, own = ({row[name] for row in trials} for name in ("lr", "value"))
    inside = is_inside((*best["point"],), merits, partial(_exists, system))
    unit = unit_of(metric_of(best))
    return {
        "environment": ("text", best["group"]),
        "task": ("text", best["setting"]),
        "run": ("text", best["run"]),
        "learning rate": ("number", best["lr"]),
        "rates tried": ("text", f"{min(rates):g} to {max(rates):g}"),
        "own setting": ("number", best["value"]),
        "values tried": ("text", f"{min(own):g} to {max(own):g}"),
        "value": (unit, None if "error" in best else last_looks(values_of(best))),
        "neighbors tried": ("text", "all" if inside else "not all"),
    }


def _bounds(contests: Mapping[tuple[Any, ...], Sequence[Row]], baseline: str) -> Table:
    lines = []
    for (environment, task), rows in contests.items():
        total, left = middle(rows, "total_speed"), middle(rows, "barrier_speed")
        share = middle([row for row in rows if row["run"] == baseline], "goodput")
        assert total is not None
        assert left is not None
        lines.append(
            {
                "environment": ("text", environment),
                "task": ("text", task),
                "sum of speeds": ("number", total),
                "left by a barrier": ("number", left),
                "bound of a barrier": ("times", total / left),
                "bound in the environment": ("times", 1 / share if share else None),
            }
        )
    return table(
        "Bounds",
        lines,  # type: ignore[arg-type]
        "Speeds of all machines, without loads, relative to the fastest. A barrier after equal "
        "amounts of work leaves the number of machines x the lowest speed; its bound is the "
        "gain in samples per second from not waiting, without communication. The bound in the "
        "environment is 1 / the goodput of the baseline: the gain over it, with its messages "
        "and failures, of machines that always train.",
    )


def _measures(
    goal: float | None,
    compared: str,
    row: Row,
    baseline: Row | None,
    time: Seconds | None,
    speedup: float | None,
) -> Measures:
    metric, values = metric_of(row), values_of(row)
    at = None
    if goal is not None:
        at = next((i for i, each in enumerate(values) if metric.is_reached(each, goal)), None)

    def until(name: str) -> float | None:
        found: float | None = None if at is None else row[name][at]
        return found

    # At best, machines always train: 1 / goodput times as many samples a second as here.
    share = None if baseline is None or row["run"] == compared else baseline["goodput"]
    return {
        metric.name: (unit_of(metric), last_looks(values)),
        "worst worker": (unit_of(metric), row["worst_worker"]),
        "target": (unit_of(metric), goal),
        "time to target": ("seconds", until("times")),
        "samples to target": ("number", until("samples")),
        "bytes to target": ("bytes", until("bytes")),
        "energy to target": ("joules", until("joules")),
        "node-seconds to target": ("seconds", until("node_seconds")),
        "loss at equal samples": ("percent", _loss_at_equal_samples(row, baseline)),
        "speed-up": ("times", speedup),
        "of the bound": (
            "percent",
            None if speedup is None or share is None else speedup * share,
        ),
        "goodput": ("percent", row["goodput"]),
        "compute used": ("percent", row["compute_used"]),
        "bytes in all": ("bytes", row["bytes"][-1]),
        "samples in all": ("number", row["samples"][-1]),
        "learning rate": ("number", row["lr"]),
        "own setting": ("number", row["value"]),
    }


def _loss_at_equal_samples(row: Row, baseline: Row | None) -> float | None:
    """Loss after as many samples as the baseline processes in all, divided by its last loss."""
    if baseline is None or "losses" not in row or "losses" not in baseline:
        return None
    num_samples = baseline["samples"][-1]
    if row["samples"][-1] < num_samples:
        return None
    loss = float(np.interp(num_samples, row["samples"], row["losses"]))
    last: float = baseline["losses"][-1]
    return loss / last
