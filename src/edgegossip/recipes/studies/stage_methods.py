"""Methods that train one model in stages: the cost and benefit of decoupling."""

from __future__ import annotations

from functools import partial

from edgegossip.models.chains import eight_layers
from edgegossip.recipes.staged_training import COMPETITORS, METHODS, StageSettings
from edgegossip.recipes.studies.contest import settings_and_cells
from edgegossip.recipes.studies.problems import Problem
from edgegossip.recipes.studies.stage_contest import WHOLE, StageContest, stage_exhibits
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.recipes.tasks import Settings
from edgegossip.runs.study import Study

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
    "best of three, on held-out data with another seed. The whole model is trained on one "
    "machine."
)


def methods(settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4))) -> Study:
    """Eight ways to train eight layers in four stages, equally tuned: accuracy, time, bytes.

    Data: MNIST and CIFAR-10. Duration: a minute per run on MNIST.

    Args:
        settings: Settings of the study.
    """
    names = (*COMPETITORS, *METHODS)
    stages = TWO_LAYERS_EACH
    problems: tuple[Problem, ...] = (MNIST, CIFAR10)
    if settings.short:
        names, problems = (WHOLE, "greedy"), (DIGITS,)
        stages = StageSettings(width=0.1, num_stages=2)
    contests = [
        StageContest(
            problem=problem,
            seed=settings.seeds[0],
            stages=stages,
            methods=names,
            seeds=settings.seeds,
        )
        for problem in problems
    ]
    depends_on, cells = settings_and_cells(contests, settings)
    return Study(
        name="synthetic-gradients/methods",
        title="How much does training the stages of a model separately cost and save?",
        printed=(
            "Eight layers, convolutional and fully connected: accuracy comparable to "
            "back-propagation, 11 % faster on several limited containers than the whole model "
            "on an unlimited machine (HotEdge 2019; only the abstract is known to us).",
        ),
        scaled_down=(),
        settings={**depends_on, "contest": contests[0].plain()},
        cells=cells,
        exhibit=partial(stage_exhibits, "methods", "", NOTE),
    )
