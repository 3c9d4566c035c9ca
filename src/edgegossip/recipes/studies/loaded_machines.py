"""EdgeGossip on machines that other programs load: the benefit of profiles and blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from edgegossip.experiments.study import Study
from edgegossip.recipes.studies.contest import Contenders
from edgegossip.recipes.studies.platforms import imbalanced
from edgegossip.recipes.studies.problems import DIGITS_MLP, HAR_CNN, MNIST_LENET5, Problem
from edgegossip.recipes.studies.race import (
    AS_PUBLISHED,
    CONTROLS,
    EDGE_GOSSIP,
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
from edgegossip.sim.traces import batch_jobs

ONE_FORECAST = {"block_share": 1.0}
RUNS: Contenders = {
    "edge-gossip": replace(EDGE_GOSSIP, has_profiles=True),
    "no-profile": EDGE_GOSSIP,
    "one-forecast": replace(EDGE_GOSSIP, has_profiles=True, balancing=ONE_FORECAST),
    "one-forecast-no-profile": replace(EDGE_GOSSIP, balancing=ONE_FORECAST),
    "random": replace(CONTROLS["random"], has_profiles=True),
    "gosgd": CONTROLS["gosgd"],
    "as-published": replace(AS_PUBLISHED, has_profiles=True),
}


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
            for race in races_of(problem, _setups(problem), settings, window=window)
        ],
        partial(speedup_exhibits, "contention"),
        printed=(
            "The paper forecasts once per epoch, from a profile; it runs WordCount and "
            "Sort during training, and prints no numbers for this comparison.",
        ),
        scaled_down=(
            "Loads are drawn, in phases of 8 s on average, like those of WordCount and Sort. "
            "The bound is that of idle machines.",
            *less_work(limit),
        ),
        max_work=limit,
        target_gap=TARGET_GAP,
        window=window,
    )


def _setups(problem: Problem) -> tuple[Setup, ...]:
    return tuple(
        Setup(
            name=name,
            platforms=tuple(
                replace(each, trace=batch_jobs(seed=rank))
                for rank, each in enumerate(
                    imbalanced(4, problem.settings.throughput, imbalance)
                )
            ),
            runs=RUNS,
        )
        for name, imbalance in (("equal, loaded", 1.0), ("4 times, loaded", CONTROLLED))
    )
