"""A table of published systems with the same uneven machines, links, data and time.

Fields of a row:
    value: Value of the system's own setting; null without one.
    accuracy: Mean of the last five evaluations.
    times, accuracies, bytes, samples, joules: One number per evaluation; bytes are per worker,
        joules those of all machines and links. Older rows have no joules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import edgegossip as eg
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_range
from edgegossip.contract.trainer import Trainer
from edgegossip.models.blocks import drawn_from
from edgegossip.recipes.push_sum_comparison import compressor
from edgegossip.recipes.tasks import ACCURACY_AWARE
from edgegossip.runs.describe import describe
from edgegossip.runs.exhibits import Exhibits, Figure, Unit
from edgegossip.runs.scoreboard import Measures, Score, last_looks, score, score_table
from edgegossip.runs.study import Row, Session, Study
from edgegossip.runs.tuning import slug
from edgegossip.training.stages.teachers import TeacherFactory
from studies.contest import (
    Attempt,
    Contender,
    Option,
    StudySettings,
    Tried,
    TunedContest,
    accuracy_curve,
    contest_study,
)
from studies.exhibits import front_panel
from studies.problems import MNIST_MLP, SMALL_MLP
from studies.race import imbalanced

RATES = (0.15, 0.45, 0.05)
"""Candidate learning rates for all systems."""
MAX_PASSED = 64
"""Maximum number of batches in the cloud at a time, one from each worker."""


@dataclass(frozen=True, kw_only=True)
class InTwoStages(Contender):
    """A system with a cloud for the last layer; workers train the other layers.

    Args:
        stage: Trains a stage.
        teacher: Teacher of the lower stage; None if the true gradient comes back.
    """

    stage: Callable[..., Trainer]
    teacher: TeacherFactory | None = None

    def build(
        self,
        num_workers: int,
        num_steps: int = eg.UNTIL_CUT_OFF,
        value: float | None = None,
        **others: Any,  # noqa: ANN401
    ) -> eg.Algorithm[Any]:
        inner = eg.EpochGossip(topology=eg.complete(num_workers), num_rounds=eg.UNTIL_CUT_OFF)
        return self.algorithm(inner=inner, num_first=num_workers, precision="int8", **others)

    def on(
        self, task: eg.Task, num_workers: int, value: float | None
    ) -> tuple[eg.Task, eg.Algorithm[Any]]:
        assert not isinstance(task.model, Mapping)  # the model is whole
        with drawn_from(0):
            num_blocks = len(eg.blocks(task.model()))
        parts = eg.staged(task, (num_blocks - 1,), self.stage, self.teacher)
        return parts.task, self.build(
            num_workers,
            boundaries=parts.boundaries,
            num_classes=parts.num_classes,
            max_batch=task.batch_size + 1,  # a pass may end with one sample more
        )


_of_all = partial(Contender, topology=eg.complete)
_with_server = partial(Contender, topology=None)
SYSTEMS: dict[str, Contender] = {
    "all-reduce": _of_all(algorithm=eg.AllReduce),
    "epoch-gossip": _of_all(algorithm=eg.EpochGossip),
    "gosgd": _of_all(
        algorithm=eg.GoSGD, option=Option("p", "exchange_probability", (0.01, 0.05, 0.2))
    ),
    "edge-gossip": _of_all(
        algorithm=eg.EpochGossip,
        accuracy_aware=ACCURACY_AWARE,
        option=Option("share of an epoch", "max_keep_ratio", (0.1, 0.3, 1.0)),
    ),
    "diloco": _of_all(
        algorithm=eg.DiLoCo, option=Option("local steps", "local_steps", (8, 32, 128))
    ),
    "double-squeeze": _of_all(
        algorithm=eg.DoubleSqueeze,
        options={"compressor": compressor(0.1, 4)},
        option=Option("local steps", "local_steps", (2, 8, 32)),
    ),
    "edge-gossip-double-squeeze": _of_all(
        algorithm=lambda **inner: eg.EdgeGossip(inner=eg.DoubleSqueeze(**inner)),
        options={"compressor": compressor(0.1, 4)},
        # Those of the fastest worker: on average, workers take half as many.
        option=Option("local steps", "local_steps", (4, 16, 64)),
    ),
    "edge-squeeze": _of_all(
        algorithm=lambda **inner: eg.EdgeGossip(inner=eg.DoubleSqueeze(**inner, overlap=True)),
        options={"compressor": compressor(0.1, 4)},
        option=Option("local steps", "local_steps", (4, 16, 64)),
    ),
    "sparse-push": Contender(
        algorithm=lambda keep, **others: eg.SparsePush(
            **others, compressor=compressor(keep, 32)
        ),
        topology=eg.directed_ring,
        option=Option("share kept", "keep", (0.01, 0.05, 0.1)),
    ),
    "bsp": _with_server(algorithm=eg.BSP),
    "ssp": _with_server(algorithm=eg.SSP, option=Option("s", "slack", (4, 40, 160))),
    "adsp": _with_server(
        algorithm=eg.ADSP,
        options={"min_interval": 0.1},
        option=Option("window", "window", (2.0, 5.0, 10.0)),
    ),
    "splitfed": InTwoStages(
        algorithm=partial(eg.Pipelined, in_flight=1),
        topology=eg.complete,
        stage=partial(eg.PipelinedStage, max_passed=MAX_PASSED),
    ),
    "greedy-stages": InTwoStages(
        algorithm=partial(eg.Decoupled, gradient_every=None),
        topology=eg.complete,
        stage=eg.DecoupledStage,
        teacher=eg.Greedy(),
    ),
}


def _without_momentum(system: Contender) -> Contender:
    """The control for outer momentum, with rates that make up for about as long steps."""
    return replace(system, options={**system.options, "outer_momentum": 0.0}, lr_factor=3.0)


SYSTEMS |= {
    f"{name}-no-momentum": _without_momentum(SYSTEMS[name])
    for name in ("double-squeeze", "edge-squeeze")
}


NUM_WORKERS = 8
IMBALANCE = 4.0
MEGABITS = (100.0, 4.0)
LATENCY: Seconds = 0.005
VALIDATION_SHARE = 0.03
"""Share of the training samples to hold out."""

SECONDS = {MNIST_MLP.name: 90.0, SMALL_MLP.name: 8.0}
NUM_EVALUATIONS = 60


@dataclass(frozen=True, kw_only=True)
class SystemContest(TunedContest):
    """All systems on links of one speed: one seed for candidates, other seeds for the best.

    Args:
        megabits: Megabits per second of each uplink and downlink, including a server's.
        systems: Systems to compare.
    """

    megabits: float
    systems: tuple[str, ...]

    tuned: ClassVar[tuple[str, ...]] = ("lr", "value")

    @property
    def held_out(self) -> float:
        return VALIDATION_SHARE

    @property
    def folder(self) -> str:
        return f"{self.group}/{self.megabits:g}-Mbit"

    def trials(self) -> Mapping[str, Mapping[str, Tried]]:
        return {name: self._trials(name, SYSTEMS[name]) for name in self.systems}

    def _trials(self, name: str, system: Contender) -> Mapping[str, Tried]:
        tried = {}
        for value, lr in product(system.values, RATES):
            own = "" if system.option is None else f", {system.option.name} = {value:g}"
            place = f"{self.folder}/tuning/{slug(f'lr = {lr:g}{own}')}/{name}"
            tried[place] = {"lr": lr, "value": value}
        return tried

    def merit(self, trial: Row) -> Any:  # noqa: ANN401
        return trial["accuracy"]

    def work(self, data_dir: Path, attempt: Attempt, session: Session) -> Row:
        system, seconds = SYSTEMS[attempt.run], SECONDS[self.problem.name]
        # Systems that measure no loss could train on validation samples, too, but none does.
        problem = replace(self.problem_of(attempt), validation_share=VALIDATION_SHARE)
        task, algorithm = system.on(
            problem.task(data_dir), NUM_WORKERS, attempt.settings["value"]
        )
        results = session.run(
            eg.Experiment(
                task=task,
                algorithm=algorithm,
                platforms=self._platforms(system),
                links=eg.Links(
                    default=eg.Link(latency=LATENCY, bandwidth=self.megabits * 1e6 / 8)
                ),
                seed=attempt.seed,
                max_seconds=seconds,
                evaluation_interval=seconds / NUM_EVALUATIONS,
                name=attempt.run,
            )
        )
        curve = accuracy_curve(results)
        return {
            **curve,
            "accuracy": last_looks(curve["accuracies"]),
            "bytes": [each.bytes_sent / NUM_WORKERS for each in results.history],
            "samples": [each.samples_processed for each in results.history],
            "joules": [each.joules for each in results.history],
        }

    def _platforms(self, system: Contender) -> tuple[eg.Platform, ...]:
        throughput = self.problem.settings.throughput
        speed = self.megabits * 1e6 / 8
        workers = imbalanced(NUM_WORKERS, throughput, IMBALANCE)
        server = (eg.Platform(name="server", throughput=throughput),) * (
            system.topology is None
        )
        cloud = (eg.Platform(name="cloud", throughput=throughput),) * isinstance(
            system, InTwoStages
        )
        machines = (*server, *workers, *cloud)
        return tuple(replace(each, uplink=speed, downlink=speed) for each in machines)


def table(
    settings: StudySettings = StudySettings(seeds=(0, 1, 2)),
    *,
    megabits: tuple[float, ...] = MEGABITS,
) -> Study:
    """Equally tuned systems, links of 100 or 4 Mbit/s: accuracy, time, bytes.

    The report shows the Pareto front. Data: MNIST. Duration: half an hour.

    Args:
        settings: Settings of the study.
        megabits: Megabits per second of the links, above 0; a contest for each speed.

    Raises:
        ValueError: If a speed is out of range.
    """
    for each in megabits:
        check_range("megabits", each, "above 0 and finite")
    problem = SMALL_MLP if settings.short else MNIST_MLP
    names = ("gosgd", "greedy-stages") if settings.short else tuple(SYSTEMS)
    contests = [
        SystemContest(
            problem=problem,
            setting=f"{each:g} Mbit/s",
            megabits=each,
            systems=names,
            seeds=settings.seeds,
        )
        for each in (megabits[:1] if settings.short else megabits)
    ]
    return contest_study(
        "systems/table",
        "Which system learns most in the same time on the same uneven machines?",
        settings,
        contests,
        partial(_exhibits, [each.setting for each in contests]),
        printed=("No paper compares these systems.",),
        imbalance=IMBALANCE,
        num_workers=NUM_WORKERS,
        latency=LATENCY,
        seconds=SECONDS[problem.name],
        rates=RATES,
        systems={name: _described(SYSTEMS[name]) for name in names},
    )


def _described(system: Contender) -> Any:  # noqa: ANN401 - JSON values
    whole: dict[str, Any] = {
        "boundaries": ((1,),),
        "num_classes": 1,
    }  # in place of those of a model
    others = whole if isinstance(system, InTwoStages) else {}
    return describe(system.build(NUM_WORKERS, value=system.values[0], **others))


NOTE = (
    "Medians over the seeds. Accuracy is the mean of the last five of sixty evaluations on "
    "test data. Each system's settings are the best of three learning rates, and of three "
    "values of its own setting where it has one, on held-out data with another seed. The "
    "target is the best system's accuracy less one point, on these links; a dash: never. A "
    "server is an additional machine that trains nothing; a cloud is one that trains the last "
    "layer. Bytes are the total sent, divided by the number of workers. Energy is that of all "
    "machines and links, by the model in docs/simulator.md; an additional machine idles."
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
                    panels=tuple(front_panel(first, *axis) for axis in AXES),
                )
            )
    found = [score for setting in links for score in _scores(results, setting)]
    table = score_table(found, heading="Ours", note=NOTE, setting="links")
    return Exhibits(figures=tuple(figures), tables=(table,))


def _scores(results: Iterable[Row], setting: str) -> list[Score]:
    mine = [row for row in results if row["setting"] == setting]
    if not mine:
        return []
    target = max(row["accuracy"] for row in mine) - 0.01
    return [score(row, _measures(row, target), target) for row in mine]


def _measures(row: Row, target: float) -> Measures:
    at = next((i for i, each in enumerate(row["accuracies"]) if each >= target), None)
    return {
        "accuracy": ("percent", row["accuracy"]),
        "time to target": ("seconds", None if at is None else row["times"][at]),
        "bytes to target": ("bytes", None if at is None else row["bytes"][at]),
        "samples to target": ("number", None if at is None else row["samples"][at]),
        "energy to target": (
            "joules",
            None if at is None or "joules" not in row else row["joules"][at],
        ),
        "bytes in all": ("bytes", row["bytes"][-1]),
        "samples in all": ("number", row["samples"][-1]),
        "learning rate": ("number", row["lr"]),
        "own setting": ("number", row["value"]),
    }
