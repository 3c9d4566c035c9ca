"""One model in stages: synthetic gradients, local losses, and their competitors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.algorithms.stages.wire import Precision
from edgegossip.contract.errors import UsageError, unknown_name
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_ranges
from edgegossip.data.dataset import Dataset
from edgegossip.data.readers import cifar10, digits, mnist
from edgegossip.models.blocks import drawn_from
from edgegossip.models.chains import eight_layers as eight_layer_model
from edgegossip.recipes.tasks import CommonSettings, default_data_dir, make_task
from edgegossip.runs.experiment import Comparison, Experiment
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.training.optimizer import SGD
from edgegossip.training.stages.cutting import activations, blocks
from edgegossip.training.stages.decoupled import DecoupledStage
from edgegossip.training.stages.pipelined import PipelinedStage
from edgegossip.training.stages.planning import block_costs, plan_cut
from edgegossip.training.stages.staged import staged, teaching_flops
from edgegossip.training.stages.teachers import (
    Both,
    Greedy,
    LocalLosses,
    SyntheticGradients,
    TeacherFactory,
)
from edgegossip.training.task import Task


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """Settings of the recipes for models in stages; each recipe has its own defaults.

    Args:
        num_epochs: Passes over the training data, at least 1.
        num_stages: Number of machines, each with one stage, at least 2.
        cut_at: Index of the first block of each stage except the first; by default, the cut
            whose slowest machine or link is fastest.
        in_flight: In pipelined training, maximum batches in flight, by default two per stage;
            in decoupled training, maximum unanswered batches of each stage, by default 4.
        throughput: Samples per second of a machine of speed 1 that trains the whole model.
        speeds: Speeds of the machines, in the order of their stages; by default all are 1. The
            run `whole` uses only the first machine.
        width: Width of the model relative to the usual one.
        batch_size: Samples per step.
        lr: Learning rate.
        momentum: Momentum of SGD, in [0, 1). Runs with synthetic gradients use no momentum, and
            divide the learning rate by 1 - momentum.
        weight_decay: Weight decay of SGD.
        teacher_lr: Adam's learning rate for the teachers of stages.
        num_hidden: Hidden layers of modules that predict gradients, 1 by default; 2 as
            published.
        channels: Channels of their hidden convolutions, 16 by default; 32 in
            `SyntheticGradients`.
        latency: Latency of each link, in seconds.
        bandwidth: Bandwidth of each link, in bytes per second.
        precision: Precision of activations and gradients in transit.
        seed: Seeds the random choices.
        torch_device: Device of the models: auto, cpu, cuda, cuda:1 or mps. "auto" takes
            the first of cuda, mps and cpu that a machine has.
    """

    num_epochs: int = 5
    num_stages: int = 4
    cut_at: tuple[int, ...] | None = None
    in_flight: int | None = None
    throughput: float = 1000.0
    speeds: tuple[float, ...] = ()
    width: float = 1.0
    batch_size: int = 64
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    teacher_lr: float = 1e-3
    num_hidden: int | None = None
    channels: int | None = None
    latency: Seconds = 0.005
    bandwidth: float = 12.5e6
    precision: str = "float32"
    seed: int = 0
    torch_device: str = "cpu"

    def __post_init__(self) -> None:
        check_ranges(self, num_epochs="at least 1", num_stages="at least 2")
        check_ranges(self, in_flight="at least 1 or None", channels="at least 1 or None")
        check_ranges(self, num_hidden="at least 0 or None")
        if self.cut_at is not None and len(self.cut_at) != self.num_stages - 1:
            raise ValueError(
                f"cut_at names {len(self.cut_at)} blocks, but {self.num_stages} stages are cut "
                f"at {self.num_stages - 1}; name the first block of each stage but the first"
            )
        if self.speeds and len(self.speeds) != self.num_stages:
            raise ValueError(
                f"speeds are of {len(self.speeds)} machines, but there are {self.num_stages} "
                "stages; give one for each, or none"
            )

    @property
    def platforms(self) -> tuple[Platform, ...]:
        """Platforms of the machines, in the order of their stages."""
        speeds = self.speeds or (1.0,) * self.num_stages
        return tuple(Platform(throughput=speed * self.throughput) for speed in speeds)


QUICKSTART = StageSettings(
    num_epochs=24, num_stages=3, batch_size=32, width=0.25, lr=0.0015, throughput=3000.0
)
"""Settings of the quickstart. At a learning rate of 0.01, `synthetic-gradients` diverged with
each of three seeds; at 0.003, it fell back to chance several times."""
DATASETS: Mapping[str, Callable[[Path], Dataset]] = {"mnist": mnist, "cifar10": cifar10}
METHODS: Mapping[str, TeacherFactory] = {
    "synthetic-gradients": SyntheticGradients(num_hidden=1, channels=16),
    "local-losses": LocalLosses(),
    "local-prediction": LocalLosses(similarity=0.0),
    "greedy": Greedy(),
    "greedy, gradients": Both(
        gradients=SyntheticGradients(num_hidden=1, channels=16), losses=Greedy()
    ),
}
"""Teachers of the stages by name of the run."""
COMPETITORS = ("whole", "naive", "pipelined")


def quickstart(settings: StageSettings = QUICKSTART) -> Comparison:
    """Handwritten digits (embedded), eight layers in three stages, eight ways: two minutes.

    `whole`, on one machine, is the baseline; `naive` and `pipelined` use the true gradient. The
    other runs train each stage by itself.
    """
    return compare_stages(digits(), eight_layer_model, settings)


def eight_layers(
    settings: StageSettings = StageSettings(),
    *,
    dataset: str = "mnist",
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """Four convolutions and four linear layers in four stages, eight ways.

    The runs are the same as in `synthetic-gradients/quickstart`, each on the same number of
    samples.

    Args:
        settings: Settings of the recipe.
        dataset: mnist or cifar10.
        data_dir: Folder of the data; by default $EDGEGOSSIP_DATA.
    """
    if dataset not in DATASETS:
        raise UsageError(unknown_name("dataset", dataset, DATASETS))
    return compare_stages(DATASETS[dataset](data_dir), eight_layer_model, settings)


def compare_stages(
    dataset: Dataset, model: Callable[..., nn.Module], settings: StageSettings
) -> Comparison:
    """Train the same model whole, pipelined and decoupled, on the same number of samples."""
    names = (*COMPETITORS, *METHODS)
    experiments = {name: stage_run(name, dataset, model, settings) for name in names}
    return Comparison(experiments=experiments, baseline="whole")


def stage_run(
    name: str,
    dataset: Dataset,
    model: Callable[..., nn.Module],
    settings: StageSettings,
    methods: Mapping[str, TeacherFactory] = METHODS,
) -> Experiment:
    """Make the run of one of `COMPETITORS` or `methods`.

    By default, the cut is the one whose slowest machine or link is fastest.

    Args:
        name: Name of the run.
        dataset: Training and test samples.
        model: Called with `input_shape`, `num_classes` and `width`.
        settings: Settings of the recipe.
        methods: Teachers of the stages by name of the run.
    """
    task = make_task(
        dataset,
        partial(model, width=settings.width),
        settings,
        batch_size=settings.batch_size,
    )
    steps = max(1, len(dataset.train) // settings.batch_size)
    alone = Alone(num_rounds=settings.num_epochs, local_steps=steps)
    link = Link(latency=settings.latency, bandwidth=settings.bandwidth)
    common: dict[str, Any] = {"links": Links(default=link), "seed": settings.seed}
    if name == "whole":
        # Stages can be evaluated after each batch; so can this run.
        alone = Alone(num_rounds=settings.num_epochs * steps)
        first = settings.platforms[:1]
        return Experiment(task=task, algorithm=alone, platforms=first, **common)
    teacher = None if name in COMPETITORS else adapted(methods[name], settings)
    at = settings.cut_at or _cut(task, settings, teacher)
    if teacher is None:
        in_flight = 1 if name == "naive" else settings.in_flight or 2 * settings.num_stages
        parts = staged(task, at, partial(PipelinedStage, max_passed=in_flight))
        kind: Callable[..., Any] = partial(Pipelined, in_flight=in_flight)
    else:
        needs_gradients = teacher.learns_from_gradients
        if needs_gradients:
            task = replace(task, optimizer=without_momentum(settings))
        parts = staged(task, at, DecoupledStage, teacher)
        kind = partial(
            Decoupled,
            gradient_every=1 if needs_gradients else None,
            max_waiting=settings.in_flight or 4,
        )
    algorithm = kind(
        inner=alone,
        boundaries=parts.boundaries,
        num_classes=parts.num_classes,
        max_batch=settings.batch_size + 1,  # a pass may end with one sample more
        precision=settings.precision,
    )
    platforms = settings.platforms
    return Experiment(task=parts.task, algorithm=algorithm, platforms=platforms, **common)


def _cut(
    task: Task, settings: StageSettings, teacher: TeacherFactory | None
) -> tuple[int, ...]:
    """Find the cut whose slowest machine (with its teacher) or link is fastest."""
    assert not isinstance(task.model, Mapping)  # the model is whole
    with drawn_from(settings.seed):
        layers = blocks(task.model())
    sample = torch.zeros(1, *task.dataset.input_shape)
    costs = block_costs(layers, sample)
    taught: list[float] = [0.0] * len(costs)  # the last block needs no teacher
    if teacher is not None:
        for number, outputs in enumerate(activations(layers, sample)[:-1]):
            taught[number] = teaching_flops(teacher, outputs, task.dataset.num_classes)
    work = sum(cost.work for cost in costs)
    speeds = [each.throughput * work for each in settings.platforms]
    # Costs count four bytes for a number.
    bandwidth = settings.bandwidth * 4 / Precision(settings.precision).num_bytes
    bandwidths = [(bandwidth, bandwidth)] * (settings.num_stages - 1)
    returns = teacher is None or teacher.learns_from_gradients
    return plan_cut(
        costs,
        speeds,
        bandwidths,
        return_share=1.0 if returns else 0.0,
        stage_overhead=lambda first, last: taught[last - 1],
    ).at


def adapted(teacher: TeacherFactory, settings: StageSettings) -> TeacherFactory:
    """Return a teacher with the learning rate and the sizes that `settings` ask for."""
    if isinstance(teacher, Both):
        gradients = _sized(teacher.gradients, settings)
        return replace(teacher, gradients=gradients, losses=adapted(teacher.losses, settings))
    if isinstance(teacher, SyntheticGradients):
        return _sized(teacher, settings)
    assert isinstance(teacher, LocalLosses | Greedy)
    return replace(teacher, lr=settings.teacher_lr)


def _sized(teacher: SyntheticGradients, settings: StageSettings) -> SyntheticGradients:
    num_hidden, channels = settings.num_hidden, settings.channels
    return replace(
        teacher,
        lr=settings.teacher_lr,
        num_hidden=teacher.num_hidden if num_hidden is None else num_hidden,
        channels=teacher.channels if channels is None else channels,
    )


def without_momentum(settings: StageSettings | CommonSettings) -> SGD:
    """Return SGD without momentum but with the same total movement; with momentum, predicted
    gradients would lag behind.
    """
    rate = settings.lr / (1 - settings.momentum)
    return SGD(lr=rate, momentum=0.0, weight_decay=settings.weight_decay)
