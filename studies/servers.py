"""Contests of parameter servers on the same problem and machines, up to a common loss.

Fields of a row:
    group, setting, run, seed: Names of the contest, the machines and the run.
    lr, value: Learning rate, and value of the method's own setting; null without one.
    seconds_to_loss: Time to the loss; null if it was never reached.
    seconds, final_loss, final_accuracy: Values at the end of the run.
    samples, bytes, megabits_per_second: Totals of all workers and links.
    times, losses, accuracies: One number per evaluation.
    error: Error of a diverged run; absent from other rows.
    trials: `lr`, `value`, `seconds_to_loss`, `seconds` and `loss` (the mean of the last ten
        evaluations; null if the run diverged) of each trial of a search, whose other fields are
        those of its best trial; absent from results.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

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
from studies.contest import Contender, Contenders, Contest, Option, Tried
from studies.exhibits import Line, figure_and_tables, panel, table

WINDOW: Seconds = 20.0
"""Check period where it is not tuned: 40 steps of the fastest worker; 60 s in the paper."""
MIN_INTERVAL: Seconds = 0.5
"""Minimum seconds between two commits: a step of the fastest worker."""
RATES = (
    *(0.0019, 0.0032, 0.0056, 0.0096, 0.017, 0.029, 0.05, 0.087, 0.15, 0.26),
    *(0.45, 0.78, 1.35, 2.3, 4.05, 7.0, 12.0),
)
"""Grid of learning rates for all methods, each rate a root of three times the one before."""
FIRST_RATE = RATES.index(0.26)


def _around(wrapper: Callable[..., eg.Algorithm[Any]], inner: Callable[..., Any]) -> Any:  # noqa: ANN401
    """A wrapper and what it is around, as one algorithm with the arguments of the inner one."""
    return lambda **options: wrapper(inner=inner(**options))


def methods(loss: float) -> Contenders:
    """The parameter servers of the studies; the published ADSP expects to end at `loss`."""
    method = partial(Contender, topology=None)
    tau = Option("tau", "tau", (1, 2, 3, 5, 10, 20, 40, 80, 160))
    window = Option("window", "window", (1.25, 2.5, 5, 10, 20, 40, 80))
    slack = Option("s", "slack", (1, 2, 5, 10, 20, 40, 80, 160, 320))
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
        "ssp": method(algorithm=eg.SSP, option=slack),
        "asp": method(algorithm=eg.ASP),
        "fixed-adacomm": method(algorithm=eg.FixedADACOMM, option=tau),
        "fixed-adacomm, batches tuned": method(
            algorithm=_around(eg.BatchTune, eg.FixedADACOMM), option=tau
        ),
        "fixed-adacomm, batches tuned at once": method(
            algorithm=_around(partial(eg.BatchTune, smoothing=0.0), eg.FixedADACOMM), option=tau
        ),
        "fixed-adacomm, shares balanced": method(
            algorithm=_around(eg.EdgeGossip, eg.FixedADACOMM), option=tau
        ),
        "adacomm": method(algorithm=eg.ADACOMM, options={"window": WINDOW}, option=tau),
        "adsp-plus": method(
            algorithm=eg.ADSPPlus,
            options=timed,
            # The highest exceeds a commit after each step of the fastest worker.
            option=Option("rate", "rate", (1, 3, 6, 12, 24, 48)),
        ),
        "adsp": method(
            algorithm=eg.ADSP, options={"min_interval": MIN_INTERVAL}, option=window
        ),
        "adsp, as published": method(algorithm=eg.ADSP, options=as_published, option=window),
    }


OPTIONS = {name: each.option for name, each in methods(loss=1.0).items()}
"""The setting that each method can tune, by its name; None for a method without one. The search
starts from the middle of its values.
"""


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
        choices: Settings by name of the method: `lr`, and `value` of its own setting; or the
            search that finds them, whose cells are in the same study.
    """

    machines: Cluster
    goal: Goal
    choices: Mapping[str, Tried] | Tuning

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        folder = f"{self.group}/{slug(self.machines.name)}/seed{self.seed}"
        choices = self.choices
        for name in choices.methods if isinstance(choices, Tuning) else choices:
            after = (choices.place(name),) if isinstance(choices, Tuning) else ()
            work = partial(self._work, data_dir, name)
            yield self.cell(f"{folder}/{slug(name)}", work, after)

    def plain(self) -> dict[str, Any]:
        """Everything that the rows depend on, except problem and seed, as JSON values."""
        return {
            "group": self.group,
            "machines": describe(self.machines),
            "goal": asdict(self.goal),
            "choices": "tuned" if isinstance(self.choices, Tuning) else self.choices,
        }

    def _work(self, data_dir: Path, name: str, session: Session) -> Row:
        if isinstance(self.choices, Tuning):
            best = session.rows[self.choices.place(name)]
            choice: Tried = {key: best[key] for key in ("lr", "value")}
        else:
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


def converged_scores(rows: Iterable[Row]) -> list[Score]:
    """Compute the lowest loss of each run, when it was reached, and the accuracies."""
    return [score(row, _ending(row)) for row in rows]


def _ending(row: Row) -> Measures:
    """Measures of a run that went on where its loss no longer fell."""
    losses, accuracies = _smoothed(row["losses"]), _smoothed(row["accuracies"])
    lowest = losses.index(min(losses)) if losses else None
    return {
        "lowest loss": ("number", None if lowest is None else losses[lowest]),
        "reached after": (
            "seconds",
            None if lowest is None else row["times"][lowest + NUM_LOOKS - 1],
        ),
        "accuracy there": ("percent", None if lowest is None else accuracies[lowest]),
        "best accuracy": ("percent", max(accuracies, default=None)),
        "accuracy at the end": ("percent", accuracies[-1] if accuracies else None),
    }


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean of each `NUM_LOOKS` values in sequence."""
    ends = range(NUM_LOOKS, len(values) + 1)
    return [fmean(values[end - NUM_LOOKS : end]) for end in ends]


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


def climb(start: int, merit: Callable[[int], Any], places: range) -> int:
    """Walk through a grid until neither neighbor is better, and return that place.

    Args:
        start: Place to start from.
        merit: How good a place is: the highest wins, or the first of equals.
        places: All places; one that ends the walk is an end of the setting.

    >>> climb(1, lambda place: -abs(place - 6), range(10))
    6
    """
    best, highest = start, merit(start)
    for step in (1, -1):
        while best + step in places and (other := merit(best + step)) > highest:
            best, highest = best + step, other
    return best


@dataclass(frozen=True, kw_only=True)
class Tuning(Contest):
    """A search for each method's learning rate and own setting; no results.

    All methods have the same rule. For each value that it tries, a method walks through the
    learning rates until neither neighbor is better, starting from its best rate so far. It
    walks through the values in the same way, so both settings end inside their grids. A
    candidate that takes longer than its method's best one so far is stopped.

    Trials have a seed that no result has, and are measured on held-out training samples.

    Args:
        machines: A server and workers.
        goal: Goal at which runs end.
        methods: Names of the methods.
    """

    machines: Cluster
    goal: Goal
    methods: tuple[str, ...]

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        for name in self.methods:
            yield self.cell(self.place(name), partial(self._search, data_dir, name))

    def place(self, name: str) -> str:
        """The name of a method's cell."""
        return f"{self.group}/{slug(self.machines.name)}/tuning/{slug(name)}"

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

    def _search(self, data_dir: Path, name: str, session: Session) -> Row:
        # An interrupted search begins again, because its trials' limits depend on earlier ones.
        shutil.rmtree(session.folder, ignore_errors=True)
        option = OPTIONS[name]
        values = (None,) if option is None else option.values
        trials = dict[tuple[int, int], Row]()

        def merit(value: int, rate: int) -> Any:  # noqa: ANN401
            place = value, rate
            if place not in trials:
                trials[place] = self._trial(
                    data_dir, name, values[value], RATES[rate], [*trials.values()], session
                )
            return _merit(trials[place])

        @cache
        def merit_of(value: int) -> Any:  # noqa: ANN401
            first = max(trials, key=lambda each: _merit(trials[each]), default=None)
            start = FIRST_RATE if first is None else first[1]
            return merit(value, climb(start, partial(merit, value), range(len(RATES))))

        climb(len(values) // 2, merit_of, range(len(values)))
        best = max(trials.values(), key=_merit)
        return {
            **{"group": self.group, "setting": self.machines.name, "run": name},
            **{"seed": self.seed, **best},
            "trials": [
                {key: trial[key] for key in ("lr", "value", "seconds_to_loss", "seconds")}
                | {"loss": _last_loss(trial)}
                for trial in trials.values()
            ],
        }

    def _trial(
        self,
        data_dir: Path,
        name: str,
        value: float | None,
        lr: float,
        before: Sequence[Row],
        session: Session,
    ) -> Row:
        settings = replace(self.problem.settings, lr=lr)
        held_out = self.goal.validation_share
        times = (row["seconds_to_loss"] for row in before)
        best = min((time for time in times if time is not None), default=math.inf)
        found = until_loss(
            replace(self.problem, settings=settings, held_out=held_out),
            data_dir,
            self.machines,
            replace(self.goal, max_seconds=min(self.goal.max_seconds, best)),
            name,
            value,
            self.seed,
            replace(session, folder=session.folder / str(len(before))),
        )
        return {"lr": lr, "value": value, **found}


def _merit(trial: Row) -> tuple[bool, float, float]:
    """Whether a trial reached the loss, how soon, and how close it was at its end."""
    time, loss = trial["seconds_to_loss"], _last_loss(trial)
    closeness = -math.inf if loss is None else -loss
    return time is not None, 0.0 if time is None else -time, closeness


def _last_loss(trial: Row) -> float | None:
    """The mean of the evaluations that the goal counts; None of a run that diverged."""
    return fmean(trial["losses"][-NUM_LOOKS:]) if trial["losses"] else None


def tuning_exhibits(contests: Sequence[Contest], rows: Mapping[str, Row]) -> Exhibits:
    """Show the time of each candidate, and the best one of each method."""
    panels = []
    for group, setting in dict.fromkeys(
        (row["group"], row["setting"]) for row in rows.values()
    ):
        mine = [
            row for row in rows.values() if (row["group"], row["setting"]) == (group, setting)
        ]
        best = {row["run"]: row["seconds_to_loss"] for row in mine}
        labels = {"x_label": "method", "y_label": "time of the best", "y_unit": "seconds"}
        bars = {"best candidate": (best, best.values())}
        panels.append(panel(f"{group}, {setting}", bars, kind="bars", **labels))
    lines = [_candidate(row, trial) for row in rows.values() for trial in row["trials"]]
    return figure_and_tables(
        "tuning",
        "The best candidate of each method",
        "One seed, which no result uses.",
        panels,
        table("Candidates", lines, NOTE),
    )


def _candidate(row: Row, trial: Row) -> Line:
    option = OPTIONS[row["run"]]
    value = "" if option is None else f"{option.name} = {trial['value']}"
    is_best = (trial["lr"], trial["value"]) == (row["lr"], row["value"])
    return {
        "problem": ("text", row["group"]),
        "machines": ("text", row["setting"]),
        "method": ("text", row["run"]),
        "learning rate": ("number", trial["lr"]),
        "setting": ("text", value),
        "time to loss": ("seconds", trial["seconds_to_loss"]),
        "loss at its end": ("number", trial["loss"]),
        "": ("text", "best" if is_best else ""),
    }


NOTE = (
    "A candidate is stopped when it takes longer than its method's best candidate so far. A "
    "dash: stopped, or the loss was not reached in time. Losses are measured on held-out "
    "training samples, which no result uses."
)
