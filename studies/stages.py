"""Contests between methods that train one model in stages, equally tuned.

Fields of a row:
    accuracy, seconds: Mean of the last five evaluations; virtual time of the end.
    bytes: Bytes sent over all links.
    staleness: Mean number of a stage's unanswered batches in the stages above it.
    times, accuracies: One number per evaluation.
"""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from edgegossip.contract.errors import TrainingError
from edgegossip.models import vgg16 as vgg16_model
from edgegossip.models.chains import eight_layers
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.staged_training import COMPETITORS, METHODS, StageSettings, stage_run
from edgegossip.recipes.tasks import Settings
from edgegossip.runs.events import EventReader
from edgegossip.runs.exhibits import Exhibits, Panel
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.scoreboard import (
    Score,
    bars,
    contest_key,
    curves,
    last_looks,
    score,
    score_table,
)
from edgegossip.runs.study import Row, Session, Study
from edgegossip.runs.tuning import slug
from studies.contest import (
    Attempt,
    StudySettings,
    Tried,
    TunedContest,
    accuracy_curve,
    contest_study,
)
from studies.exhibits import figure_and_tables

WHOLE = "whole"
FULL_SIZE = "synthetic-gradients, full size"
"""Modules of two hidden layers, as published; those of the recipe have one, half as wide."""
RATES = (0.01, 0.003, 0.03)
"""Candidate learning rates of each method; see `StageSettings.momentum`."""
TEACHER_RATE = 1e-3
FULL_SIZE_RATES = {
    FULL_SIZE: (
        *((lr, TEACHER_RATE) for lr in (0.001, 0.0003, 0.003, 0.01)),
        *((lr, TEACHER_RATE / 3) for lr in (0.001, 0.0003)),
    )
}
"""Candidate learning rates of the stages and of the modules; at 0.01, many runs diverge."""
LONG_RATES = {
    WHOLE: tuple((lr, TEACHER_RATE) for lr in (*RATES, 0.1)),
    FULL_SIZE: (*FULL_SIZE_RATES[FULL_SIZE], (0.03, TEACHER_RATE)),
}
"""The same in runs of 10,000 steps, which VGG16 prefers higher."""
NUM_LOOKS = 25


@dataclass(frozen=True, kw_only=True)
class TaughtContest(TunedContest):
    """One problem with all methods: one seed for all candidates, other seeds for the best.

    Args:
        methods: Names of the runs.
        rates: Learning rates of stages and teachers to try, by method; otherwise `RATES` and
            `TEACHER_RATE`.
        tuning_share: Length of a trial, as a share of a result's run, in (0, 1].
    """

    methods: tuple[str, ...]
    rates: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    tuning_share: float = 1.0

    tuned: ClassVar[tuple[str, ...]] = ("lr", "teacher_lr")

    @abstractmethod
    def experiment(self, data_dir: Path, attempt: Attempt, num_epochs: int) -> Experiment:
        """Make the run of an attempt."""

    def trials(self) -> Mapping[str, Mapping[str, Tried]]:
        tried = dict[str, dict[str, Tried]]()
        for name in self.methods:
            tried[name] = {}
            for lr, own in self.rates.get(name, [(lr, TEACHER_RATE) for lr in RATES]):
                kind = f"lr-{lr:g}" if own == TEACHER_RATE else f"lr-{lr:g}-teacher-{own:.2g}"
                place = f"{self.folder}/tuning-{kind}/{slug(name)}"
                tried[name][place] = {"lr": lr, "teacher_lr": own}
        return tried

    def merit(self, trial: Row) -> Any:  # noqa: ANN401
        return trial["accuracy"]

    def work(self, data_dir: Path, attempt: Attempt, session: Session) -> Row:
        num_epochs = self.problem.settings.num_epochs
        if attempt.is_tuning:
            num_epochs = max(1, round(self.tuning_share * num_epochs))
        experiment = self.experiment(data_dir, attempt, num_epochs)
        looks = num_epochs / NUM_LOOKS
        try:
            results = session.run(
                replace(experiment, name=slug(attempt.run), evaluation_epochs=looks)
            )
        except TrainingError as error:
            if not attempt.is_tuning:
                raise
            # A loss that is not finite: this candidate is out, and the others are tried.
            return {"times": [], "accuracies": [], "accuracy": 0.0, "error": str(error)}
        curve, last = accuracy_curve(results), results.history[-1]
        return {
            **curve,
            "accuracy": last_looks(curve["accuracies"]),
            "seconds": last.time,
            "bytes": last.bytes_sent,
            "staleness": staleness(session.folder),
        }

    def plain(self) -> dict[str, object]:
        """Everything that the rows depend on, except problem and seed, as JSON values."""
        return {
            "rates": RATES,
            "methods": self.methods,
            **({"own_rates": self.rates} if self.rates else {}),
            **({"tuning_share": self.tuning_share} if self.tuning_share < 1 else {}),
        }


@dataclass(frozen=True, kw_only=True)
class StageContest(TaughtContest):
    """Methods in `COMPETITORS` and `METHODS`, or `FULL_SIZE`, on machines of one stage each.

    Args:
        stages: Settings of machines, links and sizes.
    """

    stages: StageSettings

    def experiment(self, data_dir: Path, attempt: Attempt, num_epochs: int) -> Experiment:
        problem = self.problem_of(attempt)
        is_full = attempt.run == FULL_SIZE
        sizes = {"num_hidden": 2, "channels": 32} if is_full else {}
        changes = {**attempt.settings, **sizes, "num_epochs": num_epochs, "seed": attempt.seed}
        settings = replace(self.stages, **changes)
        name = "synthetic-gradients" if is_full else attempt.run
        return stage_run(name, problem.load(data_dir), problem.model, settings)

    def plain(self) -> dict[str, object]:
        return {"stages": asdict(self.stages), **super().plain()}


def staleness(folder: Path) -> float | None:
    """The mean number, over a run, of a stage's unanswered batches in the stages above it.

    This is the staleness, in updates, of a true gradient and of the targets of a
    synthetic-gradient module.
    """
    notes = EventReader(folder / "events.jsonl").notes("stage")
    late = [(note["stage"], note["pending"]) for note in notes]
    last = max((stage for stage, _ in late), default=0)
    return statistics.fmean([pending for stage, pending in late if stage < last] or [0.0])


def stage_exhibits(
    name: str,
    setting: str,
    rows: Mapping[str, Row],
    whole: str = WHOLE,
    note: str = "",
) -> Exhibits:
    """Draw accuracies, with a table of costs.

    Args:
        name: Name of the figure.
        setting: Label of the settings; empty if there is only one.
        rows: Rows of the cells.
        whole: The run that trains whole models, with which others are compared.
        note: What the table says of its figures; empty for `NOTE`.
    """
    results = [row for row in rows.values() if not row["is_tuning"]]
    scores = _scores(results, whole)
    groups = dict.fromkeys(row["group"] for row in results)
    return figure_and_tables(
        name,
        "Accuracy of models trained in stages",
        "Bars: medians over the seeds; thin lines: their range. Curves: one seed.",
        (panel for group in groups for panel in _panels(results, scores, group)),
        score_table(scores, heading="Ours", note=note or NOTE, setting=setting),
    )


def _panels(rows: Iterable[Row], scores: Iterable[Score], group: str) -> Iterator[Panel]:
    mine = [row for row in rows if row["group"] == group]
    found = [each for each in scores if each.group == group]
    yield bars(found, "accuracy", y_label="accuracy", title=group)
    first = min(row["seed"] for row in mine)
    for setting in dict.fromkeys(row["setting"] for row in mine):
        contest = group, setting, first
        yield curves(mine, contest, setting or group, "virtual time", x_unit="seconds")


def _scores(rows: Iterable[Row], baseline: str) -> list[Score]:
    rows = list(rows)
    whole = {contest_key(row): row for row in rows if row["run"] == baseline}
    return [
        score(
            row,
            {
                "accuracy": ("percent", row["accuracy"]),
                f"more than {baseline}": ("points", _more(row, whole.get(contest_key(row)))),
                "time": ("seconds", row["seconds"]),
                "bytes": ("bytes", row["bytes"]),
                "batches late": ("number", row.get("staleness")),
                "learning rate": ("number", row["lr"]),
            },
        )
        for row in rows
    ]


def _more(row: Row, whole: Row | None) -> float | None:
    return None if whole is None else row["accuracy"] - whole["accuracy"]


TWO_LAYERS_EACH = StageSettings(
    width=0.5, cut_at=(2, 4, 6), in_flight=4, latency=0.001, bandwidth=125e6
)
"""Four equal machines with fast links; with slow links, the default cut would put most layers
into one stage."""

MNIST = Problem(
    name="mnist",
    dataset="mnist",
    model=eight_layers,
    num_train=20_000,
    settings=Settings(num_epochs=4),
    scaled_down="A third of MNIST's pictures, a third of CIFAR-10's, tested on 2,000; half of "
    "the model's width.",
    num_test=2_000,
)
CIFAR10 = Problem(
    name="cifar10",
    dataset="cifar10",
    model=eight_layers,
    num_train=15_000,
    settings=Settings(num_epochs=8),
    num_test=2_000,
)
DIGITS = Problem(
    name="digits", dataset="digits", model=eight_layers, settings=Settings(num_epochs=1)
)


NOTE = (
    "Medians over the seeds; equally many samples for all, virtual time on equal machines."
    " Accuracy is the mean of the last five evaluations on test data. The learning rate is the "
    "best of those tried, on held-out data with another seed. The whole model is trained on "
    "one machine."
)


def methods(settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4))) -> Study:
    """Nine ways to train eight layers in four stages, equally tuned: accuracy, time, bytes.

    Data: MNIST and CIFAR-10. Duration: a minute per run on MNIST, two to three with synthetic
    gradients.

    Args:
        settings: Settings of the study.
    """
    names: tuple[str, ...] = (*COMPETITORS, *METHODS, FULL_SIZE)
    stages = TWO_LAYERS_EACH
    problems: tuple[Problem, ...] = (MNIST, CIFAR10)
    if settings.short:
        names, problems = (WHOLE, "greedy"), (DIGITS,)
        stages = StageSettings(width=0.1, num_stages=2)
    contests = [
        StageContest(
            problem=problem,
            stages=stages,
            methods=names,
            seeds=settings.seeds,
            rates=FULL_SIZE_RATES,
        )
        for problem in problems
    ]
    return contest_study(
        "synthetic-gradients/methods",
        "How much does training the stages of a model separately cost and save?",
        settings,
        contests,
        partial(stage_exhibits, "methods", ""),
        printed=(
            "Eight layers, convolutional and fully connected: accuracy comparable to "
            "back-propagation, 11 % faster on several limited containers than the whole model "
            "on an unlimited machine (HotEdge 2019; only the abstract is known to us).",
        ),
        contest=contests[0].plain(),
    )


CUTS: tuple[tuple[int, ...], ...] = ((4,), (2, 4, 6), (1, 2, 3, 4, 5, 6, 7))
"""The cuts of eight layers into two, four and eight stages."""
DEFAULTS = StudySettings(seeds=(0, 1, 2))
HALF_OF_MNIST = replace(
    MNIST,
    num_train=10_000,
    scaled_down="A sixth of MNIST's pictures, tested on 2,000; half of the model's width.",
)
VGG16 = Problem(
    name="cifar10-vgg16",
    dataset="cifar10",
    model=partial(vgg16_model, normalization="batch"),
    num_train=10_000,
    num_test=2_000,
    settings=Settings(num_epochs=6),
    scaled_down="VGG16 with a quarter of its channels and with batch norm (the paper's is not "
    "known); a fifth of CIFAR-10's pictures, six epochs, tested on 2,000.",
)
BETWEEN_POOLINGS = StageSettings(
    width=0.25, cut_at=(10, 17, 24), in_flight=4, latency=0.001, bandwidth=125e6
)
"""The cuts after the second, third and fourth pooling layers."""


def _on_all_pictures(problem: Problem, name: str, model: str) -> Problem:
    """`problem` for 10,153 steps."""
    return replace(
        problem,
        name=name,
        num_train=None,
        num_test=5_000,
        settings=Settings(num_epochs=13),
        scaled_down=f"{model}; all pictures of CIFAR-10, 13 epochs, tested on 5,000.",
    )


LONG: tuple[tuple[Problem, StageSettings], ...] = (
    (
        _on_all_pictures(CIFAR10, "eight-layers", "Eight layers at half of the model's width"),
        TWO_LAYERS_EACH,
    ),
    (
        _on_all_pictures(VGG16, "vgg16", "VGG16 with a quarter of its channels and batch norm"),
        BETWEEN_POOLINGS,
    ),
)


def stages(settings: StudySettings = DEFAULTS) -> Study:
    """Eight layers in 2, 4 and 8 stages: accuracy, bytes, time, staleness of gradients.

    Data: MNIST. Duration: half a minute per run.

    Args:
        settings: Settings of the study.
    """
    methods: tuple[str, ...] = (WHOLE, "pipelined", "greedy", "synthetic-gradients")
    problem, cuts, machines = HALF_OF_MNIST, CUTS, TWO_LAYERS_EACH
    if settings.short:
        methods, problem, cuts = (WHOLE, "greedy"), replace(DIGITS, num_train=320), CUTS[:2]
        machines = StageSettings(width=0.1)
    contests = [
        StageContest(
            problem=problem,
            stages=replace(machines, num_stages=len(at) + 1, cut_at=at, in_flight=len(at) + 1),
            methods=methods,
            seeds=settings.seeds,
            setting=f"{len(at) + 1} stages",
        )
        for at in cuts
    ]
    title = "How much do additional cuts of a model cost?"
    return _study("stages", title, settings, contests, "stages")


def vgg16(settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4))) -> Study:
    """VGG16 at a quarter of its width, in four stages, on CIFAR-10: accuracy, time, bytes.

    With synthetic gradients from modules of the published size. Each run takes minutes.

    Args:
        settings: Settings of the study.
    """
    methods: tuple[str, ...] = (WHOLE, "greedy", "local-prediction", FULL_SIZE)
    problem, machines = VGG16, BETWEEN_POOLINGS
    if settings.short:
        methods, problem = (WHOLE, "greedy"), replace(DIGITS, num_train=320)
        machines = StageSettings(width=0.1, num_stages=2)
    contest = StageContest(
        problem=problem,
        stages=machines,
        methods=methods,
        seeds=settings.seeds,
        rates=FULL_SIZE_RATES,
    )
    title = "How much does it cost to train the stages of a deep model separately?"
    return _study("vgg16", title, settings, [contest], "")


def cifar10(settings: StudySettings = StudySettings()) -> Study:
    """Synthetic gradients themselves: 10,000 steps on all of CIFAR-10, two models.

    Modules have the published two hidden layers, and learning rates go down to 3e-4. Four
    stages. On one core, the runs of a seed, with their trials, take two hours for
    `eight-layers` and two and a half for `vgg16`.

    Args:
        settings: Settings of the study.
    """
    methods, models = (WHOLE, FULL_SIZE, "local-prediction"), LONG
    if settings.short:
        digits = replace(DIGITS, num_train=320)
        models = ((digits, StageSettings(width=0.1, cut_at=(2, 4, 6))),)
    contests = [
        StageContest(
            problem=problem,
            stages=machines,
            methods=methods,
            seeds=settings.seeds,
            rates=LONG_RATES,
            tuning_share=0.5,
        )
        for problem, machines in models
    ]
    title = "How much accuracy do synthetic gradients themselves cost in 10,000 steps?"
    return _study("cifar10", title, settings, contests, "")


def _study(
    name: str,
    title: str,
    settings: StudySettings,
    contests: Sequence[StageContest],
    setting: str,
) -> Study:
    return contest_study(
        f"synthetic-gradients/{name}",
        title,
        settings,
        contests,
        partial(stage_exhibits, name, setting),
        printed=(
            "VGG16: up to 15 points of accuracy lost; the gap grows with the number of "
            "separately trained modules (HotEdge 2019; only the abstract is known to us).",
        ),
        contests=[each.plain() for each in contests],
    )
