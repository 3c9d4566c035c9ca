"""Contests of parameter servers on the same problem and machines, up to a common loss.

Fields of a row:
    group, setting, run, seed: Names of the contest, the machines and the run.
    lr, value: Learning rate, and value of the method's own setting; null without one.
    seconds_to_loss: Time to the loss; null if it was never reached.
    seconds, final_loss, final_accuracy: Values at the end of the run.
    samples, bytes, megabits_per_second: Totals of all workers and links.
    times, losses, accuracies: One number per evaluation.
    error: Error of a diverged run; absent from other rows.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import edgegossip as eg
from edgegossip.algorithms.server.reward import PaperReward
from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Seconds
from edgegossip.recipes.baselines import HOME_LINK
from edgegossip.recipes.parameter_servers import heterogeneous
from edgegossip.recipes.problems import Problem
from edgegossip.runs.describe import describe
from edgegossip.runs.exhibits import Exhibits, Panel
from edgegossip.runs.experiment import LossTarget
from edgegossip.runs.scoreboard import Measures, Score, contest_key, score
from edgegossip.runs.study import Cell, Row, Session
from edgegossip.runs.tuning import slug
from studies.contest import (
    Attempt,
    Contender,
    Contenders,
    Contest,
    Option,
    Tried,
    TunedContest,
)
from studies.exhibits import Line, figure_and_tables, panel, table

WINDOW: Seconds = 20.0
"""Check period where it is not tuned: 40 steps of the fastest worker; 60 s in the paper."""
MIN_INTERVAL: Seconds = 0.5
"""Minimum seconds between two commits: a step of the fastest worker."""
RATES = (0.15, 0.45, 0.05)
"""Candidate learning rates for all methods, with the most promising first."""


STEPS = (5, 20, 80)


def _around(wrapper: Callable[..., eg.Algorithm[Any]], inner: Callable[..., Any]) -> Any:  # noqa: ANN401
    """A wrapper and what it is around, as one algorithm with the arguments of the inner one."""
    return lambda **options: wrapper(inner=inner(**options))


def methods(loss: float) -> Contenders:
    """The parameter servers of the studies; the published ADSP expects to end at `loss`."""
    method = partial(Contender, topology=None)
    tau, window = Option("tau", "tau", STEPS), Option("window", "window", (5, 10, 20))
    timed = {"window": WINDOW, "min_interval": MIN_INTERVAL}
    as_published = {
        "min_interval": MIN_INTERVAL,
        "reward": PaperReward(final_loss=loss),
        "growth": 1.0,
        "waits_for_answer": True,
    }
    return {
        "bsp": method(algorithm=eg.BSP),
        "bsp, batches tuned": method(algorithm=_around(eg.BatchTune, eg.BSP)),
        "ssp": method(algorithm=eg.SSP, option=Option("s", "slack", (4, 40, 160))),
        "asp": method(algorithm=eg.ASP),
        "fixed-adacomm": method(algorithm=eg.FixedADACOMM, option=tau),
        "fixed-adacomm, batches tuned": method(
            algorithm=_around(eg.BatchTune, eg.FixedADACOMM), option=tau
        ),
        "fixed-adacomm, shares balanced": method(
            algorithm=_around(eg.EdgeGossip, eg.FixedADACOMM), option=tau
        ),
        "adacomm": method(algorithm=eg.ADACOMM, options={"window": WINDOW}, option=tau),
        "adsp-plus": method(
            algorithm=eg.ADSPPlus, options=timed, option=Option("rate", "rate", (2, 5, 12))
        ),
        "adsp": method(
            algorithm=eg.ADSP, options={"min_interval": MIN_INTERVAL}, option=window
        ),
        "adsp, as published": method(algorithm=eg.ADSP, options=as_published, option=window),
    }


OPTIONS = {name: each.option for name, each in methods(loss=1.0).items()}
"""The setting that each method can tune, by its name; None for a method without one."""


SERVER_SPEED = 16.0
"""Throughput of the server (which measures losses) relative to the fastest worker."""
NUM_LOOKS = 10


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The goal at which a run ends.

    Args:
        loss: Target for the mean of the last ten evaluations.
        look_seconds: Seconds between evaluations.
        max_seconds: Seconds after which a run has failed.
        validation_share: Share of the training samples to hold out for methods that measure a
            loss.
    """

    loss: float
    look_seconds: Seconds
    max_seconds: Seconds
    validation_share: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A server and workers.

    Args:
        name: Name, such as "H = 2".
        platforms: Platforms, with the server's first.
        links: Links between them.
    """

    name: str
    platforms: tuple[eg.Platform, ...]
    links: eg.Links = eg.Links(default=HOME_LINK)

    @property
    def num_workers(self) -> int:
        return len(self.platforms) - 1


def machines(
    name: str,
    problem: Problem,
    *,
    num_workers: int,
    heterogeneity: float,
    bandwidth: float = HOME_LINK.bandwidth,
    delay: Seconds = 0.0,
) -> Cluster:
    """Make a server and workers with evenly spread speeds and equal links.

    Args:
        name: See `Cluster`.
        problem: Problem with the speed of the fastest worker.
        num_workers: Number of workers, not counting the server.
        heterogeneity: H, the mean of the workers' speeds over their minimum.
        bandwidth: Bandwidth of each uplink and downlink, including the server's, in bytes per
            second.
        delay: Additional delay of each message, in seconds.
    """
    fastest = problem.settings.throughput
    speeds = heterogeneous(num_workers, fastest, heterogeneity)
    server = eg.Platform(name="server", throughput=SERVER_SPEED * fastest)
    return Cluster(
        name=name,
        platforms=tuple(
            replace(each, uplink=bandwidth, downlink=bandwidth) for each in (server, *speeds)
        ),
        links=eg.Links(
            default=replace(HOME_LINK, latency=HOME_LINK.latency + delay, bandwidth=bandwidth)
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ServerContest(Contest):
    """Several methods with their settings, on the same machines.

    Args:
        machines: A server and workers.
        goal: Goal at which runs end, the same for all methods.
        choices: Settings by name of the method: `lr`, and `value` of its own setting.
    """

    machines: Cluster
    goal: Goal
    choices: Mapping[str, Tried]

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        folder = f"{self.group}/{slug(self.machines.name)}/seed{self.seed}"
        for name in self.choices:
            yield self.cell(f"{folder}/{slug(name)}", partial(self._work, data_dir, name))

    def plain(self) -> dict[str, Any]:
        """Everything that the rows depend on, except problem and seed, as JSON values."""
        return {
            "group": self.group,
            "machines": describe(self.machines),
            "goal": asdict(self.goal),
            "choices": self.choices,
        }

    def _work(self, data_dir: Path, name: str, session: Session) -> Row:
        choice = self.choices[name]
        settings = replace(self.problem.settings, lr=choice["lr"])
        problem = replace(self.problem, settings=settings)
        found = until_loss(
            problem,
            data_dir,
            self.machines,
            self.goal,
            name,
            choice["value"],
            self.seed,
            session,
        )
        facts = {"group": self.group, "setting": self.machines.name, "run": name}
        return {**facts, "seed": self.seed, **choice, **found}


def until_loss(
    problem: Problem,
    data_dir: Path,
    machines: Cluster,
    goal: Goal,
    name: str,
    value: float | None,
    seed: int,
    session: Session,
) -> Row:
    """Run a method until its goal; return the measured fields of its row."""
    problem = replace(problem, validation_share=goal.validation_share)
    experiment = eg.Experiment(
        task=problem.task(data_dir),
        algorithm=methods(goal.loss)[name].build(machines.num_workers, value=value),
        platforms=machines.platforms,
        links=machines.links,
        seed=seed,
        max_seconds=goal.max_seconds,
        until=LossTarget(loss=goal.loss, num_looks=NUM_LOOKS),
        evaluation_interval=goal.look_seconds,
        name=slug(name),
    )
    try:
        return _curve(session.run(experiment))
    except TrainingError as error:  # divergence is a result, not a failure of the study
        return {**_DIVERGED, "seconds": goal.max_seconds, "error": str(error)}


_DIVERGED: Mapping[str, Any] = {
    **dict.fromkeys(("seconds_to_loss", "final_loss", "final_accuracy")),
    **{"samples": 0, "bytes": 0, "megabits_per_second": 0.0},
    **{"times": [], "losses": [], "accuracies": []},
}


def _curve(results: eg.Results) -> dict[str, Any]:
    """Return the measured fields of a run's row."""
    last = results.history[-1]
    is_there = results.reason == "target"
    return {
        "seconds_to_loss": last.time if is_there else None,
        "seconds": last.time,
        "final_loss": last.loss,
        "final_accuracy": last.accuracy,
        "samples": last.samples_processed,
        "bytes": last.bytes_sent,
        "megabits_per_second": 8e-6 * last.bytes_sent / last.time,
        "times": [each.time for each in results.history],
        "losses": [each.loss for each in results.history],
        "accuracies": [each.accuracy for each in results.history],
    }


# Scores.


def server_scores(rows: Iterable[Row]) -> list[Score]:
    """Compute the time of each run, and the time that ADSP saves with the same seed."""
    rows = list(rows)
    adsp = {contest_key(row): row for row in rows if row["run"] == "adsp"}
    return [score(row, _measures(row, adsp.get(contest_key(row)))) for row in rows]


TIME = "time to loss"


def _measures(row: Row, adsp: Row | None) -> Measures:
    time: Seconds | None = row["seconds_to_loss"]
    least = None if adsp is None else adsp["seconds_to_loss"]
    # A run that never reached the loss needs more than the time that it had.
    less = None if least is None else 1 - least / row["seconds"]
    reached = time is not None
    return {
        TIME: ("seconds", time),
        "ADSP takes less by": ("percent", less),
        "samples": ("number", row["samples"] if reached else None),
        "bytes": ("bytes", row["bytes"] if reached else None),
        "Mbit/s": ("number", row["megabits_per_second"]),
        "accuracy there": ("percent", row["final_accuracy"] if reached else None),
    }


def loss_curves(rows: Iterable[Row], group: str, setting: str, seed: int) -> Panel:
    """Plot the losses of a contest's runs against time."""
    mine = [row for row in rows if contest_key(row) == (group, setting, seed)]
    return panel(
        f"{group}, {setting}",
        {row["run"]: (row["times"], row["losses"]) for row in mine},
        kind="lines",
        x_label="virtual time",
        x_unit="seconds",
        y_label="loss",
        y_unit="number",
    )


# Tuning.


@dataclass(frozen=True, kw_only=True)
class Tuning(TunedContest):
    """Three learning rates for each method, and three values of its own setting; no results.

    The rates are tried with the second value; then the other values are tried with the best
    rate. A candidate that takes longer than its method's best candidate so far is stopped.

    Args:
        machines: A server and workers.
        goal: Goal at which runs end.
        methods: Names of the methods.
    """

    machines: Cluster
    goal: Goal
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = ()

    is_sequential: ClassVar[bool] = True

    @property
    def held_out(self) -> float:
        return self.goal.validation_share

    def trials(self) -> Mapping[str, Mapping[str, Tried]]:
        return {name: self._trials(name) for name in self.methods}

    def _trials(self, name: str) -> Mapping[str, Tried]:
        folder = f"{self.group}/seed{self.seed}/{slug(name)}"
        option = OPTIONS[name]
        middle = None if option is None else option.values[1]
        tried: dict[str, Tried] = {
            f"{folder}/lr-{lr:g}": {"lr": lr, "value": middle} for lr in RATES
        }
        if option is not None:
            for value in option.values:
                if value != middle:
                    place = f"{folder}/{option.name}-{value}"
                    tried[place] = {"value": value}
        return tried

    def facts(self) -> Row:
        return {"group": self.group, "setting": self.machines.name}

    def plain(self) -> dict[str, Any]:
        """Everything that the rows depend on, except problem and seed, as JSON values."""
        options = {name: OPTIONS[name] for name in self.methods}
        values = {name: each.values if each else () for name, each in options.items()}
        return {
            "group": self.group,
            "machines": describe(self.machines),
            "goal": asdict(self.goal),
            "choices": {"rates": RATES, "values": values},
        }

    def merit(self, trial: Row) -> Any:  # noqa: ANN401
        return _merit(trial)

    def work(self, data_dir: Path, attempt: Attempt, session: Session) -> Row:
        best = max(session.rows.values(), key=_merit, default=None)
        goal, settings = self.goal, attempt.settings
        if "lr" not in settings:
            settings = {**settings, "lr": RATES[0] if best is None else best["lr"]}
        if best is not None and best["seconds_to_loss"] is not None:
            goal = replace(goal, max_seconds=min(goal.max_seconds, best["seconds_to_loss"]))
        # An interrupted run may have had another limit.
        shutil.rmtree(session.folder, ignore_errors=True)
        found = until_loss(
            self.problem_of(replace(attempt, settings=settings)),
            data_dir,
            self.machines,
            goal,
            attempt.run,
            settings["value"],
            attempt.seed,
            session,
        )
        return {"lr": settings["lr"], **found}


def _merit(trial: Row) -> tuple[bool, float]:
    """Whether a trial reached the loss, and how soon, or how closely."""
    time, loss = trial["seconds_to_loss"], trial["final_loss"]
    if time is not None:
        return True, -time
    return False, -math.inf if loss is None else -loss


def tuning_exhibits(contests: Sequence[Contest], rows: Mapping[str, Row]) -> Exhibits:
    """Show the time of each candidate, and the best one of each method."""
    lines, panels = list[Line](), []
    for group in dict.fromkeys(each.group for each in contests):
        own = [row for row in rows.values() if row["group"] == group]
        best = {}
        for name, option in OPTIONS.items():
            mine = [row for row in own if row["run"] == name]
            first = max(mine, key=_merit, default=None)
            lines += [_candidate(row, option, is_best=row is first) for row in mine]
            if first is not None:
                best[name] = first["seconds_to_loss"]
        if best:
            labels = {"x_label": "method", "y_label": "time of the best", "y_unit": "seconds"}
            bars = {"best candidate": (best, best.values())}
            panels.append(panel(group, bars, kind="bars", **labels))
    return figure_and_tables(
        "tuning",
        "The best candidate of each method",
        "One seed, which no result uses.",
        panels,
        table("Candidates", lines, NOTE),
    )


def _candidate(row: Row, option: Option | None, *, is_best: bool) -> Line:
    value = "" if option is None else f"{option.name} = {row['value']}"
    return {
        "problem": ("text", row["group"]),
        "method": ("text", row["run"]),
        "learning rate": ("number", row["lr"]),
        "setting": ("text", value),
        "time to loss": ("seconds", row["seconds_to_loss"]),
        "loss at its end": ("number", row["final_loss"]),
        "": ("text", "best" if is_best else ""),
    }


NOTE = (
    "A candidate is stopped when it takes longer than its method's best candidate so far. A "
    "dash: stopped, or the loss was not reached in time. Losses are measured on held-out "
    "training samples, which no result uses."
)
