"""Figures 3 and 7 of the EdgeGossip paper: cost and quality of aggregation.

Fields of a row of figure 3:
    problem, ratio: Model and data; samples for each aggregated point. The row also has
        `num_samples` and the problem's settings.
    technique, seed: Combination of reduction and division, or a control.
    wall_reduction, wall_division, wall_means: Processor time of the three steps.
    num_points, num_steps: Points that the model learned from, and its steps.
    accuracy: Accuracy on the test split, at the end.

Fields of a row of figure 7:
    dataset, num_samples: Data set, and number of aggregated samples.
    technique, ratio, seed: Combination of reduction and division; samples for each point.
    wall_reduction, wall_division, wall_means: Processor time of the three steps.
    wall_generation: Sum of these three times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

import edgegossip as eg
from edgegossip.contract.protocol import Seconds, Steps, Train
from edgegossip.contract.randomness import generator
from edgegossip.data.dataset import ArraySplit
from edgegossip.recipes.problems import Problem
from edgegossip.runs.exhibits import Exhibits, Panel
from edgegossip.runs.process import one_intra_op_thread
from edgegossip.runs.scoreboard import grouped, middle
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.training.sampling.aggregation import COMBINATIONS, AggregatedData, Aggregator
from edgegossip.training.task import Workload
from studies.contest import StudySettings
from studies.exhibits import Line, figure_and_tables, panel, table
from studies.problems import (
    CIFAR10_ALEXNET_QUARTER,
    CIFAR10_LENET5,
    DIGITS_MLP,
    MNIST_LENET5,
)
from studies.training import RATIOS, SELECTED


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit PyTorch and BLAS to one thread, so that processor time equals duration."""
    with one_intra_op_thread(), threadpool_limits(1):
        yield


def processor_seconds(work: Callable[[], object], num_repeats: int = 3) -> Seconds:
    """Median processor time of `work` on one thread, after a warm-up."""
    with one_thread():
        work()
        measured = []
        for _ in range(num_repeats):
            start = time.process_time()
            work()
            measured.append(time.process_time() - start)
    return statistics.median(measured)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Processor seconds that the three steps of aggregation take."""

    reduction: Seconds
    division: Seconds
    means: Seconds

    @property
    def total(self) -> Seconds:
        """Processor seconds of the whole aggregation."""
        return self.reduction + self.division + self.means


def timed_fit(chosen: Aggregator, x: Tensor, y: Tensor) -> tuple[AggregatedData, StepTimes]:
    """Aggregate on one thread and measure each step; the remaining time counts as means."""
    reduction: Any = _Timed(chosen.reduction)
    division: Any = _Timed(chosen.division)
    timed = replace(chosen, reduction=reduction, division=division)
    with one_thread():
        chosen.fit(x[:200], y[:200])  # the first call is slower
        start = time.process_time()
        aggregated = timed.fit(x, y)
        total = time.process_time() - start
    rest = total - reduction.seconds - division.seconds
    return aggregated, StepTimes(
        reduction=reduction.seconds, division=division.seconds, means=rest
    )


def median_fit(chosen: Aggregator, x: Tensor, y: Tensor, num_repeats: int = 3) -> StepTimes:
    """The step times of the fit with the median total, out of `num_repeats` (odd) fits."""
    measured = [timed_fit(chosen, x, y)[1] for _ in range(num_repeats)]
    return sorted(measured, key=lambda times: times.total)[num_repeats // 2]


@dataclass
class _Timed:
    """A reduction or a division that measures its processor time."""

    inner: Any
    seconds: Seconds = field(default=0.0, init=False)

    def __call__(self, points: Tensor, num_subsets: int, seed: int) -> Tensor:
        start = time.process_time()
        found: Tensor = self.inner(points, num_subsets, seed)
        self.seconds += time.process_time() - start
        return found

    def num_flops(self, *sizes: Any) -> float:  # noqa: ANN401 - sizes of either
        flops: float = self.inner.num_flops(*sizes)
        return flops


STEPS = ("reduction", "division", "means")
CLOCK = "Processor time on one thread of this machine; the paper's machine is different."


def steps_panel(title: str, groups: Mapping[str, Iterable[Row]]) -> Panel:
    """Stack the times of the three steps, for each group of rows that differ only in seed."""
    series = {
        step: (groups, [middle(some, f"wall_{step}") for some in groups.values()])
        for step in STEPS
    }
    labels = {"y_label": "processor time", "y_unit": "seconds"}
    return panel(title, series, kind="stacked", **labels)


# Figure 3.


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

    def plain(self) -> dict[str, object]:
        """Everything that the rows depend on, as JSON values."""
        sizes = {"num_samples": self.num_samples, "num_steps": self.num_steps}
        return {**self.problem.plain(), "ratio": self.ratio, **sizes}


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
    """The combinations: time of each step, and accuracy learned from the points alone.

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
            "parts": [part.plain() for part in parts],
        },
        cells=tuple(cells),
        exhibit=_fig3_exhibits,
    )


def _combination(
    part: _FromPoints, settings: StudySettings, technique: str, seed: int, session: Session
) -> Row:
    """Train on aggregated points of some samples, or on the samples themselves."""
    problem, ratio = part.problem, part.ratio
    dataset = problem.load(settings.data_dir)
    order = torch.randperm(len(dataset.train), generator=generator(seed, "study"))
    x, y = dataset.train.batch(order[: part.num_samples])
    row = {**part.plain(), "technique": technique, "seed": seed}
    if technique == RANDOM:
        x, y = x[: round(part.num_samples / ratio)], y[: round(part.num_samples / ratio)]
    elif technique != ALL:
        aggregated, times = timed_fit(eg.aggregator(technique, ratio, seed), x, y)
        x, y = aggregated.x, aggregated.y
        row |= {f"wall_{step}": seconds for step, seconds in asdict(times).items()}
    accuracy = _learn(problem, settings, x, y, seed, part.num_steps)
    return row | {"num_points": len(x), "accuracy": accuracy}


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


def _fig3_exhibits(rows: Mapping[str, Row]) -> Exhibits:
    panels, lines = list[Panel](), list[Line]()
    for (problem, ratio), some in grouped(rows.values(), "problem", "ratio").items():
        groups = {technique: own for (technique,), own in grouped(some, "technique").items()}
        timed = {name: own for name, own in groups.items() if name in COMBINATIONS}
        part = f"{problem}, ratio {ratio:g}"
        if timed:
            panels.append(steps_panel(f"Time, {part}", timed))
        accuracies = groups, [middle(own, "accuracy") for own in groups.values()]
        labels = {"y_label": "accuracy", "y_unit": "percent"}
        panels.append(
            panel(f"Accuracy, {part}", {"accuracy": accuracies}, kind="bars", **labels)
        )
        lines += [_fig3_line(own) for own in groups.values()]
    return figure_and_tables(
        "fig3",
        "Eight combinations of reduction and division",
        "Left: time to aggregate. Right: accuracy learned from the points alone; higher is "
        "better. Medians over the seeds.",
        panels,
        table(
            "Our results and the paper's statements",
            lines,
            "Medians over the seeds. Random and all samples are controls, not in the paper.",
        ),
    )


def _fig3_line(some: Sequence[Row]) -> Line:
    return {
        "model": ("text", some[0]["problem"]),
        "ratio": ("number", some[0]["ratio"]),
        "technique": ("text", some[0]["technique"]),
        **{step: ("seconds", middle(some, f"wall_{step}")) for step in STEPS},
        "points": ("number", some[0]["num_points"]),
        "accuracy": ("percent", middle(some, "accuracy")),
        "paper": ("text", _verdict(some[0]["technique"])),
    }


def _verdict(technique: str) -> str:
    if technique in SELECTED:
        return "selected"
    if technique in SLOW:
        return "over 10 times slower"
    if technique == "isvd-lsh-printed":
        return "isvd-lsh as printed"
    return "fast, least accurate" if technique in COMBINATIONS else ""


# Figure 7.


def fig7(settings: StudySettings = StudySettings()) -> Study:
    """Time of each step in generating aggregated points, for ratios 5, 10 and 20.

    Data: MNIST and CIFAR-10. Duration: a minute on one core.

    Args:
        settings: Settings of the study.
    """
    problems = (DIGITS_MLP,) if settings.short else (MNIST_LENET5, CIFAR10_LENET5)
    cells = [
        Cell(
            name=f"{problem.dataset}/{technique}/ratio{ratio}/seed{seed}",
            group=problem.dataset,
            work=partial(_generation, problem, settings, technique, ratio, seed),
            scaled_down=problem.scaled_down,
        )
        for problem in problems
        for technique in SELECTED
        for ratio in RATIOS
        for seed in settings.seeds
    ]
    return Study(
        name="edgegossip/fig7",
        is_timed=True,
        title="How long does it take to generate aggregated points?",
        printed=(
            "Aggregation happens once, before training, for ratios 5, 10 and 20. Figure 7 "
            "shows the three steps as bars, without printed numbers.",
        ),
        scaled_down=(
            "One platform's share of the data: a quarter of the training samples.",
            CLOCK,
        ),
        settings={**settings.plain(), "datasets": [problem.dataset for problem in problems]},
        cells=tuple(cells),
        exhibit=_fig7_exhibits,
    )


def _generation(
    problem: Problem,
    settings: StudySettings,
    technique: str,
    ratio: float,
    seed: int,
    session: Session,
) -> Row:
    dataset = problem.load(settings.data_dir)
    order = torch.randperm(len(dataset.train), generator=generator(seed, "study"))
    x, y = dataset.train.batch(order[: len(order) // 4])
    times = median_fit(eg.aggregator(technique, ratio, seed), x, y)
    return {
        "dataset": problem.dataset,
        "technique": technique,
        "ratio": ratio,
        "seed": seed,
        "num_samples": len(x),
        **{f"wall_{step}": seconds for step, seconds in asdict(times).items()},
        "wall_generation": times.total,
    }


def _fig7_exhibits(rows: Mapping[str, Row]) -> Exhibits:
    panels = []
    for (dataset,), some in grouped(rows.values(), "dataset").items():
        by_ratio = grouped(some, "technique", "ratio")
        bars = {f"{technique} {ratio}": own for (technique, ratio), own in by_ratio.items()}
        panels.append(steps_panel(str(dataset), bars))
    kinds = grouped(rows.values(), "dataset", "technique", "ratio").values()
    return figure_and_tables(
        "fig7",
        "Time to generate aggregated points",
        "Technique and samples per aggregated point; medians over the seeds of the median of "
        "three measurements.",
        panels,
        table("Ours (the paper prints no numbers)", map(_fig7_line, kinds)),
    )


def _fig7_line(some: Sequence[Row]) -> Line:
    return {
        "data": ("text", some[0]["dataset"]),
        "samples": ("number", some[0]["num_samples"]),
        "technique": ("text", some[0]["technique"]),
        "ratio": ("number", some[0]["ratio"]),
        **{step: ("seconds", middle(some, f"wall_{step}")) for step in STEPS},
        "time": ("seconds", middle(some, "wall_generation")),
    }
