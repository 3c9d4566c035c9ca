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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgegossip.contract.errors import TrainingError
from edgegossip.contract.protocol import Seconds
from edgegossip.data.hold_out import hold_out
from edgegossip.recipes.parameter_servers import LINK, heterogeneous
from edgegossip.recipes.studies.contest import Contest
from edgegossip.recipes.studies.problems import Problem
from edgegossip.recipes.studies.server_methods import METHODS, Candidate
from edgegossip.runs.describe import describe
from edgegossip.runs.exhibits import Panel, Series
from edgegossip.runs.experiment import Experiment, LossTarget
from edgegossip.runs.results import Results
from edgegossip.runs.scoreboard import Measures, Score, contest_key
from edgegossip.runs.study import Cell, Row, Session
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform
from edgegossip.training.optimizer import SGD
from edgegossip.training.task import Task

SERVER_SPEED = 16.0
"""Throughput of the server (which measures losses) relative to the fastest worker."""
NUM_LOOKS = 10
ADSP = "adsp"


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
    platforms: tuple[Platform, ...]
    links: Links = Links(default=LINK)

    @property
    def num_workers(self) -> int:
        return len(self.platforms) - 1


def machines(
    name: str,
    problem: Problem,
    *,
    num_workers: int,
    heterogeneity: float,
    bandwidth: float = LINK.bandwidth,
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
    server = Platform(name="server", throughput=SERVER_SPEED * fastest)
    return Cluster(
        name=name,
        platforms=tuple(
            replace(each, uplink=bandwidth, downlink=bandwidth) for each in (server, *speeds)
        ),
        links=Links(default=replace(LINK, latency=LINK.latency + delay, bandwidth=bandwidth)),
    )


@dataclass(frozen=True, kw_only=True)
class ServerContest(Contest):
    """Several methods with their settings, on the same machines.

    Args:
        machines: A server and workers.
        goal: Goal at which runs end, the same for all methods.
        choices: Settings by name of the method.
    """

    machines: Cluster
    goal: Goal
    choices: Mapping[str, Candidate]

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
            "choices": {name: asdict(each) for name, each in self.choices.items()},
        }

    def _work(self, data_dir: Path, name: str, session: Session) -> Row:
        choice = self.choices[name]
        task = self.problem.task(data_dir)
        return self.found(task, self.goal, name, choice, session)

    def found(
        self, task: Task, goal: Goal, name: str, choice: Candidate, session: Session
    ) -> Row:
        """Run a method with these settings and return its row."""
        experiment = Experiment(
            task=learned_with(task, goal.validation_share, lr=choice.lr),
            algorithm=METHODS[name].algorithm(
                self.machines.num_workers, choice.value, goal.loss
            ),
            platforms=self.machines.platforms,
            links=self.machines.links,
            seed=self.seed,
            max_seconds=goal.max_seconds,
            until=LossTarget(loss=goal.loss, num_looks=NUM_LOOKS),
            evaluation_interval=goal.look_seconds,
            name=slug(name),
        )
        facts = {
            "group": self.group,
            "setting": self.machines.name,
            "run": name,
            "seed": self.seed,
            **asdict(choice),
        }
        try:
            return {**facts, **_curve(session.run(experiment))}
        except TrainingError as error:  # divergence is a result, not a failure of the study
            return {**facts, **_DIVERGED, "seconds": goal.max_seconds, "error": str(error)}


def learned_with(task: Task, validation_share: float, **sgd: Any) -> Task:  # noqa: ANN401
    """Hold out validation samples of a problem's task, and change settings of its SGD."""
    assert isinstance(task.optimizer, SGD)  # a problem's optimizer is SGD
    dataset = hold_out(task.dataset, validation_share)
    return replace(task, dataset=dataset, optimizer=replace(task.optimizer, **sgd))


def slug(name: str) -> str:
    """Turn a name into a part of a path."""
    return name.replace(", ", "-").replace(" = ", "-").replace(" ", "-")


_DIVERGED: Mapping[str, Any] = {
    **dict.fromkeys(("seconds_to_loss", "final_loss", "final_accuracy")),
    **{"samples": 0, "bytes": 0, "megabits_per_second": 0.0},
    **{"times": [], "losses": [], "accuracies": []},
}


def _curve(results: Results) -> dict[str, Any]:
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
    adsp = {contest_key(row): row for row in rows if row["run"] == ADSP}
    return [
        Score(
            **{name: row[name] for name in ("group", "setting", "run", "seed")},
            target=None,
            measures=_measures(row, adsp.get(contest_key(row))),
        )
        for row in rows
    ]


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
    return Panel(
        title=f"{group}, {setting}",
        kind="lines",
        x_label="virtual time",
        x_unit="seconds",
        y_label="loss",
        y_unit="number",
        series=tuple(
            Series(name=row["run"], x=tuple(row["times"]), y=tuple(row["losses"]))
            for row in rows
            if contest_key(row) == (group, setting, seed)
        ),
    )
