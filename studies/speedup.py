"""Speed-up of EdgeGossip over EpochGossip, by task, imbalance, selection, data and load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import edgegossip as eg
from edgegossip.contract.ranges import check_range
from edgegossip.data.partition import LabelSkew
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.tasks import ACCURACY_AWARE, Window
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.scoreboard import bars
from edgegossip.runs.study import Row, Study
from edgegossip.training.sampling.selection import SELECTIONS
from studies.contest import Contenders, StudySettings
from studies.exhibits import figure_and_tables
from studies.problems import (
    CIFAR10_LENET5,
    CIFAR10_LENET5_AUGMENTED,
    CIFAR10_RESNET20,
    DIGITS_MLP,
    HAR_BY_SUBJECT,
    HAR_CNN,
    IMAGENET8X8_EIGHT_LAYERS,
    MNIST_LENET5,
    with_epochs,
)
from studies.race import (
    CONTENDERS,
    CONTROLS,
    EDGE_GOSSIP,
    MAX_WORK,
    PUBLISHED,
    WITH_PAPER,
    Setup,
    imbalanced,
    less_work,
    race_study,
    races_of,
    work_limit,
)
from studies.race_scores import PAPER_LOSS, race_table, standings

TARGET_GAP = 0.003
IMBALANCES = (2.0, 4.0, 8.0)
Controls: TypeAlias = Literal["none", "at-4", "all"]
CONTROLLED = 4.0
"""The imbalance at which the controls run by default."""

_CONTROLLED: dict[str, Any] = {"control": 1.0, "balancing": {"correction": 0.0}}
ALONE: Contenders = {
    "edge-gossip": EDGE_GOSSIP,
    "edge-gossip-auto": replace(EDGE_GOSSIP, **{**_CONTROLLED, "control": "auto"}),
    "edge-gossip-controlled": replace(EDGE_GOSSIP, **_CONTROLLED),
}
UNSELECTED: Contenders = {"random-controlled": replace(CONTROLS["random"], **_CONTROLLED)}
"""Control variates without a selection; on equally fast machines, EpochGossip with them."""
EQUAL_TIME: Contenders = {**ALONE, "random": CONTROLS["random"]}
CONTROLLED_RUNS: Contenders = {
    **ALONE,
    **CONTENDERS,
    **UNSELECTED,
    **PUBLISHED,
    "edge-gossip-gosgd": replace(EDGE_GOSSIP, algorithm=eg.GoSGD, draws_exchanges=True),
}

SHARED: Contenders = {
    "edge-gossip-shared": replace(CONTROLS["random"], is_shared=True),
    "edge-gossip-shared-focused": replace(EDGE_GOSSIP, is_shared=True),
}
"""Claimed work: no worker has samples of its own; with `focused`, a choice within units."""

DEFAULTS = StudySettings(seeds=(0, 1, 2, 3, 4))


def speedup(
    settings: StudySettings = DEFAULTS,
    *,
    controls: Controls = "at-4",
    max_work: float | None = MAX_WORK,
    window: Window = None,
    speeds: tuple[float, ...] = (),
    num_epochs: int | None = None,
    shared: bool = False,
) -> Study:
    """Time to EpochGossip's best accuracy minus 0.3 points, on uneven machines.

    Data: MNIST, HAR, CIFAR-10 and ImageNet 8x8. On one core, five seeds take two to three hours
    for `mnist-lenet5`, `har-cnn` or `cifar10-lenet5`, three for `cifar10-resnet20`, and four
    for `cifar10-lenet5-augmented`. A run of `imagenet8x8-eight-layers` takes 3 to 6 minutes.

    Args:
        settings: Settings of the study.
        controls: Imbalances at which the controls, such as random shares and GoSGD, also run.
        max_work: Limit on the contenders' samples, in multiples of EpochGossip's; None gives
            contenders all of EpochGossip's time, in which they converge.
        window: Epochs' worth of samples over which all models, including EpochGossip's, are
            averaged before evaluation; None evaluates the newest models.
        speeds: Relative speeds of the machines, at least two; without them, four machines have
            imbalances 2, 4 and 8. Controls then run unless `controls` is none.
        num_epochs: Number of EpochGossip's epochs; by default each problem's.
        shared: Whether runs in which all workers can read all data are included, which claim
            units of it.

    Raises:
        ValueError: If `num_epochs` or `window` is out of range, or there is one speed, or one
            that is not positive and finite.
    """
    check_range("num_epochs", num_epochs, "at least 1 or None")
    limit = work_limit(settings, max_work)
    return race_study(
        "speedup",
        "How much sooner does EdgeGossip reach EpochGossip's accuracy?",
        settings,
        races_of(
            _problems(settings, num_epochs),
            partial(_setups, controls=controls, speeds=speeds, more=SHARED if shared else {}),
            settings,
            max_work,
            window,
        ),
        partial(speedup_exhibits, "speedup"),
        printed=(
            "The paper prints one number: 2.70 times less training time than GoSGD on average, "
            "at a loss of accuracy of 0.78 %, T_max / T_min not given.",
        ),
        scaled_down=(
            "EpochGossip is trained once per seed: its accuracy after each epoch does not "
            "depend on speeds. The ends of its epochs on other machines are simulated without "
            "training.",
            *less_work(limit),
        ),
        controls=controls,
        max_work=limit,
        target_gap=TARGET_GAP,
        window=window,
        speeds=speeds,
        num_epochs=num_epochs,
        **({"shared": True} if shared else {}),
    )


def selections(settings: StudySettings = StudySettings()) -> Study:
    """Time to EpochGossip's best accuracy minus 0.3 points, by selection, at imbalance 4.

    `focused` and `random` keep their defaults. The other selections look at all aggregated
    points before each epoch, as in the paper, at the full cost. Data: MNIST, HAR and CIFAR-10.
    A run takes 3 to 10 minutes on one core.

    Args:
        settings: Settings of the study.
    """
    others = [name for name in SELECTIONS if name not in ("focused", "random")]
    if settings.short:
        others = ["ranked", "pruned"]
    runs = {"focused": EDGE_GOSSIP}
    for name in others:
        aware = replace(ACCURACY_AWARE, selection=SELECTIONS[name], look_share=None)
        runs[name] = replace(EDGE_GOSSIP, accuracy_aware=aware)
    runs["random"] = CONTROLS["random"]
    problems = (DIGITS_MLP,) if settings.short else (MNIST_LENET5, HAR_CNN, CIFAR10_LENET5)
    limit = work_limit(settings)
    return race_study(
        "selections",
        "Which selection of samples reaches EpochGossip's accuracy soonest?",
        settings,
        races_of(
            problems, lambda problem: (uneven_setup(problem, CONTROLLED, runs),), settings
        ),
        partial(speedup_exhibits, "selections"),
        printed=("The paper ranks subsets by the loss of their aggregated point: `ranked`.",),
        scaled_down=less_work(limit),
        max_work=limit,
        target_gap=TARGET_GAP,
    )


def _problems(settings: StudySettings, num_epochs: int | None) -> Sequence[Problem]:
    problems: Sequence[Problem] = (
        MNIST_LENET5,
        HAR_CNN,
        CIFAR10_LENET5,
        CIFAR10_LENET5_AUGMENTED,
        CIFAR10_RESNET20,
        IMAGENET8X8_EIGHT_LAYERS,
    )
    if settings.short:
        problems = (DIGITS_MLP,)
    if num_epochs is None:
        return problems
    return [with_epochs(each, num_epochs) for each in problems]


def _setups(
    problem: Problem, controls: Controls, speeds: tuple[float, ...], more: Contenders
) -> tuple[Setup, ...]:
    if speeds:
        runs = ALONE if controls == "none" else CONTROLLED_RUNS
        if problem.name == CIFAR10_RESNET20.name:
            runs = EQUAL_TIME
        return (setup_of_speeds(problem, speeds, {**runs, **more}),)
    if problem.name == CIFAR10_RESNET20.name:  # more runs would take too long
        return (uneven_setup(problem, CONTROLLED, {**EQUAL_TIME, **more}),)
    controlled = {"none": (), "at-4": (CONTROLLED,), "all": IMBALANCES}[controls]
    return tuple(
        uneven_setup(
            problem,
            imbalance,
            {**(CONTROLLED_RUNS if imbalance in controlled else ALONE), **more},
        )
        for imbalance in IMBALANCES
    )


_MNIST_10 = with_epochs(MNIST_LENET5, 10)
SKEWED = (
    HAR_BY_SUBJECT,
    replace(_MNIST_10, name="mnist-dirichlet-1", partition=eg.Dirichlet(alpha=1.0)),
    replace(_MNIST_10, name="mnist-dirichlet-0.1", partition=eg.Dirichlet(alpha=0.1)),
    replace(_MNIST_10, name="mnist-label-skew-0.8", partition=LabelSkew(0.8)),
)
SHORT_SKEWED = replace(DIGITS_MLP, name="digits-dirichlet-1", partition=eg.Dirichlet(alpha=1.0))
SKEW_RUNS: Contenders = {
    **CONTENDERS,
    **ALONE,
    **UNSELECTED,
    "uncorrected": replace(EDGE_GOSSIP, balancing={"correction": 0.0}),
    "fully-corrected": replace(EDGE_GOSSIP, balancing={"correction": 1.0}),
}


def skew(
    settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4)),
    *,
    window: Window = None,
    speeds: tuple[float, ...] = (),
) -> Study:
    """Time to EpochGossip's best accuracy minus 0.3 points on skewed data.

    Data: HAR by subject, and MNIST by Dirichlet and label skew. On one core, each run of
    `har-by-subject` takes 3 to 6 minutes.

    Args:
        settings: Settings of the study.
        window: As in edgegossip/speedup.
        speeds: Relative speeds of the machines, at least two; without them, the fastest of four
            is 4 times as fast as the slowest.
    """
    return race_study(
        "skew",
        "Is EdgeGossip as good if the workers' data differ?",
        settings,
        races_of(
            (SHORT_SKEWED,) if settings.short else SKEWED,
            partial(_skew_setups, speeds=speeds),
            settings,
            max_work=None,
            window=window,
        ),
        partial(speedup_exhibits, "skew"),
        printed=("The paper divides the data evenly.",),
        scaled_down=(),
        target_gap=TARGET_GAP,
        window=window,
        speeds=speeds,
    )


def _skew_setups(problem: Problem, speeds: tuple[float, ...]) -> tuple[Setup, ...]:
    if speeds:
        return (setup_of_speeds(problem, speeds, SKEW_RUNS),)
    return (uneven_setup(problem, CONTROLLED, SKEW_RUNS),)


LOADS = (
    "Loads are drawn, in phases of 8 s on average, like those of WordCount and Sort; each seed "
    "has its own. The bound is that of idle machines, and so is the limit on samples, which "
    "others than EpochGossip therefore miss by up to a tenth.",
    "EdgeGossip has a profile of each machine and makes a forecast for each block; the runs "
    "named one-forecast make one for each epoch, and those named no-profile go by the present "
    "speed.",
)
"""Sentences for the report of races under load."""


def with_profiles(runs: Contenders) -> Contenders:
    """Give EdgeGossip's runs a profile of each machine; add runs with one forecast an epoch."""
    one_forecast = replace(EDGE_GOSSIP, balancing={"block_share": 1.0})
    balanced = {**runs, "one-forecast": one_forecast}
    profiled = {
        # Without a choice of samples, there is no EdgeGossip that would forecast.
        name: replace(run, has_profiles=run.accuracy_aware is not None)
        for name, run in balanced.items()
    }
    return {**profiled, "one-forecast-no-profile": one_forecast}


LOADED_RUNS: Contenders = {**with_profiles(WITH_PAPER), "no-profile": EDGE_GOSSIP}


def contention(
    settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4)),
    *,
    window: Window = None,
) -> Study:
    """Time to EpochGossip's best accuracy minus 0.3 points while other jobs run.

    Data: HAR and MNIST. On one core, a run of `har-cnn` takes 2 minutes.

    Args:
        settings: Settings of the study.
        window: As in edgegossip/speedup.
    """
    problems = (DIGITS_MLP,) if settings.short else (HAR_CNN, MNIST_LENET5)
    limit = work_limit(settings)
    return race_study(
        "contention",
        "How much do profiles and blocks help if other programs load the machines?",
        settings,
        races_of(problems, _loaded_setups, settings, window=window, loaded=True),
        partial(speedup_exhibits, "contention"),
        printed=(
            "The paper forecasts once per epoch, from a profile; it runs WordCount and "
            "Sort during training, and prints no numbers for this comparison.",
        ),
        scaled_down=(*LOADS, *less_work(limit)),
        loaded=True,
        max_work=limit,
        target_gap=TARGET_GAP,
        window=window,
    )


def _loaded_setups(problem: Problem) -> tuple[Setup, ...]:
    return tuple(
        Setup(
            name=name,
            platforms=imbalanced(4, problem.settings.throughput, imbalance),
            runs=LOADED_RUNS,
        )
        for name, imbalance in (("equal, loaded", 1.0), ("4 times, loaded", CONTROLLED))
    )


def uneven_setup(problem: Problem, imbalance: float, runs: Contenders) -> Setup:
    """Four machines, the fastest `imbalance` times as fast as the slowest."""
    return Setup(
        name=f"{imbalance:g} times",
        platforms=imbalanced(4, problem.settings.throughput, imbalance),
        runs=runs,
    )


def setup_of_speeds(problem: Problem, speeds: tuple[float, ...], runs: Contenders) -> Setup:
    """Machines of these relative speeds.

    Raises:
        ValueError: If there are fewer than two speeds, or one is not positive and finite.
    """
    if len(speeds) == 1:
        raise ValueError(f"speeds must have at least two numbers, got {speeds}")
    for speed in speeds:
        check_range("speeds", speed, "above 0 and finite")
    listed = " ".join(f"{speed:g}" for speed in speeds)
    return Setup(
        name=f"speeds {listed}" if len(speeds) <= 8 else f"{len(speeds)} speeds",
        platforms=eg.uneven(len(speeds), problem.settings.throughput, speeds),
        runs=runs,
    )


def speedup_exhibits(name: str, rows: Mapping[str, Row]) -> Exhibits:
    """Draw speed-ups over EpochGossip; tabulate them raw and with equally many evaluations."""
    found, dash = standings(rows.values(), TARGET_GAP), "not in its time"
    panels = (
        bars(
            [each for each in found if each.group == group and each.run != "epoch-gossip"],
            "speed-up",
            title=group,
            y_label="speed-up in time to target",
            x_label="T_max / T_min",
            mark=("throughput bound", "bound"),
        )
        for group in dict.fromkeys(each.group for each in found)
    )
    table = race_table(
        found,
        "Speed-ups, with their bound",
        TARGET_GAP,
        dash,
        looks=", evaluated after each of its epochs; the others after each of theirs, GoSGD "
        "twice in such a time",
    )
    equal_looks = [
        race_table(
            standings(rows.values(), gap, is_smoothed=True),
            f"Speed-ups to {100 * gap:g} points less, with equally many evaluations",
            gap,
            dash,
            looks="; curves are means over intervals in which a run processes an epoch's worth "
            "of samples",
        )
        for gap in (TARGET_GAP, PAPER_LOSS)
    ]
    return figure_and_tables(
        name,
        "Speed-up in time to EpochGossip's best accuracy less 0.3 points",
        "Medians over the seeds; thin lines: the range of those that reached it; no bar: most "
        "never did. Black: the speed-up from eliminating waiting alone. Above it, a run also "
        "needed fewer samples.",
        panels,
        table,
        *equal_looks,
    )
