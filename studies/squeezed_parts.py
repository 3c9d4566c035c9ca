"""What each part of EdgeSqueeze brings: outer momentum, kept share, bits, forecasts.

Rows have the fields of `studies.waiting`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import edgegossip as eg
from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.edge_gossip.state import BalancedState
from edgegossip.contract import Effect, Event, Predicted, Seconds
from edgegossip.recipes.environment_tasks import TaskName
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.push_sum_comparison import compressor
from edgegossip.recipes.systems import SYSTEMS, System
from edgegossip.runs.study import Study
from studies.contest import Attempt, StudySettings, contest_study
from studies.waiting import (
    NUM_SHORT_TRIALS,
    SHORT,
    WaitingContest,
    exhibits,
    speeds_that_change,
)

WHOLE = "edge-squeeze"
Change: TypeAlias = Callable[[EdgeGossip], EdgeGossip]


def _with(**others: Any) -> Change:  # noqa: ANN401 - arguments of a dataclass
    """A change of the exchange within."""

    def change(whole: EdgeGossip) -> EdgeGossip:
        assert isinstance(whole.inner, DoubleSqueeze)
        return replace(whole, inner=replace(whole.inner, **others))

    return change


@dataclass(frozen=True, kw_only=True)
class FixedShares(EdgeGossip):
    """Keep the first forecast, that of an idle machine, for the whole run.

    These are the shares of somebody who knows all speeds beforehand, and measures nothing.
    """

    def handle(self, state: BalancedState, event: Event, now: Seconds) -> list[Effect]:
        if isinstance(event, Predicted) and state.throughput:
            event = Predicted(state.throughput)
        return super().handle(state, event, now)


def _fixed(whole: EdgeGossip) -> EdgeGossip:
    settings = {field.name: getattr(whole, field.name) for field in fields(whole)}
    return FixedShares(**{**settings, "block_share": 1.0})


PARTS: Mapping[str, Change] = {
    WHOLE: lambda whole: whole,
    "no-momentum": _with(outer_momentum=0.0),
    "momentum-0.9": _with(outer_momentum=0.9),
    "kept-1-percent": _with(compressor=compressor(0.01, 4)),
    "all-kept": _with(compressor=compressor(1.0, 4)),
    "2-bits": _with(compressor=compressor(0.1, 2)),
    "32-bits": _with(compressor=compressor(0.1, 32)),
    "one-forecast": lambda whole: replace(whole, block_share=1.0),
    "fixed-shares": _fixed,
}
"""EdgeSqueeze with one part changed, by name of the run.

By default it has outer momentum 0.7, keeps a tenth of the entries in 4 bits, and follows speeds
that change within a pass.
"""


@dataclass(frozen=True, kw_only=True)
class PartsContest(WaitingContest):
    """EdgeSqueeze with one part changed at a time, each tuned, in one environment."""

    def system(self, run: str) -> System:
        return SYSTEMS[WHOLE]

    def comparison(self, data_dir: Path, attempt: Attempt) -> eg.Comparison:
        made = super().comparison(data_dir, attempt)
        whole = made.experiments[WHOLE]
        assert isinstance(whole.algorithm, EdgeGossip)
        changed = replace(
            whole, algorithm=PARTS[attempt.run](whole.algorithm), name=attempt.run
        )
        return replace(made, experiments={**made.experiments, attempt.run: changed})


def parts(
    settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4)),
    *,
    environments: tuple[str, ...] = ("halos", "one-slow"),
    task: TaskName = "mnist",
    num_trials: int = 8,
    target: float | None = None,
    drift: float = 1.0,
    loads: bool = False,
) -> Study:
    """EdgeSqueeze with one part changed at a time, each tuned: time, bytes, goodput.

    Each one tries equally many learning rates and local steps, as in `environments/waiting`.

    Data: MNIST. Duration: half a minute of one core for a result, half of that for a trial.

    Args:
        settings: Settings of the study.
        environments: Environments, such as halos one-slow.
        task: Task of all environments.
        num_trials: Trials of each run, at least 1.
        target: Target of the metric; by default the best value of the trials of the whole.
        drift: As in `environments/waiting`.
        loads: As in `environments/waiting`.

    Raises:
        ValueError: If a number is out of range.
    """
    moving = speeds_that_change(drift, loads=loads)
    if settings.short:
        environments, task, num_trials = ("one-slow",), "digits", NUM_SHORT_TRIALS
    contests = [
        PartsContest(
            problem=Problem(name=environment, dataset=task, model=eg.mlp),
            setting=task,
            task=task,
            names=tuple(PARTS),
            num_trials=num_trials,
            tuning_share=0.5,
            arguments={**(SHORT if settings.short else {}), **moving},
            seeds=settings.seeds,
        )
        for environment in environments
    ]
    return contest_study(
        "environments/parts",
        "What does each part of EdgeSqueeze bring?",
        settings,
        contests,
        partial(exhibits, target, WHOLE, lambda run: SYSTEMS[WHOLE]),
        printed=("EdgeSqueeze is ours, so no paper prints a figure for it.",),
        environments=environments,
        tasks=[task],
        num_trials=num_trials,
        target=target,
        **moving,
    )
