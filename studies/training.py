"""Figures 5, 6, 12 and 13 of the EdgeGossip paper: speed and accuracy of training.

`race` documents the fields of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import edgegossip as eg
from edgegossip.recipes.problems import Problem
from edgegossip.runs.exhibits import Exhibits, Panel
from edgegossip.runs.scoreboard import Score, bars, curves
from edgegossip.runs.study import Row, Study
from studies.contest import Contender, Contenders, StudySettings
from studies.exhibits import figure_and_tables
from studies.problems import (
    CIFAR10_ALEXNET_QUARTER,
    CIFAR10_MOBILENET_V2_QUARTER,
    CIFAR10_SQUEEZENET,
    DIGITS_MLP,
    MNIST_LENET5,
    with_epochs,
)
from studies.race import (
    CONTROLS,
    EDGE_GOSSIP,
    PUBLISHED,
    WITH_PAPER,
    Race,
    Setup,
    fast_and_slow,
    less_work,
    race_study,
    races_of,
)
from studies.race_scores import LOSS, PAPER_LOSS, on_each_setup, race_table, standings
from studies.speedup import LOADS, with_profiles

SELECTED = ("svd-kmeans", "isvd-lsh", "hash-kmeans")
"""The paper's three techniques of aggregation."""

RATIOS = (5, 10, 20)
"""The aggregation ratios that the paper compares."""

NAMES = (
    "epoch-gossip is what the paper calls GoSGD (a barrier after each epoch), gosgd the "
    "original asynchronous algorithm of that name, random EdgeGossip with random samples, and "
    "published-... the paper's whole system, in a reading of its Algorithm 2."
)


def fig5(settings: StudySettings = StudySettings(), *, loaded: bool = False) -> Study:
    """Accuracy over time: four models, three aggregations, and the controls.

    Models: LeNet-5, AlexNet, SqueezeNet and MobileNet-v2. Data: MNIST and CIFAR-10. On one
    core, `mnist-lenet5` takes about 13 minutes and each other part more than an hour; AlexNet
    and MobileNet-v2 have a quarter of their channels.

    Args:
        settings: Settings of the study.
        loaded: Whether other programs load the platforms, as in the paper.
    """
    problems = (
        with_epochs(MNIST_LENET5, 8),
        CIFAR10_ALEXNET_QUARTER,
        CIFAR10_SQUEEZENET,
        CIFAR10_MOBILENET_V2_QUARTER,
    )
    techniques = {name: _with_aggregator(name) for name in SELECTED}
    runs = _runs({**techniques, **CONTROLS, **PUBLISHED}, loaded)
    races = races_of(
        [DIGITS_MLP] if settings.short else problems,
        lambda problem: (_paper_machines(problem, runs),),
        settings,
        loaded=loaded,
    )
    return _study(
        "fig5",
        "How fast do four models learn, with three techniques of aggregation?",
        settings,
        races,
        partial(_fig5_exhibits, races, settings.seeds[0]),
        printed=(
            "Figure 5 shows curves only; no speed-up of a single model is printed.",
            "On average over all models, EdgeGossip takes 2.70 times less training time than "
            "GoSGD, at a loss of accuracy of 0.78 %. LeNet-5 gains less than the others.",
        ),
        difference="Two platforms are three times as fast as the other two. The paper prints "
        "no speeds.",
        loaded=loaded,
    )


def _fig5_exhibits(races: Sequence[Race], seed: int, rows: Mapping[str, Row]) -> Exhibits:
    groups = {row["group"] for row in rows.values()}
    panels = [
        curves(
            on_each_setup(rows.values()),
            (race.group, race.setups[0].name, seed),
            title=race.group,
            x_label="virtual time (s)",
        )
        for race in races
        if race.seed == seed and race.group in groups
    ]
    caption = f"Seed {seed}. {NAMES}"
    found = standings(rows.values(), PAPER_LOSS)
    return _figure_and_table("fig5", "Accuracy over time", caption, panels, found)


def fig6(settings: StudySettings = StudySettings(), *, loaded: bool = False) -> Study:
    """Time to target and loss of accuracy with 4, 8, 16 and 32 platforms.

    Data: MNIST. Duration: about 50 minutes on one core.

    Args:
        settings: Settings of the study.
        loaded: Whether other programs load the platforms, as in the paper.
    """
    problem = DIGITS_MLP if settings.short else with_epochs(MNIST_LENET5, 10)
    numbers = (4, 8) if settings.short else (4, 8, 16, 32)
    setups = [
        Setup(
            name=f"{number} platforms",
            platforms=eg.uneven(number, problem.settings.throughput),
            runs=_runs(WITH_PAPER, loaded),
        )
        for number in numbers
    ]
    races = [
        race
        for setup in setups
        for race in races_of([problem], partial(_only, setup), settings, loaded=loaded)
    ]
    return _study(
        "fig6",
        "Are the results similar with more platforms?",
        settings,
        races,
        _time_and_loss("fig6", "More platforms", "the same data, divided among more platforms"),
        printed=(
            "Figure 6 shows time and loss of accuracy on 4 to 32 platforms as bars, without "
            "printed numbers.",
        ),
        difference="LeNet-5 on MNIST only; platforms repeat the speeds 1 : 0.8 : 0.33 : 0.25.",
        loaded=loaded,
    )


def fig12(settings: StudySettings = StudySettings(), *, loaded: bool = False) -> Study:
    """Time to target and loss of accuracy with two of four platforms 3 or 5 times as fast.

    Data: MNIST. Duration: about 16 minutes on one core of a busy machine.

    Args:
        settings: Settings of the study.
        loaded: Whether other programs load the platforms, as in the paper.
    """
    problem = DIGITS_MLP if settings.short else with_epochs(MNIST_LENET5, 10)
    setups = tuple(
        Setup(
            name=f"{factor} times",
            platforms=fast_and_slow(factor, problem.settings.throughput),
            runs=_runs(WITH_PAPER, loaded),
        )
        for factor in (3, 5)
    )
    return _study(
        "fig12",
        "Are the results similar if platforms are more uneven?",
        settings,
        races_of([problem], lambda _: setups, settings, loaded=loaded),
        _time_and_loss(
            "fig12",
            "More uneven platforms",
            "speed of the fast platforms relative to the slow ones",
        ),
        printed=(
            "With fast platforms 3 and 5 times as fast as the slow ones, GoSGD becomes slower "
            "and EdgeGossip's time hardly changes; its loss of accuracy is slightly larger. No "
            "numbers are printed.",
        ),
        difference="LeNet-5 on MNIST only; the fast platforms keep their speed, the slow ones "
        "get slower.",
        loaded=loaded,
    )


def fig13(settings: StudySettings = StudySettings()) -> Study:
    """Time to target and loss of accuracy with aggregation ratios 5, 10 and 20.

    Data: MNIST. Duration: about 36 minutes on one core of a busy machine.

    Args:
        settings: Settings of the study.
    """
    problem = DIGITS_MLP if settings.short else with_epochs(MNIST_LENET5, 10)
    names = SELECTED[:1] if settings.short else SELECTED
    runs = {f"{name} {r}": _with_aggregator(name, r) for r in RATIOS for name in names}
    published = {
        f"{name} {ratio}": _with_aggregator(SELECTED[-1], ratio, contender)
        for ratio in RATIOS
        for name, contender in PUBLISHED.items()
    }
    setups = (_paper_machines(problem, {**runs, **CONTROLS, **published}),)
    return _study(
        "fig13",
        "How many samples may an aggregated point represent?",
        settings,
        races_of([problem], lambda _: setups, settings),
        _time_and_loss("fig13", "Aggregation ratios", ""),
        printed=(
            "The paper compares aggregation ratios 5, 10 (its default) and 20; at 20, "
            "aggregated points take less than 3 % of an epoch's time.",
        ),
        difference="LeNet-5 on MNIST only; two platforms are three times as fast as the other "
        "two.",
    )


def _with_aggregator(
    name: str, ratio: float = 10, contender: Contender = EDGE_GOSSIP
) -> Contender:
    assert contender.accuracy_aware is not None
    aware = replace(contender.accuracy_aware, aggregator=eg.aggregator(name, ratio))
    return replace(contender, accuracy_aware=aware)


def _runs(runs: Contenders, loaded: bool) -> Contenders:
    return with_profiles(runs) if loaded else runs


def _only(setup: Setup, problem: Problem) -> tuple[Setup, ...]:
    return (setup,)


def _paper_machines(problem: Problem, runs: Contenders) -> Setup:
    # `paper` takes the samples per second of one executor of a slow platform.
    return Setup(
        name="two fast, two slow",
        platforms=eg.paper(problem.settings.throughput / 12),
        runs=runs,
    )


def _figure_and_table(
    name: str, heading: str, caption: str, panels: Sequence[Panel], found: Sequence[Score]
) -> Exhibits:
    table = race_table(found, "Ours", PAPER_LOSS, dash="never")
    return figure_and_tables(name, heading, caption, panels if found else (), table)


def _study(
    name: str,
    title: str,
    settings: StudySettings,
    races: Sequence[Race],
    exhibit: Callable[[Mapping[str, Row]], Exhibits],
    *,
    printed: tuple[str, ...],
    difference: str,
    **loaded: bool,
) -> Study:
    loads = LOADS if loaded.get("loaded") else ()
    scaled_down = loads if settings.short else (difference, *loads, *less_work())
    return race_study(
        name,
        title,
        settings,
        races,
        exhibit,
        printed=printed,
        scaled_down=scaled_down,
        **loaded,
    )


def _time_and_loss(
    name: str, heading: str, x_label: str
) -> Callable[[Mapping[str, Row]], Exhibits]:
    """Return a function that draws bars of the time to target and of the loss of accuracy."""

    def exhibit(rows: Mapping[str, Row]) -> Exhibits:
        found = standings(rows.values(), PAPER_LOSS)
        panels = [
            bars(found, measure, y_label=y_label, x_label=x_label)
            for measure, y_label in (
                ("time to target", "virtual time"),
                (LOSS, "EpochGossip's best less the run's"),
            )
        ]
        caption = (
            "Medians over the seeds; thin lines: their range; no bar: the target was never "
            f"reached. {NAMES}"
        )
        return _figure_and_table(name, heading, caption, panels, found)

    return exhibit
