"""How many times sooner than with a barrier: EdgeGossip on tasks, seeds and imbalances."""

from __future__ import annotations

from collections.abc import Mapping

from edgegossip.experiments.describe import describe
from edgegossip.experiments.exhibits import Exhibits, Figure
from edgegossip.experiments.recipes.settings import ACCURACY_AWARE
from edgegossip.experiments.studies.platforms import imbalanced
from edgegossip.experiments.studies.problems import (
    CIFAR10_LENET5,
    CIFAR10_LENET5_AUGMENTED,
    CIFAR10_RESNET20,
    DIGITS_MLP,
    HAR_CNN,
    MNIST_LENET5,
    Problem,
)
from edgegossip.experiments.studies.race import (
    CONTENDERS,
    LESS_WORK,
    Contender,
    Race,
    Runs,
    Setup,
    max_work,
)
from edgegossip.experiments.studies.settings import StudySettings
from edgegossip.experiments.studies.standings import bars, race_table, standings
from edgegossip.experiments.study import Row, Study
from edgegossip.learning.accuracy_aware import PLAIN

TARGET_GAP = 0.003
IMBALANCES = (2.0, 4.0, 8.0)
CONTROLLED = 4.0
"""The imbalance at which the controls run too."""

EDGE_GOSSIP: Runs = {"edge-gossip": Contender()}
EQUAL_TIME: Runs = {**EDGE_GOSSIP, "random": Contender(PLAIN)}
CONTROLLED_RUNS: Runs = {**CONTENDERS, "edge-gossip-gosgd": Contender(inner="gosgd")}

DEFAULTS = StudySettings(seeds=(0, 1, 2, 3, 4))


def speedup(settings: StudySettings = DEFAULTS, *, all_controls: bool = False) -> Study:
    """Time to EpochGossip's best accuracy less 0.3 points, at imbalances 2, 4 and 8.

    Args:
        settings: What to change.
        all_controls: Run random shares and GoSGD at each imbalance, not at 4 alone.
    """
    races = [
        race
        for problem in _problems(settings)
        for seed in settings.seeds
        for race in [_race(problem, seed, settings, all_controls=all_controls)]
    ]
    problems = {race.problem.name: race.problem for race in races}.values()
    return Study(
        name="edgegossip/speedup",
        title="How many times sooner does EdgeGossip get where EpochGossip gets?",
        printed=(
            "The paper prints one number: 2.70 times less training time than GoSGD on average, "
            "at a loss of accuracy of 0.78 %, T_max / T_min not given.",
        ),
        scaled_down=(
            "EpochGossip is trained once a seed: its accuracy after each epoch does not depend "
            "on speeds, and when its epochs end on other machines is simulated without "
            "training.",
            LESS_WORK,
        ),
        settings={
            **settings.plain(),
            "all_controls": all_controls,
            "target_gap": TARGET_GAP,
            "problems": [problem.plain() for problem in problems],
            "accuracy_aware": describe(ACCURACY_AWARE),
        },
        cells=tuple(cell for race in races for cell in race.cells(settings.data_dir)),
        exhibit=_exhibit,
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


def _race(problem: Problem, seed: int, settings: StudySettings, *, all_controls: bool) -> Race:
    def runs(imbalance: float) -> Runs:
        if problem is CIFAR10_RESNET20:
            return EQUAL_TIME  # it takes too long for more
        return CONTROLLED_RUNS if all_controls or imbalance == CONTROLLED else EDGE_GOSSIP

    wanted = (CONTROLLED,) if problem is CIFAR10_RESNET20 else IMBALANCES
    return Race(
        group=problem.name,
        problem=problem,
        setups=tuple(
            Setup(
                name=f"{imbalance:g} times",
                platforms=imbalanced(4, problem.settings.throughput, imbalance),
                runs=runs(imbalance),
            )
            for imbalance in wanted
        ),
        seed=seed,
        max_work=max_work(settings),
    )


def _exhibit(rows: Mapping[str, Row]) -> Exhibits:
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
        name="speedup",
        heading="Speed-up in time to EpochGossip's best accuracy less 0.3 points",
        caption="Medians over the seeds, thin lines the range of those that got there; no bar: "
        "most never did. Black: what not waiting alone can bring. Above it, a run also needed "
        "fewer samples.",
        panels=panels,
    )
    note = (
        "Medians over the seeds; a dash: never, or it has no epochs. The target is "
        "EpochGossip's best accuracy less 0.3 percentage points, looked at after each of its "
        "epochs; the others after each of theirs, GoSGD twice in such a time. The bound is "
        "what not waiting alone can bring, in samples per second: sum(v) / (E v_min). At equal "
        "epochs, the paper's measure, a slow platform does less work than in EpochGossip and "
        "the bound is T_max / T_min: read it together with the loss of accuracy. Final "
        "accuracy is the mean over the last fifth of the time."
    )
    table = race_table(found, "Speed-ups, with their bound", note)
    return Exhibits(figures=(figure,) if panels else (), tables=(table,))
