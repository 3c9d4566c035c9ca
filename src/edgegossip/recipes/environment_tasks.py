"""Tasks of the environments, with settings of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from edgegossip.contract.ranges import check_choices, check_ranges
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.hold_out import hold_out
from edgegossip.data.partition import IID, BySubject, Dirichlet, Partition
from edgegossip.data.texts import books
from edgegossip.models import mlp
from edgegossip.recipes.language import LanguageSettings, language_task
from edgegossip.recipes.problems import CIFAR10_LENET5, HAR_CNN, MNIST_MLP, Problem
from edgegossip.recipes.tasks import Settings
from edgegossip.training.task import Task

TaskName: TypeAlias = Literal[
    "gpt-books", "gpt-books-by-author", "cifar10-dirichlet", "mnist", "har", "digits"
]
"""`gpt-books`: a GPT that predicts the bytes of books, mixed; `-by-author`: each worker has an
equal part of the books in the order of their authors. `cifar10-dirichlet`: LeNet-5, classes
dealt with Dirichlet's alpha of 0.1. `mnist`: a perceptron of 64 hidden units, mixed. `har`: a
CNN, each worker with one person's data. `digits`: built-in pictures and a tiny perceptron, for
tests.
"""


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings of a task; None stands for the task's own value.

    Args:
        task: Data, their division and the model.
        throughput: Training samples per second of the fastest machine.
        num_train: Training samples, drawn at random or, of books, evenly spaced; None for all.
        num_test: Test samples, drawn in the same way.
        batch_size: Samples per step and worker.
        lr: Learning rate, of AdamW for books and of SGD otherwise.
        momentum: Momentum of SGD in the workers' own steps, in [0, 1); books need 0.
        width: Size of an embedding of the GPT, by default 128; other tasks need None.
        num_layers: Blocks of the GPT, by default 5; other tasks need None.
        validation_share: Share of the training samples to hold out for the search of ADSP.
        seed: Seeds the random choices.
        torch_device: Device of the models: auto, cpu, cuda, cuda:1 or mps. "auto" takes
            the first of cuda, mps and cpu that a machine has.
    """

    task: TaskName = "mnist"
    throughput: float | None = None
    num_train: int | None = None
    num_test: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    momentum: float = 0.0
    width: int | None = None
    num_layers: int | None = None
    validation_share: float = 0.03
    seed: int = 0
    torch_device: str = "cpu"

    def __post_init__(self) -> None:
        check_choices(self, task=get_args(TaskName))
        check_ranges(self, validation_share="in (0, 1)", momentum="in [0, 1)")
        check_ranges(self, width="at least 1 or None", num_layers="at least 1 or None")
        check_ranges(self, throughput="above 0 and finite, or None")
        check_ranges(self, num_train="at least 1 or None", num_test="at least 1 or None")
        check_ranges(self, batch_size="at least 1 or None", lr="above 0 and finite, or None")
        if self.momentum and PRESETS[self.task].problem is None:
            raise ValueError(
                f"momentum must be 0 for {self.task}, which AdamW learns, got {self.momentum}; "
                "leave it out, or choose another task"
            )
        if PRESETS[self.task].problem is not None:
            for name in ("width", "num_layers"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(
                        f"{name} must be None for {self.task}, which has no GPT, got {value}; "
                        "leave it out, or choose gpt-books"
                    )


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A task's own values of the settings.

    Args:
        lr: See `TaskSettings`.
        batch_size: See `TaskSettings`.
        throughput: See `TaskSettings`.
        num_epochs: Passes over the data in a run.
        num_test: See `TaskSettings`.
        problem: Data and model; None for books.
        partition: Divides the training samples among the workers.
    """

    lr: float
    batch_size: int
    throughput: float
    num_epochs: float
    num_test: int | None = None
    problem: Problem | None = None
    partition: Partition = IID()


@dataclass(frozen=True)
class ByAuthor:
    """Deal equal consecutive parts of all samples, in the order of their subjects.

    Unlike `BySubject`, it may have more workers than subjects, and shards differ by at most one
    sample.

    Raises:
        ValueError: When called, if the data has no subjects.
    """

    is_skewed = True

    def __call__(self, dataset: Dataset, num_workers: int, seed: int) -> list[Tensor]:
        if dataset.subjects is None:
            raise ValueError(f"{dataset.name!r} has no subjects; use IID or Dirichlet")
        order = dataset.subjects.argsort(stable=True)
        return [part.sort().values for part in order.tensor_split(num_workers)]


_BOOKS = Preset(lr=1e-3, batch_size=8, throughput=80.0, num_epochs=6.0, num_test=400)
_DIGITS = Problem(name="digits", dataset="digits", model=partial(mlp, hidden=(32,)))
PRESETS: Mapping[TaskName, Preset] = {
    "gpt-books": _BOOKS,
    "gpt-books-by-author": replace(_BOOKS, partition=ByAuthor()),
    "cifar10-dirichlet": Preset(
        lr=0.05,
        batch_size=32,
        throughput=1000.0,
        num_epochs=20.0,
        num_test=5000,
        problem=CIFAR10_LENET5,
        partition=Dirichlet(0.1),
    ),
    "mnist": Preset(
        lr=0.15,
        batch_size=32,
        throughput=1000.0,
        num_epochs=8.0,
        num_test=5000,
        problem=MNIST_MLP,
    ),
    "har": Preset(
        lr=0.05,
        batch_size=32,
        throughput=500.0,
        num_epochs=30.0,
        problem=HAR_CNN,
        partition=BySubject(),
    ),
    "digits": Preset(lr=0.1, batch_size=16, throughput=1000.0, num_epochs=8.0, problem=_DIGITS),
}


def prepared(settings: TaskSettings, data_dir: Path) -> tuple[Task, float, float]:
    """Make a task.

    Args:
        settings: Settings of the task.
        data_dir: Folder of the data sets.

    Returns:
        The task, the throughput of the fastest machine, and the task's own number of epochs.

    Raises:
        DataError: If a file is missing or damaged.
    """
    own = PRESETS[settings.task]
    given = {
        name: getattr(settings, name)
        for name in ("lr", "batch_size", "throughput", "num_test")
        if getattr(settings, name) is not None
    }
    own = replace(own, **given)
    task = (
        _of_books(own, settings, data_dir)
        if own.problem is None
        else _of_problem(own, own.problem, settings, data_dir)
    )
    return replace(task, partition=own.partition), own.throughput, own.num_epochs


def _of_problem(own: Preset, problem: Problem, settings: TaskSettings, data_dir: Path) -> Task:
    trained = Settings(
        batch_size=own.batch_size,
        lr=own.lr,
        momentum=settings.momentum,
        seed=settings.seed,
        torch_device=settings.torch_device,
    )
    return replace(
        problem,
        num_train=settings.num_train,
        num_test=own.num_test,
        validation_share=settings.validation_share,
        settings=trained,
    ).task(data_dir)


def _of_books(own: Preset, settings: TaskSettings, data_dir: Path) -> Task:
    width = settings.width or LanguageSettings.width
    language = LanguageSettings(
        batch_size=own.batch_size,
        lr=own.lr,
        width=width,
        num_layers=settings.num_layers or LanguageSettings.num_layers,
        num_heads=min(4, width),
        num_test=own.num_test or LanguageSettings.num_test,
        torch_device=settings.torch_device,
    )
    dataset = books(data_dir, language.context)
    if settings.num_train is not None:
        number = min(settings.num_train, len(dataset.train))
        some = torch.linspace(0, len(dataset.train) - 1, number).long()
        assert dataset.subjects is not None  # the authors
        train = ArraySplit(dataset.train.batch(some))
        dataset = replace(dataset, train=train, subjects=dataset.subjects[some])
    task = language_task(hold_out(dataset, settings.validation_share), language)
    # As in HALoS, but at a constant rate: with a schedule over the run's time, the time to a
    # loss would depend on the length of the run.
    adamw: Any = partial(torch.optim.AdamW, lr=own.lr, betas=(0.9, 0.95), weight_decay=0.1)
    return replace(task, optimizer=adamw)


def learning_rate(task: Task) -> float:
    """The learning rate of a task from `prepared`."""
    optimizer: Any = task.optimizer
    found = optimizer.keywords["lr"] if isinstance(optimizer, partial) else optimizer.lr
    return float(found)
