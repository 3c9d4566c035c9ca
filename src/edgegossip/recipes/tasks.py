"""Tasks, made from the settings of recipes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import nn

from edgegossip.learning.dataset import Dataset
from edgegossip.learning.optimizer import SGD
from edgegossip.learning.task import Task


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
        """Device of the models: cpu or cuda."""


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
