"""Figure 7 of the EdgeGossip paper: time to generate aggregated points, by step.

Fields of a row:
    dataset, num_samples: Data set, and number of aggregated samples.
    technique, ratio, seed: Combination of reduction and division; samples for each point.
    wall_reduction, wall_division, wall_means: Processor time of the three steps.
    wall_generation: Sum of these three times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

import torch

from edgegossip.contract.randomness import generator
from edgegossip.recipes.studies.aggregation_steps import (
    CLOCK,
    STEPS,
    steps_panel,
)
from edgegossip.recipes.studies.problems import (
    CIFAR10_LENET5,
    DIGITS_MLP,
    MNIST_LENET5,
    Problem,
)
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.recipes.studies.timing import median_fit
from edgegossip.recipes.studies.training import RATIOS, SELECTED
from edgegossip.runs.exhibits import Exhibits, Figure, Table
from edgegossip.runs.scoreboard import grouped, middle
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.training.sampling.aggregation import aggregator


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
    times = median_fit(aggregator(technique, ratio, seed), x, y)
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
    if not panels:
        return Exhibits()
    figure = Figure(
        name="fig7",
        heading="Time to generate aggregated points",
        caption="Technique and samples per aggregated point; medians over the seeds of the "
        "median of three measurements.",
        panels=tuple(panels),
    )
    return Exhibits(figures=(figure,), tables=(_fig7_table(rows),))


def _fig7_table(rows: Mapping[str, Row]) -> Table:
    return Table(
        heading="Ours (the paper prints no numbers)",
        columns=(
            ("data", "text"),
            ("samples", "number"),
            ("technique", "text"),
            ("ratio", "number"),
            *((step, "seconds") for step in STEPS),
            ("time", "seconds"),
        ),
        rows=tuple(
            (
                *(some[0][field] for field in ("dataset", "num_samples", "technique", "ratio")),
                *(middle(some, f"wall_{step}") for step in (*STEPS, "generation")),
            )
            for some in grouped(rows.values(), "dataset", "technique", "ratio").values()
        ),
    )
