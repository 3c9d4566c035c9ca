"""Figure 8 of the EdgeGossip paper: the cost of looks at aggregated points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from edgegossip.algorithms.edge_gossip.wrapper import EdgeGossip
from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.core.protocol import Epochs, Train
from edgegossip.core.topology import complete
from edgegossip.experiments.describe import describe
from edgegossip.experiments.exhibits import Exhibits, Figure, Panel, Series, Table
from edgegossip.experiments.experiment import Experiment
from edgegossip.experiments.study import Cell, Row, Session, Study
from edgegossip.learning.learner import Learner
from edgegossip.learning.sampling.accuracy_aware import AggregatedLosses
from edgegossip.learning.sampling.selection import Ranked
from edgegossip.learning.task import Workload
from edgegossip.recipes.recipe_settings import ACCURACY_AWARE
from edgegossip.recipes.studies.events import TrainingEvents
from edgegossip.recipes.studies.problems import (
    CIFAR10_ALEXNET,
    DIGITS_MLP,
    MNIST_LENET5,
    Problem,
)
from edgegossip.recipes.studies.scoreboard import median
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.recipes.studies.timing import processor_seconds
from edgegossip.sim.platform import paper

PRINTED = {"mnist-lenet5": 0.030, "cifar10-alexnet": 0.0878}
LOOKING_AT_ALL = replace(ACCURACY_AWARE, selection=Ranked(), look_share=None)
"""A selection with a full look before each epoch, as in the paper."""


def fig8(settings: StudySettings = StudySettings()) -> Study:
    """The share of an epoch that looks at aggregated points take: accounted and measured.

    MNIST and CIFAR-10; 7 minutes on a busy machine.

    Args:
        settings: Settings of the study.
    """
    problems = (DIGITS_MLP,) if settings.short else (MNIST_LENET5, CIFAR10_ALEXNET)
    works = {"accounted": _accounted, "measured": _measured}
    cells = [
        Cell(
            name=f"{problem.name}/seed{seed}/{kind}",
            group=problem.name,
            work=partial(work, problem, settings, seed),
            scaled_down=problem.scaled_down,
        )
        for problem in problems
        for seed in settings.seeds
        for kind, work in works.items()
    ]
    return Study(
        name="edgegossip/fig8",
        is_timed=True,
        title="What share of an epoch does looking at aggregated points take?",
        printed=("3.0 % of an epoch's time with LeNet-5, 8.78 % with AlexNet, at ratio 10.",),
        scaled_down=(
            "Two epochs on two fast and two slow platforms are accounted for; processor time "
            "on one thread of this machine is measured, a whole epoch of one of four workers.",
        ),
        settings={
            **settings.plain(),
            "problems": [problem.plain() for problem in problems],
            "accuracy_aware": describe(LOOKING_AT_ALL),
        },
        cells=tuple(cells),
        exhibit=_exhibit,
    )


def _accounted(problem: Problem, settings: StudySettings, seed: int, session: Session) -> Row:
    """The simulator's charge: (cost - samples) / cost over two epochs of EdgeGossip."""
    session.run(
        Experiment(
            task=replace(problem.task(settings.data_dir), accuracy_aware=LOOKING_AT_ALL),
            algorithm=EdgeGossip(inner=EpochGossip(topology=complete(4), num_rounds=2)),
            platforms=paper(problem.settings.throughput / 12),
            seed=seed,
        )
    )
    events = TrainingEvents(session.folder / "events.jsonl")
    return {
        "problem": problem.name,
        "seed": seed,
        "kind": "accounted",
        "share": events.look_share(),
        "fastest_share": events.look_share(rank=0),
    }


def _measured(problem: Problem, settings: StudySettings, seed: int, session: Session) -> Row:
    """Times of a forward pass over the points and of training on all samples."""
    task = problem.task(settings.data_dir)
    workload = Workload(task, range(4), seed)
    learner = workload.make_trainer(0)
    assert isinstance(learner, Learner)
    shard = workload.shards[0]
    aggregated = LOOKING_AT_ALL.aggregator.fit(*task.dataset.train.batch(shard))
    look = AggregatedLosses(
        lambda: learner.model.module,
        task.loss,
        task.dataset.training,
        aggregated,
        torch.device("cpu"),
    )
    points = torch.arange(len(aggregated.y))
    look_seconds = processor_seconds(lambda: look(points))
    train_seconds = processor_seconds(
        lambda: learner.train(Train(workload.initial_params(), Epochs())), num_repeats=1
    )
    return {
        "problem": problem.name,
        "seed": seed,
        "kind": "measured",
        "num_points": len(points),
        "num_samples": len(shard),
        "wall_look": look_seconds,
        "wall_training": train_seconds,
        "wall_share": look_seconds / (look_seconds + train_seconds),
    }


def _exhibit(rows: Mapping[str, Row]) -> Exhibits:
    problems = tuple(dict.fromkeys(row["problem"] for row in rows.values()))
    if not problems:
        return Exhibits()

    def middle(problem: str, kind: str, field: str) -> float | None:
        some = [r for r in rows.values() if (r["problem"], r["kind"]) == (problem, kind)]
        return median(row.get(field) for row in some) if some else None

    kinds = {
        "paper": [PRINTED.get(problem) for problem in problems],
        "accounted, all": [middle(p, "accounted", "share") for p in problems],
        "accounted, fastest": [middle(p, "accounted", "fastest_share") for p in problems],
        "measured": [middle(p, "measured", "wall_share") for p in problems],
    }
    panel = Panel(
        title="Share of an epoch's time",
        kind="bars",
        x_label="",
        y_label="looking at aggregated points",
        y_unit="percent",
        series=tuple(Series(name=name, x=problems, y=tuple(y)) for name, y in kinds.items()),
    )
    figure = Figure(
        name="fig8",
        heading="What looking at aggregated points takes of an epoch",
        caption="Accounted: what the simulator charges, a third of a training sample for each "
        "point; over all workers, of whom slow ones look as long but train less, and for the "
        "fastest, who trains on all of its data. Measured: on one thread of this machine.",
        panels=(panel,),
    )
    table = Table(
        heading="Ours and the paper's",
        columns=(("model", "text"), *((name, "percent") for name in kinds)),
        rows=tuple((p, *(y[i] for y in kinds.values())) for i, p in enumerate(problems)),
        note="Medians over the seeds.",
    )
    return Exhibits(figures=(figure,), tables=(table,))
