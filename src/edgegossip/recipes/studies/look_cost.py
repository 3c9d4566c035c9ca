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

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.protocol import Train
from edgegossip.contract.topology import complete
from edgegossip.contract.trainer import TrainingResult
from edgegossip.recipes.baselines import HOME_LINK
from edgegossip.recipes.rehearsal import rehearse
from edgegossip.recipes.studies.epoch_parts import MEASURED_PARTS, measured_parts
from edgegossip.recipes.studies.events import TrainingEvents
from edgegossip.recipes.studies.problems import (
    CIFAR10_ALEXNET,
    DIGITS_MLP,
    MNIST_LENET5,
    Problem,
)
from edgegossip.recipes.studies.race import AS_PUBLISHED
from edgegossip.recipes.studies.study_settings import StudySettings
from edgegossip.runs.describe import describe
from edgegossip.runs.exhibits import Exhibits, Figure, Panel, Series, Table
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.scoreboard import grouped, median, middle
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.sim.link import Links
from edgegossip.sim.machines import FORECAST_SECONDS
from edgegossip.sim.platform import paper
from edgegossip.training.learner import Learner
from edgegossip.training.sampling.aggregation import Aggregator

RATIOS = (5, 10, 20)
DEFAULT_RATIO = 10
PRINTED = {"mnist-lenet5": 0.030, "cifar10-alexnet": 0.0878}
ACCOUNTED_PARTS = ("forecast", "look", "training", "exchange")
Cases: TypeAlias = Mapping[tuple[Any, ...], list[Row]]
"""Rows by problem and ratio."""
PARTS = tuple(dict.fromkeys((*MEASURED_PARTS, *ACCOUNTED_PARTS)))

assert AS_PUBLISHED.accuracy_aware is not None
LOOKING_AT_ALL = AS_PUBLISHED.accuracy_aware
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
            "ratios": RATIOS,  # older folders account otherwise, and cannot be resumed
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
        return rehearse(self.take(request), request)


def _accounted(
    problem: Problem, settings: StudySettings, ratio: float, seed: int, session: Session
) -> Row:
    """The simulator's charge over three epochs of EdgeGossip, and the last epoch's parts."""
    platforms = paper(problem.settings.throughput / 12)
    session.run(
        Experiment(
            task=replace(
                problem.task(settings.data_dir),
                accuracy_aware=replace(LOOKING_AT_ALL, aggregator=_aggregator(ratio)),
                trainer=_WithoutSteps,
            ),
            algorithm=EdgeGossip(
                inner=EpochGossip(topology=complete(4), num_rounds=3), **AS_PUBLISHED.balancing
            ),
            platforms=platforms,
            links=Links(default=HOME_LINK),
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
    with_ratio = ({"ratio": DEFAULT_RATIO, **row} for row in rows.values())
    cases = grouped(with_ratio, "problem", "ratio")
    if not cases:
        return Exhibits()
    figure = Figure(
        name="fig8",
        heading="Share of an epoch for looks at aggregated points",
        caption="Accounted: what the simulator charges, a third of a training sample for each "
        "point; over all workers (slow ones look at as many points but train less), and for "
        "the fastest, which trains on all of its data. Measured: on one thread of this "
        "machine. Shares are of looks plus training. Paper: its average over all cases. The "
        "parts are those of the fastest worker; measurements do not include exchanges.",
        panels=(
            _shares_panel(cases),
            _parts_panel(cases, "accounted", ACCOUNTED_PARTS),
            _parts_panel(cases, "measured", MEASURED_PARTS),
        ),
    )
    return Exhibits(figures=(figure,), tables=(_shares_table(cases), _parts_table(cases)))


def _of(rows: list[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _shares(cases: Cases) -> dict[str, tuple[float | None, ...]]:
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


def _names(cases: Cases) -> tuple[str, ...]:
    return tuple(f"{problem} {ratio}" for problem, ratio in cases)


def _shares_panel(cases: Cases) -> Panel:
    x = _names(cases)
    return Panel(
        title="Share of an epoch's time",
        kind="bars",
        x_label="samples per aggregated point",
        y_label="looking at aggregated points",
        y_unit="percent",
        series=tuple(
            Series(name=name, x=x, y=y, is_mark=name == "paper")
            for name, y in _shares(cases).items()
        ),
    )


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


def _parts_panel(cases: Cases, kind: str, parts: tuple[str, ...]) -> Panel:
    return Panel(
        title=f"Parts of an epoch, {kind}",
        kind="stacked",
        x_label="samples per aggregated point",
        y_label="share of an epoch's time",
        y_unit="percent",
        series=tuple(
            Series(
                name=part,
                x=_names(cases),
                y=tuple(_part(some, kind, part) for some in cases.values()),
            )
            for part in parts
        ),
    )


def _shares_table(cases: Cases) -> Table:
    shares = _shares(cases)
    return Table(
        heading="Ours and the paper's",
        columns=(
            ("model", "text"),
            ("ratio", "number"),
            *((name, "percent") for name in shares),
        ),
        rows=tuple(
            (*case, *(y[index] for y in shares.values())) for index, case in enumerate(cases)
        ),
        note="Medians over the seeds; the paper's are averages over all its cases.",
    )


def _parts_table(cases: Cases) -> Table:
    columns: tuple[tuple[str, Any], ...] = tuple((part, "percent") for part in PARTS)
    return Table(
        heading="Parts of an epoch",
        columns=(("model", "text"), ("ratio", "number"), ("kind", "text"), *columns),
        rows=tuple(
            (*case, kind, *(_part(some, kind, part) for part in PARTS))
            for case, some in cases.items()
            for kind in dict.fromkeys(row["kind"] for row in some)
        ),
        note="Shares of an epoch of the fastest worker, medians over the seeds; a dash: not "
        "accounted, or not measured.",
    )
