"""EdgeGossip on skewed data, compared with EpochGossip and the controls."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from edgegossip.data.partition import BySubject, Dirichlet, LabelSkew
from edgegossip.recipes.studies.contest import Contenders
from edgegossip.recipes.studies.problems import (
    DIGITS_MLP,
    HAR_CNN,
    MNIST_LENET5,
    Problem,
    with_epochs,
)
from edgegossip.recipes.studies.race import (
    CONTENDERS,
    EDGE_GOSSIP,
    Setup,
    race_study,
    races_of,
)
from edgegossip.recipes.studies.speedup import (
    ALONE,
    CONTROLLED,
    TARGET_GAP,
    UNSELECTED,
    setup_of_speeds,
    speedup_exhibits,
    uneven_setup,
)
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.runs.study import Study

_MNIST = with_epochs(MNIST_LENET5, 10)
PROBLEMS = (
    replace(HAR_CNN, name="har-by-subject", partition=BySubject()),
    replace(_MNIST, name="mnist-dirichlet-1", partition=Dirichlet(alpha=1.0)),
    replace(_MNIST, name="mnist-dirichlet-0.1", partition=Dirichlet(alpha=0.1)),
    replace(_MNIST, name="mnist-label-skew-0.8", partition=LabelSkew(0.8)),
)
SHORT = replace(DIGITS_MLP, name="digits-dirichlet-1", partition=Dirichlet(alpha=1.0))
RUNS: Contenders = {
    **CONTENDERS,
    **ALONE,
    **UNSELECTED,
    "uncorrected": replace(EDGE_GOSSIP, balancing={"correction": 0.0}),
    "fully-corrected": replace(EDGE_GOSSIP, balancing={"correction": 1.0}),
}


def skew(
    settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4)),
    *,
    window: float | None = None,
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
    problems = (SHORT,) if settings.short else PROBLEMS
    return race_study(
        "skew",
        "Is EdgeGossip as good if the workers' data differ?",
        settings,
        [
            race
            for problem in problems
            for race in races_of(
                problem,
                (_setup(problem, speeds),),
                settings,
                max_work=None,
                window=window,
            )
        ],
        partial(speedup_exhibits, "skew"),
        printed=("The paper divides the data evenly.",),
        scaled_down=(),
        target_gap=TARGET_GAP,
        window=window,
        speeds=speeds or None,
    )


def _setup(problem: Problem, speeds: tuple[float, ...]) -> Setup:
    if speeds:
        return setup_of_speeds(problem, speeds, RUNS)
    return uneven_setup(problem, CONTROLLED, RUNS)
