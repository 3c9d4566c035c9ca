"""Problems: data with a model, for recipes and studies that compare algorithms on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn

from edgegossip.contract.randomness import generator
from edgegossip.data.dataset import ArraySplit, Dataset, Split
from edgegossip.data.hold_out import hold_out
from edgegossip.data.partition import IID, Partition
from edgegossip.data.readers import DATASETS
from edgegossip.models import lenet5, mlp, sensor_cnn
from edgegossip.recipes.tasks import Settings, make_task
from edgegossip.runs.describe import describe
from edgegossip.runs.tuning import without_test_data
from edgegossip.training.learner import Augmentation
from edgegossip.training.optimizer import Constant, Schedule
from edgegossip.training.task import Task


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A learning task: data, a model, and settings that a comparison may replace.

    Args:
        name: Name, also used for folders.
        dataset: Name of the data set.
        model: Called with `input_shape` and `num_classes`.
        num_train: Training samples, drawn at random; None for all.
        num_test: Test samples, drawn at random; None for all.
        held_out: Share of the training samples that replace the test samples, for trials of
            settings; 0 for none.
        validation_share: Share of the remaining training samples to hold out for algorithms
            that measure losses.
        settings: Epochs of EpochGossip, settings of SGD, and throughput of the fastest
            platform.
        augmentation: Augmentation of the training batches.
        schedule: Schedule of the learning rate.
        partition: Divides the training samples among the workers.
        scaled_down: Sentence about everything that is smaller than in the paper; empty if
            nothing is.
    """

    name: str
    dataset: str
    model: Callable[..., nn.Module]
    num_train: int | None = None
    num_test: int | None = None
    held_out: float = 0.0
    validation_share: float = 0.0
    settings: Settings = Settings()
    augmentation: Augmentation | None = None
    schedule: Schedule = Constant()
    partition: Partition = IID()
    scaled_down: str = ""

    def load(self, data_dir: Path) -> Dataset:
        """Read the data set.

        Raises:
            DataError: If a file is missing or damaged.
        """
        dataset = _load(self.dataset, data_dir, self.num_train, self.num_test)
        if self.held_out:
            dataset = without_test_data(dataset, self.held_out)
        return hold_out(dataset, self.validation_share) if self.validation_share else dataset

    def task(self, data_dir: Path) -> Task:
        """The learning task; see `load`."""
        return make_task(
            self.load(data_dir),
            self.model,
            self.settings,
            schedule=self.schedule,
            batch_size=self.settings.batch_size,
            augmentation=self.augmentation,
            partition=self.partition,
        )

    def plain(self) -> dict[str, object]:
        """Everything that the results depend on, as JSON values."""
        varied: dict[str, object] = {}
        if self.schedule != Constant():
            varied["schedule"] = describe(self.schedule)
        if self.augmentation is not None:
            varied["augmentation"] = describe(self.augmentation)
        if self.partition != IID():
            varied["partition"] = describe(self.partition)
        fields = (
            *("num_epochs", "batch_size", "lr", "momentum", "weight_decay"),
            *("exchange_probability", "throughput"),
        )
        return {
            **varied,
            "problem": self.name,
            "num_train": self.num_train,
            "num_test": self.num_test,
            **{name: getattr(self.settings, name) for name in fields},
        }


@cache
def _load(name: str, data_dir: Path, num_train: int | None, num_test: int | None) -> Dataset:
    dataset = DATASETS[name](data_dir)
    return replace(
        dataset,
        train=_some(dataset.train, num_train, "train"),
        test=_some(dataset.test, num_test, "test"),
        # Subjects do not matter for samples drawn at random.
        subjects=dataset.subjects if num_train is None else None,
    )


def _some(split: Split, num_samples: int | None, which: str) -> Split:
    """A fixed random subset of a split."""
    if num_samples is None or num_samples >= len(split):
        return split
    order = torch.randperm(len(split), generator=generator(0, "study", which))
    return ArraySplit(*split.batch(order[:num_samples]))


MNIST_LENET5 = Problem(name="mnist-lenet5", dataset="mnist", model=lenet5)
CIFAR10_LENET5 = Problem(name="cifar10-lenet5", dataset="cifar10", model=lenet5)
HAR_CNN = Problem(name="har-cnn", dataset="har", model=sensor_cnn)
MNIST_MLP = Problem(
    name="mnist-mlp", dataset="mnist", model=partial(mlp, hidden=(64,)), num_test=5_000
)
