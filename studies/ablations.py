"""What each part of EdgeGossip brings: balancing, the choice of samples, and its gauge.

`Focused` decides by the losses of aggregated points how much of an epoch goes to high losses.
Two controls replace this gauge: by samples that no worker trains on, and by the losses of the
training samples themselves, which are free. A third control gives each platform shards that fit
its speed, so that EpochGossip never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from edgegossip.recipes.problems import Problem
from edgegossip.recipes.tasks import ACCURACY_AWARE
from edgegossip.runs.study import Study
from edgegossip.training.sampling.aggregation import AggregatedData, Aggregator
from edgegossip.training.sampling.division import KMeans
from edgegossip.training.sampling.reduction import Fingerprint
from edgegossip.training.sampling.selection import Candidates, Choice, Focused
from studies.contest import Contenders, StudySettings
from studies.problems import CIFAR10_LENET5, DIGITS_MLP, HAR_CNN, MNIST_LENET5
from studies.race import (
    CONTROLS,
    EDGE_GOSSIP,
    SELECTED,
    less_work,
    race_study,
    races_of,
    work_limit,
)
from studies.speedup import CONTROLLED, TARGET_GAP, speedup_exhibits, uneven_setup

HELD_OUT = 0.05


def held_out(labels: Tensor) -> Tensor:
    """Mark the last samples of each class, at least one, as held out: bool [num_samples].

    >>> held_out(torch.tensor([0, 1, 0, 0])).tolist()
    [False, True, False, True]
    """
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():  # type: ignore[no-untyped-call]
        members = (labels == label).nonzero()[:, 0]
        mask[members[-max(1, round(HELD_OUT * len(members))) :]] = True
    return mask


@dataclass(frozen=True)
class HeldOutSamples(Aggregator):
    """Held-out samples in place of aggregated points; they stand for nobody."""

    def fit(self, x: Tensor, y: Tensor) -> AggregatedData:
        points = held_out(y).nonzero()[:, 0]
        points = points[y[points].argsort(stable=True)]
        labels = y[points]
        # Each sample needs some point, for its class.
        return AggregatedData(x[points].float(), labels, torch.searchsorted(labels, y))

    def num_subsets(self, labels: Tensor) -> int:
        return int(held_out(labels).sum())


@dataclass(frozen=True)
class HeldOutGauge(Focused):
    """`Focused` with held-out samples as its gauge, which it never chooses for training."""

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        known = (~held_out(candidates.labels[candidates.subset_of])).nonzero()[:, 0]
        rest = replace(
            candidates,
            subset_of=candidates.subset_of[known],
            num_visits=candidates.num_visits[known],
            sample_losses=candidates.sample_losses[known],
        )
        chosen = super().choose(rest, num_samples, random)
        order = known[chosen.order]
        # If all of a worker's samples are due, the first ones stand in for those held out.
        order = torch.cat([order, order[: num_samples - len(order)]])
        return Choice(order, focus=chosen.focus)


@dataclass(frozen=True)
class OwnGauge(Focused):
    """`Focused` without aggregated points: the last losses of the samples are its gauge.

    Without points, there are no classes, among which visits could be divided.
    """

    needs_losses: ClassVar[bool] = False

    def focus(self, candidates: Candidates) -> float:
        losses = candidates.sample_losses[candidates.sample_losses.isfinite()]
        return super().focus(
            replace(candidates, losses=losses, is_newest=torch.ones_like(losses).bool())
        )


RUNS: Contenders = {
    "edge-gossip": EDGE_GOSSIP,
    "epoch-gossip-focused": SELECTED,
    "proportional": replace(CONTROLS["random"], is_balanced=False, is_proportional=True),
    "held-out-gauge": replace(
        EDGE_GOSSIP,
        accuracy_aware=replace(
            ACCURACY_AWARE,
            selection=HeldOutGauge(),
            aggregator=HeldOutSamples(reduction=Fingerprint(), division=KMeans()),
        ),
    ),
    "own-gauge": replace(
        EDGE_GOSSIP, accuracy_aware=replace(ACCURACY_AWARE, selection=OwnGauge())
    ),
    "random": CONTROLS["random"],
}


def ablations(settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4))) -> Study:
    """Time to EpochGossip's best accuracy minus 0.3 points, with parts replaced.

    Data: MNIST, HAR and CIFAR-10, at imbalance 4. On one core, a run takes one to six minutes.

    Args:
        settings: Settings of the study.
    """
    problems: Sequence[Problem] = (MNIST_LENET5, HAR_CNN, CIFAR10_LENET5)
    if settings.short:
        problems = (DIGITS_MLP,)
    limit = work_limit(settings)
    return race_study(
        "ablations",
        "What does each part of EdgeGossip bring?",
        settings,
        races_of(
            problems, lambda problem: (uneven_setup(problem, CONTROLLED, RUNS),), settings
        ),
        partial(speedup_exhibits, "ablations"),
        printed=("The paper prints no figure for a part of EdgeGossip alone.",),
        scaled_down=less_work(limit),
        max_work=limit,
        target_gap=TARGET_GAP,
    )
