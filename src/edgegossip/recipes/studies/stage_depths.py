"""More stages, and a deeper model: the cost of additional cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from edgegossip.models import vgg16 as vgg16_model
from edgegossip.recipes.staged_training import StageSettings
from edgegossip.recipes.studies.contest import settings_and_cells
from edgegossip.recipes.studies.problems import Problem
from edgegossip.recipes.studies.stage_contest import WHOLE, StageContest, stage_exhibits
from edgegossip.recipes.studies.stage_methods import DIGITS, MNIST, NOTE, TWO_LAYERS_EACH
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.recipes.tasks import Settings
from edgegossip.runs.study import Study

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
            seed=settings.seeds[0],
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

    Each run takes minutes.

    Args:
        settings: Settings of the study.
    """
    methods: tuple[str, ...] = (WHOLE, "greedy", "local-prediction")
    problem, machines = VGG16, BETWEEN_POOLINGS
    if settings.short:
        methods, problem = (WHOLE, "greedy"), replace(DIGITS, num_train=320)
        machines = StageSettings(width=0.1, num_stages=2)
    contest = StageContest(
        problem=problem,
        seed=settings.seeds[0],
        stages=machines,
        methods=methods,
        seeds=settings.seeds,
    )
    title = "How much does it cost to train the stages of a deep model separately?"
    return _study("vgg16", title, settings, [contest], "")


def _study(
    name: str,
    title: str,
    settings: StudySettings,
    contests: Sequence[StageContest],
    setting: str,
) -> Study:
    depends_on, cells = settings_and_cells(contests, settings)
    return Study(
        name=f"synthetic-gradients/{name}",
        title=title,
        printed=(
            "VGG16: up to 15 points of accuracy lost; the gap grows with the number of "
            "separately trained modules (HotEdge 2019; only the abstract is known to us).",
        ),
        scaled_down=(),
        settings={**depends_on, "contests": [each.plain() for each in contests]},
        cells=cells,
        exhibit=partial(stage_exhibits, name, setting, NOTE),
    )
