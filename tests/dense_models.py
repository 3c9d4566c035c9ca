"""Small dense models and tasks, for learners that train together."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tests.small_runs import SHAPE, small_task

from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.models import mlp
from edgegossip.training.optimizer import SGD
from edgegossip.training.stacked.learner import StackedLearner
from edgegossip.training.task import Task

dense = partial(mlp, SHAPE, 3, hidden=(5,))


def dense_task(**changes: Any) -> Task:  # noqa: ANN401
    settings = {
        "model": dense,
        "augmentation": None,
        "optimizer": SGD(lr=0.05),
        "batch_size": 4,
    }
    return small_task(**settings | changes)


def stacked(**changes: Any) -> Task:  # noqa: ANN401
    return dense_task(trainer=StackedLearner, **changes)


def flat_data(num_samples: int, shape: tuple[int, ...] = SHAPE) -> Dataset:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, *shape, generator=random)
    split = ArraySplit(x, torch.randint(3, (num_samples,), generator=random))
    return Dataset("noise", split, split, num_classes=3, input_shape=shape)
