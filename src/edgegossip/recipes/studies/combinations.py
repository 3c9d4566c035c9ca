"""Figure 3 of the EdgeGossip paper: cost and quality of combinations of aggregation.

Fields of a row:
    problem, ratio: Model and data; samples for each aggregated point. Rows without these fields
        are LeNet-5's, at ratio 10. Newer rows also have `num_samples` and the problem's
        settings.
    technique, seed: Combination of reduction and division, or a control.
    wall_reduction, wall_division, wall_means: Processor time of the three steps.
    num_points, num_steps: Points that the model learned from, and its steps.
    accuracy: Accuracy on the test split, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from edgegossip.contract.protocol import Steps, Train
from edgegossip.contract.randomness import generator
from edgegossip.data.dataset import ArraySplit
from edgegossip.recipes.studies.aggregation_steps import (
    CLOCK,
    STEPS,
    steps_panel,
)
from edgegossip.recipes.studies.problems import (
    CIFAR10_ALEXNET_QUARTER,
    CIFAR10_LENET5,
    DIGITS_MLP,
    Problem,
)
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.recipes.studies.timing import timed_fit
from edgegossip.recipes.studies.training import SELECTED
from edgegossip.runs.exhibits import Exhibits, Figure, Panel, Series, Table
from edgegossip.runs.process import one_intra_op_thread
from edgegossip.runs.scoreboard import grouped, middle
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.training.sampling.aggregation import COMBINATIONS, aggregator
from edgegossip.training.task import Workload

SLOW = ("svd-gmm", "pca-kmeans", "pca-lsh", "full-svd-lsh")
"""Combinations over ten times slower than the selected ones, according to the paper."""

RANDOM, ALL = "random samples", "all samples"
"""The controls of figure 3: as many samples as points, and all samples."""


@dataclass(frozen=True, kw_only=True)
class _FromPoints:
    """Settings for a model that learns from aggregated points.

    Args:
        problem: Model and data; `--only` picks it by name.
        ratio: Samples for each point.
        num_samples: Samples that are aggregated.
        num_steps: Steps in which the model learns from the points.
        folder: Prefix of the cells' names.
        smaller: Sentence about everything else that is smaller than in the paper.
    """

    problem: Problem
    ratio: float = 10.0
    num_samples: int
    num_steps: int
    folder: str = ""
    smaller: str = ""

    @property
    def scaled_down(self) -> str:
        """Everything that is smaller than in the paper, in sentences."""
        dataset, settings = self.problem.dataset, self.problem.settings
        return (
            f"{self.problem.name}: {self.num_samples:,} samples of {dataset} are aggregated, "
            f"{self.ratio:g} for each point; the model learns for {self.num_steps:,} steps of "
            f"{settings.batch_size} from the points alone. The paper does not say "
            f"for how long. {self.smaller}"
        ).rstrip()


LENET = _FromPoints(problem=CIFAR10_LENET5, num_samples=12_500, num_steps=2_000)
ALEXNET = _FromPoints(
    problem=CIFAR10_ALEXNET_QUARTER,
    ratio=5.0,
    num_samples=10_000,
    num_steps=2_000,
    folder="cifar10-alexnet-quarter/",
    smaller="AlexNet has a quarter of its channels and hidden units, and is tested on 2,000 "
    "pictures.",
)
"""The paper's model, at a quarter of its width, and the paper's ratio."""

_SHORT = _FromPoints(
    problem=DIGITS_MLP, num_samples=400, num_steps=100, smaller=DIGITS_MLP.scaled_down
)
_SHORT_5 = replace(
    _SHORT, problem=replace(DIGITS_MLP, name="digits-mlp-5"), ratio=5.0, folder="digits-mlp-5/"
)


def fig3(settings: StudySettings = StudySettings()) -> Study:
    """The eight combinations: time of each step, and accuracy learned from the points alone.

    On CIFAR-10: LeNet-5 at ratio 10 (`cifar10-lenet5`, 7 minutes on one core), and AlexNet with
    a quarter of its width at the paper's ratio of 5 (`cifar10-alexnet-quarter`, 20 minutes).

    Args:
        settings: Settings of the study.
    """
    parts = (_SHORT, _SHORT_5) if settings.short else (LENET, ALEXNET)
    cells = [
        Cell(
            name=f"{part.folder}{technique.replace(' ', '-')}/seed{seed}",
            group=part.problem.name,
            work=partial(_combination, part, settings, technique, seed),
            scaled_down=part.scaled_down,
        )
        for part in parts
        for technique in (*COMBINATIONS, RANDOM, ALL)
        for seed in settings.seeds
    ]
    first = parts[0]
    return Study(
        name="edgegossip/fig3",
        is_timed=True,
        title="Which aggregation technique is fast, and which one's points suit learning?",
        printed=(
            "Eight combinations of reduction and division are compared with AlexNet at ratio "
            "5, and three selected: SVD of single points with k-means, incremental SVD with "
            "LSH, hash with k-means.",
            "SVD with a Gaussian mixture, PCA with either division and SVD of the whole data "
            "set are more than 10 times slower; histograms with k-means are fast but least "
            "accurate. No other numbers are printed.",
        ),
        scaled_down=(CLOCK,),
        settings={
            **settings.plain(),
            # Of the first part, so that older folders can be resumed; rows tell the rest.
            "problem": first.problem.plain(),
            "num_samples": first.num_samples,
            "num_steps": first.num_steps,
        },
        cells=tuple(cells),
        exhibit=partial(_fig3_exhibits, first),
    )


def _combination(
    part: _FromPoints, settings: StudySettings, technique: str, seed: int, session: Session
) -> Row:
    """Train on aggregated points of some samples, or on the samples themselves."""
    problem, ratio = part.problem, part.ratio
    dataset = problem.load(settings.data_dir)
    order = torch.randperm(len(dataset.train), generator=generator(seed, "study"))
    x, y = dataset.train.batch(order[: part.num_samples])
    row = {**problem.plain(), "ratio": ratio, "num_samples": part.num_samples}
    row |= {"technique": technique, "seed": seed}
    if technique == RANDOM:
        x, y = x[: round(part.num_samples / ratio)], y[: round(part.num_samples / ratio)]
    elif technique != ALL:
        aggregated, times = timed_fit(aggregator(technique, ratio, seed), x, y)
        x, y = aggregated.x, aggregated.y
        row |= {f"wall_{step}": seconds for step, seconds in asdict(times).items()}
    accuracy = _learn(problem, settings, x, y, seed, part.num_steps)
    return row | {"num_points": len(x), "num_steps": part.num_steps, "accuracy": accuracy}


def _learn(
    problem: Problem, settings: StudySettings, x: Tensor, y: Tensor, seed: int, num_steps: int
) -> float:
    """Accuracy of a model after `num_steps` on pictures `x`, in 0 .. 255, and labels `y`."""
    task = problem.task(settings.data_dir)
    # Pictures whose numbers are not whole are features, which data sets keep in [0, 1].
    points = ArraySplit(x.float() / 255, y)
    task = replace(task, dataset=replace(task.dataset, train=points))
    with one_intra_op_thread():
        workload = Workload(task, [0], seed)
        result = workload.make_trainer(0).train(
            Train(workload.initial_params(), Steps(num_steps))
        )
        return workload.evaluate(result.params)[1][task.metric.name]


def _fig3_exhibits(first: _FromPoints, rows: Mapping[str, Row]) -> Exhibits:
    older = {"problem": first.problem.name, "ratio": first.ratio}
    parts = grouped(({**older, **row} for row in rows.values()), "problem", "ratio")
    if not parts:
        return Exhibits()
    figure = Figure(
        name="fig3",
        heading="Eight combinations of reduction and division",
        caption="Left: time to aggregate. Right: accuracy learned from the points alone; "
        "higher is better. Medians over the seeds.",
        panels=tuple(
            panel
            for (problem, ratio), some in parts.items()
            for panel in _fig3_panels(f"{problem}, ratio {ratio:g}", some)
        ),
    )
    table = _fig3_table([some for each in parts.values() for some in _by_technique(each)])
    return Exhibits(figures=(figure,), tables=(table,))


def _by_technique(rows: Sequence[Row]) -> list[list[Row]]:
    return [*grouped(rows, "technique").values()]


def _fig3_panels(part: str, rows: Sequence[Row]) -> list[Panel]:
    groups = {some[0]["technique"]: some for some in _by_technique(rows)}
    timed = {name: some for name, some in groups.items() if name in COMBINATIONS}
    accuracy = Panel(
        title=f"Accuracy, {part}",
        kind="bars",
        x_label="",
        y_label="accuracy",
        y_unit="percent",
        series=(
            Series(
                name="accuracy",
                x=tuple(groups),
                y=tuple(middle(some, "accuracy") for some in groups.values()),
            ),
        ),
    )
    return [steps_panel(f"Time, {part}", timed), accuracy] if timed else [accuracy]


def _fig3_table(groups: Sequence[list[Row]]) -> Table:
    return Table(
        heading="Our results and the paper's statements",
        columns=(
            ("model", "text"),
            ("ratio", "number"),
            ("technique", "text"),
            *((step, "seconds") for step in STEPS),
            ("points", "number"),
            ("accuracy", "percent"),
            ("paper", "text"),
        ),
        rows=tuple(
            (
                *(some[0][field] for field in ("problem", "ratio", "technique")),
                *(middle(some, f"wall_{step}") for step in STEPS),
                some[0]["num_points"],
                middle(some, "accuracy"),
                _verdict(some[0]["technique"]),
            )
            for some in groups
        ),
        note="Medians over the seeds. Random and all samples are controls, not in the paper.",
    )


def _verdict(technique: str) -> str:
    if technique in SELECTED:
        return "selected"
    if technique in SLOW:
        return "over 10 times slower"
    return "fast, least accurate" if technique in COMBINATIONS else ""
