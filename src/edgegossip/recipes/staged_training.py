"""One model in stages: synthetic gradients, local losses, and what competes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgegossip.algorithms.alone import Alone
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.core.errors import UsageError, unknown_name
from edgegossip.core.protocol import Seconds
from edgegossip.core.ranges import check_ranges
from edgegossip.experiments.experiment import Comparison, Experiment
from edgegossip.learning.dataset import Dataset
from edgegossip.learning.models.eight_layers import eight_layers as eight_layer_model
from edgegossip.learning.models.initialization import drawn_from
from edgegossip.learning.optimizer import SGD
from edgegossip.learning.readers import cifar10, digits, mnist
from edgegossip.learning.stages.both import Both
from edgegossip.learning.stages.cutting import blocks
from edgegossip.learning.stages.decoupled_stage import DecoupledStage
from edgegossip.learning.stages.greedy import Greedy
from edgegossip.learning.stages.local_losses import LocalLosses
from edgegossip.learning.stages.pipelined_stage import PipelinedStage
from edgegossip.learning.stages.planning import block_costs, plan_cut
from edgegossip.learning.stages.staged import staged
from edgegossip.learning.stages.synthetic_gradients import SyntheticGradients
from edgegossip.learning.stages.teacher import TeacherFactory
from edgegossip.learning.task import Task
from edgegossip.recipes.recipe_settings import default_data_dir
from edgegossip.recipes.tasks import make_task
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """Settings of the recipes for models in stages; each has defaults of its own.

    Args:
        num_epochs: Passes over the training data, at least 1.
        num_stages: Machines, each with one stage; the whole model is trained on one.
        throughput: Training samples of the whole model per second of each machine.
        width: Of the model, over its usual one.
        batch_size: Samples a step.
        lr: Learning rate.
        momentum: Of SGD, in [0, 1). Synthetic gradients are trained without, at the learning
            rate over 1 - momentum.
        weight_decay: Of SGD.
        teacher_lr: Learning rate of Adam for what teaches the stages.
        latency: Of each link, in seconds.
        bandwidth: Of each link, in bytes per second.
        precision: In which activations and gradients travel.
        seed: Of everything random.
        torch_device: Where models live: cpu or cuda.
    """

    num_epochs: int = 5
    num_stages: int = 4
    throughput: float = 1000.0
    width: float = 1.0
    batch_size: int = 64
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    teacher_lr: float = 1e-3
    latency: Seconds = 0.005
    bandwidth: float = 12.5e6
    precision: str = "float32"
    seed: int = 0
    torch_device: str = "cpu"

    def __post_init__(self) -> None:
        check_ranges(self, num_epochs="at least 1", num_stages="at least 2")


QUICKSTART = StageSettings(
    num_epochs=8, num_stages=3, batch_size=32, width=0.25, lr=0.02, throughput=3000.0
)
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
"""Teachers of the stages by the name of the run."""
COMPETITORS = ("whole", "naive", "pipelined")


def quickstart(settings: StageSettings = QUICKSTART) -> Comparison:
    """Handwritten digits (embedded), eight layers in three stages, eight ways: a minute."""
    return compare_stages(digits(), eight_layer_model, settings)


def eight_layers(
    settings: StageSettings = StageSettings(),
    *,
    dataset: str = "mnist",
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """Four convolutions and four linear layers in four stages, eight ways.

    Args:
        settings: What to change.
        dataset: mnist or cifar10.
        data_dir: Holds the data; by default $EDGEGOSSIP_DATA.
    """
    if dataset not in DATASETS:
        raise UsageError(unknown_name("dataset", dataset, DATASETS))
    return compare_stages(DATASETS[dataset](data_dir), eight_layer_model, settings)


def compare_stages(
    dataset: Dataset, model: Callable[..., nn.Module], settings: StageSettings
) -> Comparison:
    """Train the same model whole, pipelined and decoupled, as many samples each."""
    names = (*COMPETITORS, *METHODS)
    experiments = {name: stage_run(name, dataset, model, settings) for name in names}
    return Comparison(experiments=experiments, baseline="whole")


def stage_run(
    name: str, dataset: Dataset, model: Callable[..., nn.Module], settings: StageSettings
) -> Experiment:
    """Make the run of one of `COMPETITORS` or `METHODS`.

    The model is cut where, on machines and links like these, the slowest of them is fastest.
    """
    task = make_task(
        dataset,
        partial(model, width=settings.width),
        settings,
        batch_size=settings.batch_size,
    )
    steps = max(1, len(dataset.train) // settings.batch_size)
    alone = Alone(num_rounds=settings.num_epochs, local_steps=steps)
    machine = Platform(throughput=settings.throughput)
    link = Link(latency=settings.latency, bandwidth=settings.bandwidth)
    common: dict[str, Any] = {"links": Links(default=link), "seed": settings.seed}
    if name == "whole":
        return Experiment(task=task, algorithm=alone, platforms=(machine,), **common)
    at = _cut(task, settings)
    platforms = (machine,) * settings.num_stages
    if name in COMPETITORS:
        in_flight = 1 if name == "naive" else 2 * settings.num_stages
        parts = staged(task, at, partial(PipelinedStage, max_passed=in_flight))
        kind: Callable[..., Any] = partial(Pipelined, in_flight=in_flight)
    else:
        teacher = with_lr(METHODS[name], settings.teacher_lr)
        needs_gradients = teacher.learns_from_gradients
        if needs_gradients:
            task = replace(task, optimizer=_without_momentum(settings))
        parts = staged(task, at, DecoupledStage, teacher)
        kind = partial(Decoupled, gradient_every=1 if needs_gradients else None)
    algorithm = kind(
        inner=alone,
        boundaries=parts.boundaries,
        num_classes=parts.num_classes,
        max_batch=settings.batch_size + 1,  # a pass may end with one sample more
        precision=settings.precision,
    )
    return Experiment(task=parts.task, algorithm=algorithm, platforms=platforms, **common)


def _cut(task: Task, settings: StageSettings) -> tuple[int, ...]:
    assert not isinstance(task.model, Mapping)  # it is whole
    with drawn_from(settings.seed):
        layers = blocks(task.model())
    costs = block_costs(layers, torch.zeros(1, *task.dataset.input_shape))
    speed = settings.throughput * sum(cost.work for cost in costs)
    speeds = [speed] * settings.num_stages
    return plan_cut(costs, speeds, [settings.bandwidth] * (settings.num_stages - 1)).at


def with_lr(teacher: TeacherFactory, lr: float) -> TeacherFactory:
    """Give a teacher, or both of two, another learning rate."""
    if isinstance(teacher, Both):
        losses = with_lr(teacher.losses, lr)
        return replace(teacher, gradients=replace(teacher.gradients, lr=lr), losses=losses)
    assert isinstance(teacher, SyntheticGradients | LocalLosses | Greedy)
    return replace(teacher, lr=lr)


def _without_momentum(settings: StageSettings) -> SGD:
    """Give SGD that moves as far in the long run: a predicted gradient lags behind momentum."""
    rate = settings.lr / (1 - settings.momentum)
    return SGD(lr=rate, momentum=0.0, weight_decay=settings.weight_decay)
