"""A table of published systems with the same uneven machines, links, data and time.

Fields of a row:
    is_tuning: Whether the run only tried a setting.
    accuracy: Mean of the last five evaluations.
    times, accuracies, bytes, samples: One number per evaluation; bytes are per worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from edgegossip.contract.protocol import Seconds
from edgegossip.recipes.studies.contest import Contest, settings_and_cells
from edgegossip.recipes.studies.known_systems import SYSTEMS, System
from edgegossip.recipes.studies.platforms import imbalanced
from edgegossip.recipes.studies.problems import MNIST_MLP, SMALL_MLP
from edgegossip.recipes.studies.server_contest import learned_with, slug
from edgegossip.recipes.studies.server_methods import RATES, Candidate
from edgegossip.recipes.studies.server_tuning import (
    TUNING_SEED,
    most_accurate,
    without_test_data,
)
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.runs.describe import describe
from edgegossip.runs.exhibits import Exhibits, Figure, Panel, Series, Unit
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.scoreboard import Measures, Score, last_looks, score_table
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform

NUM_WORKERS = 8
IMBALANCE = 4.0
LATENCY: Seconds = 0.005
VALIDATION_SHARE = 0.03
"""Share of the training samples to hold out."""

SECONDS = {MNIST_MLP.name: 90.0, SMALL_MLP.name: 8.0}
NUM_EVALUATIONS = 60


@dataclass(frozen=True, kw_only=True)
class SystemContest(Contest):
    """All systems on links of one speed: one seed for candidates, other seeds for the best.

    Args:
        megabits: Megabits per second of each uplink and downlink, including a server's.
        systems: Systems to compare.
        seeds: Seeds of the results.
    """

    megabits: float
    systems: tuple[str, ...]
    seeds: tuple[int, ...]

    @property
    def setting(self) -> str:
        """The value of `setting` in the rows."""
        return f"{self.megabits:g} Mbit/s"

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        folder = f"{self.group}/{self.megabits:g}-Mbit"
        for name in self.systems:
            tried = {
                f"{folder}/tuning/{name}/{slug(told)}": choice
                for told, choice in SYSTEMS[name].candidates()
            }
            for place, choice in tried.items():
                yield self.cell(place, partial(self._try, data_dir, name, choice))
            for seed in self.seeds:
                work = partial(self._result, data_dir, name, seed)
                yield self.cell(f"{folder}/seed{seed}/{name}", work, [*tried])

    def _try(self, data_dir: Path, name: str, choice: Candidate, session: Session) -> Row:
        return self._run(data_dir, name, choice, TUNING_SEED, session)

    def _result(self, data_dir: Path, name: str, seed: int, session: Session) -> Row:
        best = most_accurate(session, group=self.group, setting=self.setting, run=name)
        choice = Candidate(lr=best["lr"], value=best["value"])
        return self._run(data_dir, name, choice, seed, session)

    def _run(
        self, data_dir: Path, name: str, choice: Candidate, seed: int, session: Session
    ) -> Row:
        system, task = SYSTEMS[name], self.problem.task(data_dir)
        is_tuning = seed == TUNING_SEED
        if is_tuning:
            task = replace(task, dataset=without_test_data(task.dataset, VALIDATION_SHARE))
        seconds = SECONDS[self.problem.name]
        # Systems that measure no loss could train on validation samples, too, but none does.
        task = learned_with(task, VALIDATION_SHARE, lr=choice.lr)
        task, algorithm = system.on(task, NUM_WORKERS, choice.value)
        experiment = Experiment(
            task=task,
            algorithm=algorithm,
            platforms=self._platforms(system),
            links=Links(default=Link(latency=LATENCY, bandwidth=self.megabits * 1e6 / 8)),
            seed=seed,
            max_seconds=seconds,
            evaluation_interval=seconds / NUM_EVALUATIONS,
            name=name,
        )
        history = session.run(experiment).history
        accuracies = [each.accuracy for each in history]
        return {
            "group": self.group,
            "setting": self.setting,
            "run": name,
            "seed": seed,
            "is_tuning": is_tuning,
            **asdict(choice),
            "accuracy": last_looks(accuracies),
            "times": [each.time for each in history],
            "accuracies": accuracies,
            "bytes": [each.bytes_sent / NUM_WORKERS for each in history],
            "samples": [each.samples_processed for each in history],
        }

    def _platforms(self, system: System) -> tuple[Platform, ...]:
        throughput = self.problem.settings.throughput
        speed = self.megabits * 1e6 / 8
        workers = imbalanced(NUM_WORKERS, throughput, IMBALANCE)
        server = (Platform(name="server", throughput=throughput),) * system.has_server
        cloud = (Platform(name="cloud", throughput=throughput),) * system.has_cloud
        machines = (*server, *workers, *cloud)
        return tuple(replace(each, uplink=speed, downlink=speed) for each in machines)


def table(settings: StudySettings = StudySettings(seeds=(0, 1, 2))) -> Study:
    """Twelve equally tuned systems, links of 100 or 4 Mbit/s: accuracy, time, bytes.

    The report shows the Pareto front. Data: MNIST. Duration: half an hour.

    Args:
        settings: Settings of the study.
    """
    problem = SMALL_MLP if settings.short else MNIST_MLP
    names = ("gosgd", "greedy-stages") if settings.short else tuple(SYSTEMS)
    contests = [
        SystemContest(
            problem=problem,
            seed=settings.seeds[0],
            megabits=megabits,
            systems=names,
            seeds=settings.seeds,
        )
        for megabits in ((100.0,) if settings.short else (100.0, 4.0))
    ]
    depends_on, cells = settings_and_cells(contests, settings)
    return Study(
        name="systems/table",
        title="Which system learns most in the same time on the same uneven machines?",
        printed=("No paper compares these systems.",),
        scaled_down=(),
        settings={
            **depends_on,
            "imbalance": IMBALANCE,
            "num_workers": NUM_WORKERS,
            "latency": LATENCY,
            "seconds": SECONDS[problem.name],
            "rates": RATES,
            "systems": {name: describe(SYSTEMS[name].example(NUM_WORKERS)) for name in names},
        },
        cells=cells,
        exhibit=partial(_exhibits, [each.setting for each in contests]),
    )


NOTE = (
    "Medians over the seeds. Accuracy is the mean of the last five of sixty evaluations on "
    "test data. Each system's settings are the best of three learning rates, and of three "
    "values of its own setting where it has one, on held-out data with another seed. The "
    "target is the best system's accuracy less one point, on these links; a dash: never. A "
    "server is an additional machine that trains nothing; a cloud is one that trains the last "
    "layer. Bytes are the total sent, divided by the number of workers."
)
AXES: tuple[tuple[str, str, Unit], ...] = (
    ("times", "virtual time", "seconds"),
    ("bytes", "sent per worker", "bytes"),
    ("samples", "samples trained on", "number"),
)


def _exhibits(links: Sequence[str], rows: Mapping[str, Row]) -> Exhibits:
    results = [row for row in rows.values() if not row["is_tuning"]]
    if not results:
        return Exhibits()
    figures = []
    for setting in links:
        mine = [row for row in results if row["setting"] == setting]
        first = [row for row in mine if row["seed"] == min(each["seed"] for each in mine)]
        if first:
            figures.append(
                Figure(
                    name=f"systems-{setting.split()[0]}-Mbit",
                    heading=f"Test error against time, bytes and samples: {setting}",
                    caption="One seed. Dashed: the Pareto front, the lowest error of any "
                    "system for at most this much.",
                    panels=tuple(_panel(first, *axis) for axis in AXES),
                )
            )
    found = [score for setting in links for score in _scores(results, setting)]
    table = score_table(found, heading="Ours", note=NOTE, setting="links")
    return Exhibits(figures=tuple(figures), tables=(table,))


def _panel(rows: Sequence[Row], field: str, label: str, unit: Unit) -> Panel:
    curves = {
        row["run"]: [
            (x, 1 - y) for x, y in zip(row[field], row["accuracies"], strict=True) if x > 0
        ]
        for row in rows
    }
    front: list[tuple[float, float]] = []
    for x, y in sorted(point for curve in curves.values() for point in curve):
        if not front or y < front[-1][1]:
            front.append((x, y))
    curves["Pareto front"] = front
    return Panel(
        title=label.capitalize(),
        kind="lines",
        x_label=label,
        x_unit=unit,
        is_x_log=True,
        is_log=True,
        y_label="test error",
        y_unit="percent",
        series=tuple(
            Series(
                name=name,
                x=tuple(x for x, _ in curve),
                y=tuple(y for _, y in curve),
                is_mark=name == "Pareto front",
            )
            for name, curve in curves.items()
        ),
    )


def _scores(results: Iterable[Row], setting: str) -> list[Score]:
    mine = [row for row in results if row["setting"] == setting]
    if not mine:
        return []
    target = max(row["accuracy"] for row in mine) - 0.01
    return [
        Score(
            **{name: row[name] for name in ("group", "setting", "run", "seed")},
            target=target,
            measures=_measures(row, target),
        )
        for row in mine
    ]


def _measures(row: Row, target: float) -> Measures:
    at = next((i for i, each in enumerate(row["accuracies"]) if each >= target), None)
    return {
        "accuracy": ("percent", row["accuracy"]),
        "time to target": ("seconds", None if at is None else row["times"][at]),
        "bytes to target": ("bytes", None if at is None else row["bytes"][at]),
        "samples to target": ("number", None if at is None else row["samples"][at]),
        "bytes in all": ("bytes", row["bytes"][-1]),
        "samples in all": ("number", row["samples"][-1]),
        "learning rate": ("number", row["lr"]),
        "own setting": ("number", row["value"]),
    }
