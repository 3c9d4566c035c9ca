"""Figure 8 of the EdgeGossip paper: the cost of looks at aggregated points, and of an epoch.

Fields of a row:
    problem, ratio, seed: Model and data; samples for each aggregated point.
    kind: `"accounted"` by the simulator in virtual time, or `"measured"` on this machine.
    share, fastest_share: Looks' share of the cost of training, over all workers and for the
        fastest one.
    forecast_seconds, look_seconds, training_seconds, exchange_seconds: Parts of the fastest
        worker's last epoch. The exchange includes waiting for other workers, and sending models
        and forecasts.
    num_points, num_samples: Aggregated points and samples of one of four workers.
    wall_forecast, wall_balancing, wall_look, wall_choice, wall_training, wall_averaging: Parts
        of this worker's epoch: its forecast, all workers' shares, losses of the points, order
        of the samples, training on all samples, and the mean of four models.
    wall_share: Look / (look + training).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

import edgegossip as eg
from edgegossip.algorithms.wrappers.edge_gossip.balancer import Balancer
from edgegossip.contract.protocol import Epochs, Seconds, Train
from edgegossip.contract.trainer import TrainingResult
from edgegossip.recipes.baselines import HOME_LINK
from edgegossip.recipes.epoch_times import only_taken
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.published import BALANCING, published_samples
from edgegossip.runs.describe import describe
from edgegossip.runs.exhibits import Exhibits, Panel, Table
from edgegossip.runs.scoreboard import grouped, median, middle
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.sim.machines import FORECAST_SECONDS
from edgegossip.training.learner import Learner
from edgegossip.training.sampling.accuracy_aware import PointLosses
from edgegossip.training.sampling.aggregation import Aggregator
from edgegossip.training.sampling.selection import Selection
from edgegossip.training.task import Workload
from studies.aggregation import processor_seconds
from studies.contest import StudySettings
from studies.exhibits import Line, figure_and_tables, panel, table
from studies.problems import CIFAR10_ALEXNET, DIGITS_MLP, MNIST_LENET5
from studies.race import TrainingEvents

NUM_WORKERS = 4
MEASURED_PARTS = ("forecast", "balancing", "look", "choice", "training", "averaging")
_MANY = 100
"""Repetitions of work that takes less than a millisecond."""


def measured_parts(
    task: eg.Task, aggregator: Aggregator, selection: Selection, seed: int
) -> tuple[dict[str, int], dict[str, Seconds]]:
    """Measure an epoch in which one of four workers looks at all points and keeps all samples.

    Args:
        task: Data and model.
        aggregator: Makes the aggregated points.
        selection: Orders the samples.
        seed: Seeds the shards and the training.

    Returns:
        `num_points` and `num_samples`, and the processor time of each of `MEASURED_PARTS`.
    """
    workload = Workload(task, range(NUM_WORKERS), seed)
    learner = workload.make_trainer(0)
    assert isinstance(learner, Learner)
    shard, params = workload.shards[0], workload.initial_params()
    aggregated = aggregator.fit(*task.dataset.train.batch(shard))
    look = PointLosses(
        task.dataset.training,
        aggregated.x,
        aggregated.y,
        loss=task.loss,
        torch_device=torch.device("cpu"),
    )
    points = torch.arange(len(aggregated.y))
    sampler = eg.AccuracyAwareSampler(
        aggregated, batch_size=task.batch_size, selection=selection, key=seed
    )
    sampler.set_losses(look(learner.model.module, points))
    gossip = eg.EpochGossip(topology=eg.complete(NUM_WORKERS), num_rounds=1)
    others = {rank: {"params": params} for rank in range(1, NUM_WORKERS)}
    state = gossip.init(0, params)
    parts = {
        "forecast": processor_seconds(_forecasts()) / _MANY,
        "balancing": processor_seconds(_shares) / _MANY,
        "look": processor_seconds(lambda: look(learner.model.module, points)),
        "choice": processor_seconds(lambda: sampler.begin_epoch(len(shard))),
        "averaging": processor_seconds(lambda: gossip.mix(state, others)),
        "training": processor_seconds(
            lambda: learner.train(Train(params, Epochs())), num_repeats=1
        ),
    }
    return {"num_points": len(points), "num_samples": len(shard)}, parts


def _forecasts() -> Callable[[], None]:
    """Return a function that forecasts many times, each time under a new load."""
    predictor = eg.PerformancePredictor().fit(eg.profile(eg.Platform(throughput=1.0)))
    random = np.random.default_rng(0)

    def forecast() -> None:
        for present, usual in random.random((_MANY, 2)):
            predictor.forecast([eg.Contention(cores=present)], [eg.Contention(cores=usual)])

    return forecast


def _shares() -> None:
    """Compute all workers' shares many times."""
    for _ in range(_MANY):
        Balancer().balance([3.0, 3.0, 1.0, 1.0], [100.0] * NUM_WORKERS)


RATIOS = (5, 10, 20)
DEFAULT_RATIO = 10
PRINTED = {"mnist-lenet5": 0.030, "cifar10-alexnet": 0.0878}
ACCOUNTED_PARTS = ("forecast", "look", "training", "exchange")
Cases: TypeAlias = Mapping[tuple[Any, ...], list[Row]]
"""Rows by problem and ratio."""
PARTS = tuple(dict.fromkeys((*MEASURED_PARTS, *ACCOUNTED_PARTS)))

LOOKING_AT_ALL = published_samples("literal")
"""A selection with a full look before each epoch, as in the paper."""


def fig8(settings: StudySettings = StudySettings()) -> Study:
    """Looks at aggregated points: their share of an epoch, for ratios 5, 10 and 20.

    The shares are the simulator's and measured ones, with all parts of an epoch. Data: MNIST
    and CIFAR-10. Duration: 5 minutes on one core.

    Args:
        settings: Settings of the study.
    """
    problems = (DIGITS_MLP,) if settings.short else (MNIST_LENET5, CIFAR10_ALEXNET)
    works = {"accounted": _accounted, "measured": _measured}
    cells = [
        Cell(
            name=f"{problem.name}/{_folder(ratio)}seed{seed}/{kind}",
            group=problem.name,
            work=partial(work, problem, settings, ratio, seed),
            scaled_down=problem.scaled_down,
        )
        for problem in problems
        for ratio in RATIOS
        for seed in settings.seeds
        for kind, work in works.items()
    ]
    return Study(
        name="edgegossip/fig8",
        is_timed=True,
        title="What share of an epoch does looking at aggregated points take?",
        printed=(
            "On average over all cases, 3.0 % of an epoch's time with LeNet-5 and 8.78 % with "
            "AlexNet; less than 3 % at ratio 20.",
        ),
        scaled_down=(
            "Three epochs on two fast and two slow platforms are accounted for, without "
            "training; processor time on one thread of this machine is measured, a whole epoch "
            "of one of four workers.",
            "Models are exchanged over 100 Mbit/s; the paper prints no bandwidth.",
        ),
        settings={
            **settings.plain(),
            "problems": [problem.plain() for problem in problems],
            "accuracy_aware": describe(LOOKING_AT_ALL),
            "ratios": RATIOS,
        },
        cells=tuple(cells),
        exhibit=_exhibit,
    )


def _folder(ratio: float) -> str:
    return "" if ratio == DEFAULT_RATIO else f"ratio{ratio}/"


def _aggregator(ratio: float) -> Aggregator:
    return replace(LOOKING_AT_ALL.aggregator, ratio=float(ratio))


class _WithoutSteps(Learner):
    """Looks at points and chooses samples like a learner, but does not train."""

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        self.model.load(request.params)
        return only_taken(self.take(request), request)


def _accounted(
    problem: Problem, settings: StudySettings, ratio: float, seed: int, session: Session
) -> Row:
    """The simulator's charge over three epochs of EdgeGossip, and the last epoch's parts."""
    platforms = eg.paper(problem.settings.throughput / 12)
    session.run(
        eg.Experiment(
            task=replace(
                problem.task(settings.data_dir),
                accuracy_aware=replace(LOOKING_AT_ALL, aggregator=_aggregator(ratio)),
                trainer=_WithoutSteps,
            ),
            algorithm=eg.EdgeGossip(
                inner=eg.EpochGossip(topology=eg.complete(4), num_rounds=3),
                **BALANCING,
            ),
            platforms=platforms,
            links=eg.Links(default=HOME_LINK),
            seed=seed,
            evaluation_interval=1e9,  # never: nothing is learned
        )
    )
    events = TrainingEvents(session.folder / "events.jsonl")
    # While the first round is exchanged, other workers may still aggregate.
    epoch = events.round_work(rank=0, round_=2)
    throughput = platforms[0].total_throughput
    forecast = epoch.num_blocks * FORECAST_SECONDS
    return {
        "problem": problem.name,
        "ratio": ratio,
        "seed": seed,
        "kind": "accounted",
        "share": events.look_share(),
        "fastest_share": events.look_share(rank=0),
        "forecast_seconds": forecast,
        "look_seconds": (epoch.cost - epoch.num_samples) / throughput,
        "training_seconds": epoch.num_samples / throughput,
        "exchange_seconds": epoch.seconds - epoch.cost / throughput - forecast,
    }


def _measured(
    problem: Problem, settings: StudySettings, ratio: float, seed: int, session: Session
) -> Row:
    """The parts of an epoch of one of four workers on this machine."""
    task = problem.task(settings.data_dir)
    sizes, parts = measured_parts(task, _aggregator(ratio), LOOKING_AT_ALL.selection, seed)
    return {
        "problem": problem.name,
        "ratio": ratio,
        "seed": seed,
        "kind": "measured",
        **sizes,
        **{f"wall_{part}": seconds for part, seconds in parts.items()},
        "wall_share": parts["look"] / (parts["look"] + parts["training"]),
    }


# Exhibits.


def _exhibit(rows: Mapping[str, Row]) -> Exhibits:
    cases = grouped(rows.values(), "problem", "ratio")
    return figure_and_tables(
        "fig8",
        "Share of an epoch for looks at aggregated points",
        "Accounted: what the simulator charges, a third of a training sample for each point; "
        "over all workers (slow ones look at as many points but train less), and for the "
        "fastest, which trains on all of its data. Measured: on one thread of this machine. "
        "Shares are of looks plus training. Paper: its average over all cases. The parts are "
        "those of the fastest worker; measurements do not include exchanges.",
        _panels(cases) if cases else (),
        *_tables(cases),
    )


def _panels(cases: Cases) -> Iterator[Panel]:
    names = [f"{problem} {ratio}" for problem, ratio in cases]
    labels = {"x_label": "samples per aggregated point", "y_unit": "percent"}
    yield panel(
        "Share of an epoch's time",
        {name: (names, y) for name, y in _share_curves(cases).items()},
        mark="paper",
        kind="bars",
        y_label="looking at aggregated points",
        **labels,
    )
    for kind, parts in (("accounted", ACCOUNTED_PARTS), ("measured", MEASURED_PARTS)):
        yield panel(
            f"Parts of an epoch, {kind}",
            {
                part: (names, [_part(some, kind, part) for some in cases.values()])
                for part in parts
            },
            kind="stacked",
            y_label="share of an epoch's time",
            **labels,
        )


def _tables(cases: Cases) -> tuple[Table, Table]:
    models: dict[tuple[Any, ...], Line] = {
        case: {"model": ("text", case[0]), "ratio": ("number", case[1])} for case in cases
    }
    shares = _share_curves(cases)
    ours = (
        {**model, **{name: ("percent", y[index]) for name, y in shares.items()}}
        for index, model in enumerate(models.values())
    )
    parts = (
        {
            **models[case],
            "kind": ("text", kind),
            **{part: ("percent", _part(some, kind, part)) for part in PARTS},
        }
        for case, some in cases.items()
        for kind in dict.fromkeys(row["kind"] for row in some)
    )
    return (
        table(
            "Ours and the paper's",
            ours,
            "Medians over the seeds; the paper's are averages over all its cases.",
        ),
        table(
            "Parts of an epoch",
            parts,
            "Shares of an epoch of the fastest worker, medians over the seeds; a dash: not "
            "accounted, or not measured.",
        ),
    )


def _of(rows: list[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _share_curves(cases: Cases) -> dict[str, tuple[float | None, ...]]:
    kinds = {
        "accounted, all": ("accounted", "share"),
        "accounted, fastest": ("accounted", "fastest_share"),
        "measured": ("measured", "wall_share"),
    }
    printed = {"paper": tuple(PRINTED.get(problem) for problem, _ in cases)}
    return printed | {
        name: tuple(middle(_of(some, kind), field) for some in cases.values())
        for name, (kind, field) in kinds.items()
    }


def _part(rows: list[Row], kind: str, part: str) -> float | None:
    """A part's share of an epoch: the median over the seeds, for rows of `kind`."""
    if kind == "accounted":
        fields = {each: f"{each}_seconds" for each in ACCOUNTED_PARTS}
    else:
        fields = {each: f"wall_{each}" for each in MEASURED_PARTS}
    if part not in fields:
        return None
    shares = [
        row[fields[part]] / sum(row[field] for field in fields.values())
        for row in _of(rows, kind)
        if all(field in row for field in fields.values())
    ]
    return median(shares) if shares else None
