"""Settings common to recipes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from torch import nn

from edgegossip.data.dataset import Dataset
from edgegossip.recipes.published import Reading
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.selection import Cyclic
from edgegossip.training.task import Task

ACCURACY_AWARE = AccuracyAware()
"""EdgeGossip's choice of samples in recipes and studies."""
IN_TURN = AccuracyAware(selection=Cyclic())
"""A choice without aggregation, for runs in which that would take as long as several epochs."""


def default_data_dir() -> Path:
    """$EDGEGOSSIP_DATA, or the folder "data"."""
    return Path(os.environ.get("EDGEGOSSIP_DATA", "data"))


def counts_around(value: int) -> tuple[int, ...]:
    """Values to try for a number of steps: the value, a lower one and a higher one.

    >>> counts_around(16), counts_around(1)
    ((16, 4, 64), (1, 4))
    """
    return tuple(dict.fromkeys((value, max(1, value // 4), 4 * value)))


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Settings common to many recipes; each recipe has its own defaults.

    Args:
        num_epochs: Epochs of EpochGossip; the other algorithms get the same virtual time.
        num_workers: Number of workers, each on its own platform.
        throughput: Training samples per second of the fastest platform.
        batch_size: Samples per step and worker.
        lr: Learning rate.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: Weight decay of SGD.
        seed: Seeds the random choices.
        torch_device: Device of the models: auto, cpu, cuda, cuda:1 or mps. "auto" takes
            the first of cuda, mps and cpu that a machine has.
    """

    num_epochs: int = 10
    num_workers: int = 4
    throughput: float = 1000.0
    batch_size: int = 64
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    seed: int = 0
    torch_device: str = "cpu"


Window: TypeAlias = float | Literal["auto"] | None
"""Epochs' worth of samples that are averaged, a third of the run so far, or none."""


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """Settings of recipes that compare EdgeGossip with baselines.

    Args:
        exchange_probability: Probability of a push after a step of GoSGD, in [0, 1].
        local_steps: Steps of the fastest worker between two exchanges of EdgeSqueeze, at least
            1.
        control: Weight of `ControlVariates` around EdgeGossip, in [0, 1]; 0 for none, "auto" as
            the run needs it.
        window: Epochs' worth of samples over which all models are averaged before evaluation
            (`TrailingAverage`), if machines are idle and shards equal; "auto" averages over the
            last third of the run so far, None evaluates the newest models.
        as_published: Reading of Algorithm 2 with which EdgeGossip is the paper's whole system
            (`as_published`); None for our defaults. It has no control variates, and then no run
            is averaged unless there is a `window`.
        shared: Let all workers of "edge-gossip" read all samples and claim units of them
            (`ClaimedWork`), in place of shards, control variates and an average over rounds.
    """

    exchange_probability: float = 0.02
    local_steps: int = 16
    control: float | Literal["auto"] = "auto"
    window: Window = "auto"
    as_published: Reading | None = None
    shared: bool = False


# Tasks, made from the settings of recipes.


class TrainingSettings(Protocol):
    """The settings of a recipe that its task needs."""

    @property
    def lr(self) -> float:
        """Learning rate."""

    @property
    def momentum(self) -> float:
        """Momentum of SGD, in [0, 1)."""

    @property
    def weight_decay(self) -> float:
        """Weight decay of SGD."""

    @property
    def torch_device(self) -> str:
        """Device of the models, as in `Task`."""


def make_task(
    dataset: Dataset,
    model: Callable[..., nn.Module],
    settings: TrainingSettings,
    *,
    nesterov: bool = False,
    **others: Any,  # noqa: ANN401
) -> Task:
    """Make a task from `dataset`, with SGD.

    Args:
        dataset: Training and test samples.
        model: Called with `input_shape` and `num_classes`.
        settings: Settings of the recipe.
        nesterov: Use Nesterov's momentum.
        others: Other arguments of `Task`.
    """
    shape = {"input_shape": dataset.input_shape, "num_classes": dataset.num_classes}
    optimizer = SGD(
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=nesterov,
    )
    return Task(
        dataset=dataset,
        model=partial(model, **shape),
        optimizer=optimizer,
        torch_device=settings.torch_device,
        **others,
    )
