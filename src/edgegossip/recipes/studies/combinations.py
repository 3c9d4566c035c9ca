"""Figures 3 and 7 of the EdgeGossip paper: cost and quality of aggregation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgegossip.core.protocol import Steps, Train
from edgegossip.core.randomness import generator
from edgegossip.experiments.exhibits import Exhibits, Figure, Panel, Series, Table
from edgegossip.experiments.study import Cell, Row, Session, Study
from edgegossip.experiments.threads import one_intra_op_thread
from edgegossip.learning.dataset import ArraySplit
from edgegossip.learning.sampling.aggregation import COMBINATIONS, aggregator
from edgegossip.learning.task import Workload
from edgegossip.recipes.studies.problems import (
    CIFAR10_LENET5,
    DIGITS_MLP,
    MNIST_LENET5,
    Problem,
)
from edgegossip.recipes.studies.scoreboard import median
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.recipes.studies.timing import processor_seconds, timed_fit
from edgegossip.recipes.studies.training import RATIOS, SELECTED

SLOW = ("svd-gmm", "pca-kmeans", "pca-lsh", "full-svd-lsh")
"""Combinations that are over ten times slower than the selected ones, according to the
paper."""

RANDOM, ALL = "random samples", "all samples"
"""The controls of figure 3: as many samples as points, and all samples."""

STEPS = ("reduction", "division", "means")
CLOCK = "Processor time on one thread of this machine; the paper's machine is another."


# Figure 3.


def fig3(settings: StudySettings = StudySettings()) -> Study:
    """The eight combinations: time of each step, and accuracy learned from the points alone.

    LeNet-5 on CIFAR-10; 7 minutes on one core.

    Args:
        settings: Settings of the study.
    """
    problem = DIGITS_MLP if settings.short else CIFAR10_LENET5
    num_steps = 100 if settings.short else 2_000
    num_samples = 400 if settings.short else 12_500
    sizes = num_samples, num_steps
    cells = [
        Cell(
            name=f"{technique.replace(' ', '-')}/seed{seed}",
            group=technique.replace(" ", "-"),
            work=partial(_combination, problem, settings, technique, seed, *sizes),
            scaled_down=problem.scaled_down,
        )
        for technique in (*COMBINATIONS, RANDOM, ALL)
        for seed in settings.seeds
    ]
    return Study(
        name="edgegossip/fig3",
        is_timed=True,
        title="Which technique of aggregation is fast, and whose points can be learned from?",
        printed=(
            "Eight combinations of reduction and division are compared, and three selected: "
            "SVD of single points with k-means, incremental SVD with LSH, hash with k-means.",
            "SVD with a Gaussian mixture, PCA with either division and SVD of the whole data "
            "set are more than 10 times slower; histograms with k-means are fast but least "
            "accurate. No other numbers are printed.",
        ),
        scaled_down=(
            f"{num_samples:,} samples of {problem.dataset} are aggregated; the model learns "
            f"for {num_steps:,} steps of {problem.settings.batch_size} from the points alone. "
            "How long the paper's does is not said.",
            CLOCK,
        ),
        settings={
            **settings.plain(),
            "problem": problem.plain(),
            "num_samples": num_samples,
            "num_steps": num_steps,
        },
        cells=tuple(cells),
        exhibit=_fig3_exhibits,
    )


def _combination(
    problem: Problem,
    settings: StudySettings,
    technique: str,
    seed: int,
    num_samples: int,
    num_steps: int,
    session: Session,
) -> Row:
    """Train on aggregated points of some samples, or on the samples themselves."""
    dataset = problem.load(settings.data_dir)
    order = torch.randperm(len(dataset.train), generator=generator(seed, "study"))
    x, y = dataset.train.batch(order[:num_samples])
    row: dict[str, Any] = {"technique": technique, "seed": seed}
    ratio = 10.0
    if technique == RANDOM:
        x, y = x[: round(num_samples / ratio)], y[: round(num_samples / ratio)]
    elif technique != ALL:
        aggregated, times = timed_fit(aggregator(technique, ratio, seed), x, y)
        x, y = aggregated.x, aggregated.y
        row |= {f"wall_{step}": seconds for step, seconds in asdict(times).items()}
    accuracy = _learn(problem, settings, x, y, seed, num_steps)
    return row | {"num_points": len(x), "accuracy": accuracy}


def _learn(
    problem: Problem, settings: StudySettings, x: Tensor, y: Tensor, seed: int, num_steps: int
) -> float:
    """Accuracy of a model after some steps on pictures `x`, in 0 .. 255, and labels `y`."""
    task = problem.task(settings.data_dir)
    # Pictures that are no whole numbers are features, which data sets keep in [0, 1].
    points = ArraySplit(x.float() / 255, y)
    task = replace(task, dataset=replace(task.dataset, train=points))
    with one_intra_op_thread():
        workload = Workload(task, [0], seed)
        result = workload.make_trainer(0).train(
            Train(workload.initial_params(), Steps(num_steps))
        )
        return workload.evaluate(result.params)[1][task.metric.name]


def _fig3_exhibits(rows: Mapping[str, Row]) -> Exhibits:
    groups = _grouped(rows, "technique")
    if not groups:
        return Exhibits()
    timed = [name for name in groups if name in COMBINATIONS]
    accuracy = _fig3_accuracy(groups)
    figure = Figure(
        name="fig3",
        heading="Eight combinations of reduction and division",
        caption="Medians over the seeds; on the right, higher is better.",
        panels=(_fig3_time(groups, timed), accuracy) if timed else (accuracy,),
    )
    return Exhibits(figures=(figure,), tables=(_fig3_table(groups),))


def _fig3_time(groups: Mapping[str, list[Row]], timed: Sequence[str]) -> Panel:
    return Panel(
        title="Time to aggregate",
        kind="stacked",
        x_label="",
        y_label="processor time",
        y_unit="seconds",
        series=tuple(
            Series(
                name=step,
                x=tuple(timed),
                y=tuple(_middle(groups[name], f"wall_{step}") for name in timed),
            )
            for step in STEPS
        ),
    )


def _fig3_accuracy(groups: Mapping[str, list[Row]]) -> Panel:
    accuracy = tuple(_middle(some, "accuracy") for some in groups.values())
    return Panel(
        title="Accuracy learned from the points alone",
        kind="bars",
        x_label="",
        y_label="accuracy",
        y_unit="percent",
        series=(Series(name="accuracy", x=tuple(groups), y=accuracy),),
    )


def _fig3_table(groups: Mapping[str, list[Row]]) -> Table:
    return Table(
        heading="Ours, and what the paper says",
        columns=(
            ("technique", "text"),
            *((step, "seconds") for step in STEPS),
            ("points", "number"),
            ("accuracy", "percent"),
            ("paper", "text"),
        ),
        rows=tuple(
            (
                name,
                *(_middle(some, f"wall_{step}") for step in STEPS),
                some[0]["num_points"],
                _middle(some, "accuracy"),
                _verdict(name),
            )
            for name, some in groups.items()
        ),
        note="Medians over the seeds. Random and all samples are controls, not in the paper.",
    )


def _verdict(technique: str) -> str:
    if technique in SELECTED:
        return "selected"
    if technique in SLOW:
        return "over 10 times slower"
    return "fast, least accurate" if technique in COMBINATIONS else ""


# Figure 7.


def fig7(settings: StudySettings = StudySettings()) -> Study:
    """Time to generate aggregated points, for ratios 5, 10 and 20.

    MNIST and CIFAR-10; 2 minutes on one core.

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
            "shows bars without printed numbers.",
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
    chosen = aggregator(technique, ratio, seed)
    return {
        "dataset": problem.dataset,
        "technique": technique,
        "ratio": ratio,
        "seed": seed,
        "num_samples": len(x),
        "wall_generation": processor_seconds(lambda: chosen.fit(x, y)),
    }


def _fig7_exhibits(rows: Mapping[str, Row]) -> Exhibits:
    panels, lines = [], []
    for dataset, some in _grouped(rows, "dataset").items():
        series = []
        for technique, own in _grouped(dict(enumerate(some)), "technique").items():
            by_ratio = _grouped(dict(enumerate(own)), "ratio")
            seconds = [_middle(each, "wall_generation") for each in by_ratio.values()]
            x = tuple(f"ratio {ratio}" for ratio in by_ratio)
            series.append(Series(name=technique, x=x, y=tuple(seconds)))
            lines += [
                (dataset, own[0]["num_samples"], technique, float(ratio), value)
                for ratio, value in zip(by_ratio, seconds, strict=True)
            ]
        panels.append(
            Panel(
                title=dataset,
                kind="bars",
                x_label="",
                y_label="processor time",
                y_unit="seconds",
                series=tuple(series),
            )
        )
    if not panels:
        return Exhibits()
    figure = Figure(
        name="fig7",
        heading="Time to generate aggregated points",
        caption="Medians over the seeds of the median of three measurements.",
        panels=tuple(panels),
    )
    return Exhibits(figures=(figure,), tables=(_fig7_table(lines),))


def _fig7_table(lines: Sequence[tuple[Any, ...]]) -> Table:
    return Table(
        heading="Ours (the paper prints no numbers)",
        columns=(
            ("data", "text"),
            ("samples", "number"),
            ("technique", "text"),
            ("ratio", "number"),
            ("time", "seconds"),
        ),
        rows=tuple(lines),
    )


def _grouped(rows: Mapping[Any, Row], field: str) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows.values():
        groups.setdefault(row[field], []).append(row)
    return groups


def _middle(rows: list[Row], field: str) -> float | None:
    return median(row.get(field) for row in rows)
