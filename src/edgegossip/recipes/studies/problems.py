"""The problems of the studies: data, model and settings, scaled down for two cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn

from edgegossip.contract.randomness import generator
from edgegossip.data.dataset import ArraySplit, Dataset, Split
from edgegossip.data.partition import IID, Partition
from edgegossip.data.pictures import flip_and_crop
from edgegossip.data.readers import DATASETS
from edgegossip.models import (
    alexnet,
    eight_layers,
    lenet5,
    mlp,
    mobilenet_v2,
    resnet20,
    sensor_cnn,
    squeezenet,
)
from edgegossip.recipes.tasks import Settings, make_task
from edgegossip.runs.describe import describe
from edgegossip.training.learner import Augmentation
from edgegossip.training.optimizer import Constant, Schedule
from edgegossip.training.task import Task


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A learning task of a study.

    Args:
        name: Name, also used for folders.
        dataset: Name of the data set.
        model: Called with `input_shape` and `num_classes`.
        num_train: Training samples, drawn at random; None for all.
        num_test: Test samples, drawn at random; None for all.
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
        return _load(self.dataset, data_dir, self.num_train, self.num_test)

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
        return varied | {
            "problem": self.name,
            "num_train": self.num_train,
            "num_test": self.num_test,
            "num_epochs": self.settings.num_epochs,
            "batch_size": self.settings.batch_size,
            "lr": self.settings.lr,
            "momentum": self.settings.momentum,
            "weight_decay": self.settings.weight_decay,
            "exchange_probability": self.settings.exchange_probability,
            "throughput": self.settings.throughput,
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


MNIST_LENET5 = Problem(
    name="mnist-lenet5",
    dataset="mnist",
    model=lenet5,
    settings=Settings(num_epochs=15, throughput=2000.0),
)
CIFAR10_LENET5 = Problem(
    name="cifar10-lenet5",
    dataset="cifar10",
    model=lenet5,
    settings=Settings(num_epochs=24),
)
CIFAR10_LENET5_AUGMENTED = replace(
    CIFAR10_LENET5, name="cifar10-lenet5-augmented", augmentation=flip_and_crop
)
HAR_CNN = Problem(
    name="har-cnn",
    dataset="har",
    model=sensor_cnn,
    settings=Settings(num_epochs=40, throughput=500.0, exchange_probability=0.1),
)
CIFAR10_RESNET20 = Problem(
    name="cifar10-resnet20",
    dataset="cifar10",
    model=resnet20,
    num_train=10_000,
    num_test=5_000,
    settings=Settings(
        num_epochs=12, throughput=200.0, batch_size=32, lr=0.05, weight_decay=1e-4
    ),
    augmentation=flip_and_crop,
    scaled_down="ResNet-20 (not in the paper) learns from 10,000 of the 50,000 pictures of "
    "CIFAR-10 for 12 epochs, and is tested on 5,000 of the 10,000.",
)
IMAGENET8X8_EIGHT_LAYERS = Problem(
    name="imagenet8x8-eight-layers",
    dataset="imagenet8x8",
    model=eight_layers,
    num_train=40_000,
    settings=Settings(num_epochs=40, throughput=1000.0),
    scaled_down="Four convolutions and four linear layers replace AlexNet; they learn from "
    "40,000 pictures of ImageNet 8x8 for 40 epochs.",
)
CIFAR10_ALEXNET = Problem(
    name="cifar10-alexnet",
    dataset="cifar10",
    model=alexnet,
    num_train=2_000,
    num_test=1_000,
    settings=Settings(num_epochs=6, throughput=50.0, batch_size=32, exchange_probability=0.1),
    scaled_down="AlexNet (57 million parameters) learns from 2,000 of the 50,000 pictures of "
    "CIFAR-10 for 6 epochs, and is tested on 1,000 of the 10,000.",
)
CIFAR10_ALEXNET_QUARTER = Problem(
    name="cifar10-alexnet-quarter",
    dataset="cifar10",
    model=partial(alexnet, width=0.25),
    num_train=10_000,
    num_test=2_000,
    settings=Settings(num_epochs=12, throughput=500.0, batch_size=32, exchange_probability=0.1),
    scaled_down="AlexNet with a quarter of its channels and hidden units (3.6 of 57 million "
    "parameters) learns from 10,000 of the 50,000 pictures of CIFAR-10 for 12 epochs, and is "
    "tested on 2,000 of the 10,000.",
)
CIFAR10_SQUEEZENET = Problem(
    name="cifar10-squeezenet",
    dataset="cifar10",
    model=squeezenet,
    num_train=5_000,
    num_test=2_000,
    settings=Settings(num_epochs=15, throughput=300.0, batch_size=32, exchange_probability=0.1),
    scaled_down="SqueezeNet learns from 5,000 of the 50,000 pictures of CIFAR-10 for 15 "
    "epochs, and is tested on 2,000 of the 10,000.",
)
CIFAR10_MOBILENET_V2_QUARTER = Problem(
    name="cifar10-mobilenet-v2-quarter",
    dataset="cifar10",
    model=partial(mobilenet_v2, width=0.25),
    num_train=5_000,
    num_test=2_000,
    settings=Settings(
        num_epochs=8, throughput=150.0, batch_size=16, lr=0.02, exchange_probability=0.1
    ),
    scaled_down="MobileNet-v2 with a quarter of its channels (251 thousand parameters of 2.2 "
    "million) learns from 5,000 of the 50,000 pictures of CIFAR-10 for 8 epochs, and is tested "
    "on 2,000 of the 10,000.",
)
DIGITS_MLP = Problem(
    name="digits-mlp",
    dataset="digits",
    # All epochs of a smaller model would take less time than aggregation.
    model=partial(mlp, hidden=(512, 512)),
    num_train=400,
    num_test=200,
    settings=Settings(
        num_epochs=4, batch_size=16, lr=0.02, throughput=100.0, exchange_probability=0.1
    ),
    scaled_down="The short form: 400 handwritten digits of 8 x 8 pixels and a small "
    "perceptron replace the data and the model. Its numbers mean nothing.",
)
MNIST_MLP = Problem(
    name="mnist-mlp",
    dataset="mnist",
    model=partial(mlp, hidden=(64,)),
    num_test=5_000,
    settings=Settings(batch_size=32, throughput=1000.0, momentum=0.0),
    scaled_down="MNIST and a perceptron with 64 hidden units (50,890 parameters); 5,000 of its "
    "10,000 test pictures.",
)
SMALL_MLP = replace(
    DIGITS_MLP,
    model=partial(mlp, hidden=(32,)),
    settings=replace(DIGITS_MLP.settings, momentum=0.0),
)


def with_epochs(problem: Problem, num_epochs: int) -> Problem:
    """Return `problem` with a different number of EpochGossip's epochs."""
    settings = replace(problem.settings, num_epochs=num_epochs)
    reason = f"{problem.name}: {num_epochs} epochs of EpochGossip; the paper prints no number."
    if problem.scaled_down:
        reason = f"{problem.scaled_down} Here, EpochGossip trains for {num_epochs} epochs."
    return replace(problem, settings=settings, scaled_down=reason)
