"""Published synthetic gradients: dense layers on MNIST, one per stage.

Fields of a row:
    num_layers: Number of layers, each of which is a stage.
    error: Test error, the mean of the last five evaluations.
    epochs, accuracies: One number per evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import edgegossip as eg
from edgegossip.contract.ranges import check_range
from edgegossip.models.blocks import initialize_like_he
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.tasks import Settings
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.scoreboard import curves, grouped, last_looks, middle
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.training.optimizer import StepDecay
from studies.contest import Contest, StudySettings, contest_study
from studies.exhibits import figure_and_tables, table

BPROP, DNI, CDNI = "bprop", "dni", "cdni"
PUBLISHED: Mapping[str, Mapping[int, float]] = {
    BPROP: {3: 0.020, 4: 0.018, 5: 0.018, 6: 0.018},
    DNI: {3: 0.019, 4: 0.022, 5: 0.034, 6: 0.043},
    CDNI: {3: 0.022, 4: 0.019, 5: 0.017, 6: 0.016},
}
"""Published test errors, by method and number of layers."""
LR = 1e-3
DECAY = StepDecay(milestones=(0.6, 0.8))
"""The paper's decay: to a tenth at step 300,000 and again at step 400,000 of 500,000."""


def dense_layers(
    input_shape: tuple[int, ...], num_classes: int, *, num_layers: int, width: int
) -> nn.Sequential:
    """Build dense layers with batch norm and rectified linear units, one block per layer."""
    sizes = (torch.Size(input_shape).numel(), *(width,) * (num_layers - 1))
    blocks = [
        nn.Sequential(nn.Linear(*each), nn.BatchNorm1d(each[1]), nn.ReLU())
        for each in pairwise(sizes)
    ]
    blocks[0].insert(0, nn.Flatten())
    model = nn.Sequential(*blocks, nn.Linear(width, num_classes))
    initialize_like_he(model)
    return model


@dataclass(frozen=True, kw_only=True)
class PublishedModules(Contest):
    """Dense layers, trained with the true gradient and with synthetic gradients.

    Args:
        num_layers: Number of layers, each of which is a stage.
        width: Units of a hidden layer, in the model and in a synthetic-gradient module.
    """

    num_layers: int
    width: int

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        for name in PUBLISHED:
            work = partial(self._work, data_dir, name)
            yield self.cell(f"{self.num_layers}-layers/seed{self.seed}/{name}", work)

    def _work(self, data_dir: Path, name: str, session: Session) -> Row:
        settings, dataset = self.problem.settings, self.problem.load(data_dir)
        task = eg.Task(
            dataset=dataset,
            model=partial(
                self.problem.model,
                dataset.input_shape,
                dataset.num_classes,
                num_layers=self.num_layers,
                width=self.width,
            ),
            optimizer=partial(torch.optim.Adam, lr=LR),
            batch_size=settings.batch_size,
            schedule=DECAY,
        )
        steps = len(dataset.train) // settings.batch_size
        alone = eg.Alone(num_rounds=settings.num_epochs, local_steps=steps)
        experiment = eg.Experiment(
            task=task,
            algorithm=alone,
            platforms=(eg.Platform(throughput=1000.0),),
            seed=self.seed,
            evaluation_epochs=1.0,
            name=name,
        )
        if name != BPROP:
            experiment = self._apart(experiment, is_conditioned=name == CDNI)
        history = session.run(experiment).history
        accuracies = [each.accuracy for each in history]
        return {
            "group": self.group,
            "setting": f"{self.num_layers} layers",
            "num_layers": self.num_layers,
            "run": name,
            "seed": self.seed,
            "error": 1 - last_looks(accuracies),
            "epochs": [each.epochs for each in history],
            "accuracies": accuracies,
        }

    def _apart(self, whole: eg.Experiment, *, is_conditioned: bool) -> eg.Experiment:
        """Put each layer on its own machine, with nearly instant links."""
        teacher = eg.SyntheticGradients(lr=LR, width=self.width, is_conditioned=is_conditioned)
        parts = eg.staged(whole.task, range(1, self.num_layers), eg.DecoupledStage, teacher)
        algorithm = eg.Decoupled(
            inner=whole.algorithm,
            boundaries=parts.boundaries,
            num_classes=parts.num_classes,
            max_batch=whole.task.batch_size + 1,
            max_waiting=1,  # so that each module learns from the gradient of its last batch
        )
        return eg.Experiment(
            task=parts.task,
            algorithm=algorithm,
            platforms=whole.platforms * self.num_layers,
            links=eg.Links(default=eg.Link(latency=1e-6, bandwidth=1e12)),
            seed=whole.seed,
            evaluation_epochs=whole.evaluation_epochs,
            name=whole.name,
        )


SHORT = Problem(
    name="digits",
    dataset="digits",
    model=dense_layers,
    settings=Settings(num_epochs=1, batch_size=32),
)
DEPTHS = tuple(PUBLISHED[BPROP])


def _mnist(num_epochs: int) -> Problem:
    return Problem(
        name="mnist",
        dataset="mnist",
        model=dense_layers,
        settings=Settings(num_epochs=num_epochs, batch_size=256),
        scaled_down=f"{num_epochs} epochs of 234 steps at a rate of 1e-3 with the paper's "
        "decay, not 500,000 steps from 3e-5; modules with 256 hidden units, not 1,024, at a "
        "constant rate.",
    )


def published(
    settings: StudySettings = StudySettings(),
    *,
    depths: tuple[int, ...] = DEPTHS,
    num_epochs: int = 20,
) -> Study:
    """3 to 6 dense layers on MNIST, each a stage: test error, ours and published.

    Each run takes minutes.

    Args:
        settings: Settings of the study.
        depths: Numbers of layers, each from 3 to 6, as published.
        num_epochs: Passes over the data, 1 or more.

    Raises:
        ValueError: If a number is out of range.
    """
    for depth in depths:
        check_range("depths", depth, "in [3, 6]")
    check_range("num_epochs", num_epochs, "at least 1")
    problem, width = _mnist(num_epochs), 256
    if settings.short:
        problem, depths, width = SHORT, (3,), 16
    contests = [
        PublishedModules(problem=problem, seed=seed, num_layers=num_layers, width=width)
        for num_layers in depths
        for seed in settings.seeds
    ]
    return contest_study(
        "synthetic-gradients/published",
        "Do synthetic gradients learn as published?",
        settings,
        contests,
        _exhibits,
        printed=(
            "Test error in % with 3, 4, 5 and 6 dense layers: back-propagation 2.0, 1.8, 1.8, "
            "1.8; synthetic gradients (DNI) 1.9, 2.2, 3.4, 4.3; with the label (cDNI) 2.2, "
            "1.9, 1.7, 1.6 (Jaderberg et al. 2017; quoted from memory).",
        ),
        depths=depths,
        width=width,
        lr=LR,
    )


def _exhibits(rows: Mapping[str, Row]) -> Exhibits:
    first = min((row["seed"] for row in rows.values()), default=0)
    settings = dict.fromkeys((row["group"], row["setting"]) for row in rows.values())
    return figure_and_tables(
        "published",
        "Accuracy of dense layers that are trained separately",
        "One seed.",
        (
            curves(rows.values(), (*each, first), each[1], "passes over the data", x="epochs")
            for each in settings
        ),
        table(
            "Test error",
            (
                {
                    "layers": ("text", f"{num_layers}"),
                    "run": ("text", run),
                    "error": ("percent", middle(some, "error")),
                    "published": ("percent", PUBLISHED[run][num_layers]),
                }
                for (num_layers, run), some in grouped(
                    rows.values(), "num_layers", "run"
                ).items()
            ),
            "Medians over the seeds of the mean of the last five evaluations, one per epoch.",
        ),
    )
