"""How many times sooner than with a barrier: EdgeGossip by task, imbalance and selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias

from edgegossip.experiments.exhibits import Exhibits, Figure
from edgegossip.experiments.study import Row, Study
from edgegossip.learning.sampling.accuracy_aware import PLAIN
from edgegossip.learning.sampling.selection import SELECTIONS
from edgegossip.recipes.recipe_settings import ACCURACY_AWARE
from edgegossip.recipes.studies.platforms import imbalanced
from edgegossip.recipes.studies.problems import (
    CIFAR10_LENET5,
    CIFAR10_LENET5_AUGMENTED,
    CIFAR10_RESNET20,
    DIGITS_MLP,
    HAR_CNN,
    MNIST_LENET5,
    Problem,
)
from edgegossip.recipes.studies.race import (
    CONTENDERS,
    MAX_WORK,
    Contender,
    Race,
    Runs,
    Setup,
    how_contenders_run,
    less_work,
    races_of,
    work_limit,
)
from edgegossip.recipes.studies.standings import bars, race_table, standings
from edgegossip.recipes.studies.study_settings import StudySettings

TARGET_GAP = 0.003
IMBALANCES = (2.0, 4.0, 8.0)
Controls: TypeAlias = Literal["none", "at-4", "all"]
CONTROLLED = 4.0
"""The imbalance at which the controls run by default."""

EDGE_GOSSIP: Runs = {"edge-gossip": Contender()}
EQUAL_TIME: Runs = {**EDGE_GOSSIP, "random": Contender(PLAIN)}
CONTROLLED_RUNS: Runs = {**CONTENDERS, "edge-gossip-gosgd": Contender(inner="gosgd")}

DEFAULTS = StudySettings(seeds=(0, 1, 2, 3, 4))


def speedup(
    settings: StudySettings = DEFAULTS,
    *,
    controls: Controls = "at-4",
    max_work: float | None = MAX_WORK,
) -> Study:
    """Time to EpochGossip's best accuracy less 0.3 points, at imbalances 2, 4 and 8.

    Args:
        settings: What to change.
        controls: At which imbalance to run random shares and GoSGD, too.
        max_work: Samples that others than EpochGossip process, in multiples of its own; None
            to give them all its time, in which they converge.
    """
    limit = work_limit(settings, max_work)
    races = [
        race
        for problem in _problems(settings)
        for seed in settings.seeds
        for race in [_race(problem, seed, controls, limit)]
    ]
    return _study(
        "speedup",
        "How many times sooner does EdgeGossip get where EpochGossip gets?",
        (
            "The paper prints one number: 2.70 times less training time than GoSGD on average, "
            "at a loss of accuracy of 0.78 %, T_max / T_min not given.",
        ),
        (
            "EpochGossip is trained once a seed: its accuracy after each epoch does not depend "
            "on speeds, and when its epochs end on other machines is simulated without "
            "training.",
            *less_work(limit),
        ),
        settings,
        races,
        controls=controls,
        max_work=limit,
    )


def selections(settings: StudySettings = StudySettings()) -> Study:
    """Time to EpochGossip's best accuracy less 0.3 points, with each selection, at 4 times.

    `focused` and `random` are as by default. The others look at all aggregated points before
    each epoch, as the paper does, and pay for that.

    Args:
        settings: What to change.
    """
    others = [name for name in SELECTIONS if name not in ("focused", "random")]
    if settings.short:
        others = ["ranked", "pruned"]
    runs: Runs = {
        "focused": Contender(),
        **{
            name: Contender(
                replace(ACCURACY_AWARE, selection=SELECTIONS[name], look_share=None)
            )
            for name in others
        },
        "random": Contender(PLAIN),
    }
    problems = (DIGITS_MLP,) if settings.short else (MNIST_LENET5, HAR_CNN, CIFAR10_LENET5)
    races = [
        race
        for problem in problems
        for race in races_of(problem, (_setup(problem, CONTROLLED, runs),), settings)
    ]
    limit = work_limit(settings)
    return _study(
        "selections",
        "Which selection of samples comes to EpochGossip's accuracy soonest?",
        ("The paper ranks subsets by the loss of their aggregated point: `ranked`.",),
        less_work(limit),
        settings,
        races,
        max_work=limit,
    )


def _study(
    name: str,
    title: str,
    printed: tuple[str, ...],
    scaled_down: tuple[str, ...],
    settings: StudySettings,
    races: Sequence[Race],
    **varied: object,
) -> Study:
    problems = {race.problem.name: race.problem for race in races}.values()
    return Study(
        name=f"edgegossip/{name}",
        title=title,
        printed=printed,
        scaled_down=scaled_down,
        settings={
            **settings.plain(),
            **varied,
            "target_gap": TARGET_GAP,
            "problems": [problem.plain() for problem in problems],
            **how_contenders_run(),
        },
        cells=tuple(cell for race in races for cell in race.cells(settings.data_dir)),
        exhibit=partial(_exhibit, name),
    )


def _problems(settings: StudySettings) -> tuple[Problem, ...]:
    if settings.short:
        return (DIGITS_MLP,)
    return (
        MNIST_LENET5,
        HAR_CNN,
        CIFAR10_LENET5,
        CIFAR10_LENET5_AUGMENTED,
        CIFAR10_RESNET20,
    )


def _race(
    problem: Problem,
    seed: int,
    controls: Controls,
    max_work: float | None,
) -> Race:
    def runs(imbalance: float) -> Runs:
        if problem is CIFAR10_RESNET20:
            return EQUAL_TIME  # it takes too long for more
        has_controls = {"none": False, "at-4": imbalance == CONTROLLED, "all": True}[controls]
        return CONTROLLED_RUNS if has_controls else EDGE_GOSSIP

    wanted = (CONTROLLED,) if problem is CIFAR10_RESNET20 else IMBALANCES
    return Race(
        group=problem.name,
        problem=problem,
        setups=tuple(_setup(problem, imbalance, runs(imbalance)) for imbalance in wanted),
        seed=seed,
        max_work=max_work,
    )


def _setup(problem: Problem, imbalance: float, runs: Runs) -> Setup:
    return Setup(
        name=f"{imbalance:g} times",
        platforms=imbalanced(4, problem.settings.throughput, imbalance),
        runs=runs,
    )


def _exhibit(name: str, rows: Mapping[str, Row]) -> Exhibits:
    found = standings(rows.values(), TARGET_GAP)
    panels = tuple(
        bars(
            [each for each in found if each.group == group and each.run != "epoch-gossip"],
            lambda each: each.speedup,
            title=group,
            y_label="speed-up in time to target",
            y_unit="times",
            x_label="T_max / T_min",
            has_bound=True,
        )
        for group in dict.fromkeys(each.group for each in found)
    )
    figure = Figure(
        name=name,
        heading="Speed-up in time to EpochGossip's best accuracy less 0.3 points",
        caption="Medians over the seeds, thin lines the range of those that got there; no bar: "
        "most never did. Black: what not waiting alone can bring. Above it, a run also needed "
        "fewer samples.",
        panels=panels,
    )
    note = (
        "Medians over the seeds; a dash: not in its time, or it has no epochs. The target is "
        "EpochGossip's best accuracy less 0.3 percentage points, looked at after each of its "
        "epochs; the others after each of theirs, GoSGD twice in such a time. The bound is "
        "what not waiting alone can bring, in samples per second: sum(v) / (E v_min). At equal "
        "epochs, the paper's measure, a slow platform does less work than in EpochGossip and "
        "the bound is T_max / T_min: read it together with the loss of accuracy. Final "
        "accuracy is the mean over the last fifth of the time."
    )
    table = race_table(found, "Speed-ups, with their bound", note)
    return Exhibits(figures=(figure,) if panels else (), tables=(table,))
