"""EdgeGossip on machines that other programs load: the benefit of profiles and blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from edgegossip.recipes.studies.contest import Contenders
from edgegossip.recipes.studies.platforms import imbalanced
from edgegossip.recipes.studies.problems import DIGITS_MLP, HAR_CNN, MNIST_LENET5, Problem
from edgegossip.recipes.studies.race import (
    EDGE_GOSSIP,
    WITH_PAPER,
    Setup,
    less_work,
    race_study,
    races_of,
    work_limit,
)
from edgegossip.recipes.studies.speedup import (
    CONTROLLED,
    TARGET_GAP,
    speedup_exhibits,
)
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.runs.study import Study

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


RUNS: Contenders = {**with_profiles(WITH_PAPER), "no-profile": EDGE_GOSSIP}


def contention(
    settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4)),
    *,
    window: float | None = None,
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
        [
            race
            for problem in problems
            for race in races_of(
                problem, _setups(problem), settings, window=window, loaded=True
            )
        ],
        partial(speedup_exhibits, "contention"),
        printed=(
            "The paper forecasts once per epoch, from a profile; it runs WordCount and "
            "Sort during training, and prints no numbers for this comparison.",
        ),
        scaled_down=(*LOADS, *less_work(limit)),
        loaded=True,  # in older folders, without this setting, all seeds have one load
        max_work=limit,
        target_gap=TARGET_GAP,
        window=window,
    )


def _setups(problem: Problem) -> tuple[Setup, ...]:
    return tuple(
        Setup(
            name=name,
            platforms=imbalanced(4, problem.settings.throughput, imbalance),
            runs=RUNS,
        )
        for name, imbalance in (("equal, loaded", 1.0), ("4 times, loaded", CONTROLLED))
    )
