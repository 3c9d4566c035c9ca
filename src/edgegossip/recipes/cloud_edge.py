"""Cloud and edge: phones with private data hold a model's first stage, a cloud the second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.contract.topology import complete
from edgegossip.data.partition import BySubject
from edgegossip.data.readers import har
from edgegossip.models import sensor_cnn
from edgegossip.recipes.baselines import HAR_CNN_SETTINGS, PHONE_LINK, phone_platforms
from edgegossip.recipes.edge_squeeze import edge_squeeze
from edgegossip.recipes.staged_training import without_momentum
from edgegossip.recipes.tasks import CommonSettings, default_data_dir, make_task
from edgegossip.runs.experiment import Comparison, Experiment
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform
from edgegossip.training.stages.decoupled import DecoupledStage
from edgegossip.training.stages.pipelined import PipelinedStage
from edgegossip.training.stages.staged import staged
from edgegossip.training.stages.teachers import Greedy, LocalLosses, SyntheticGradients
from edgegossip.training.task import Task

AT = (6,)
"""The cut is after the second of three convolutions: 2,048 numbers per sample."""
CLOUD_SPEED = 20.0
"""Throughput of the cloud relative to the fastest phone."""
DEFAULTS = CommonSettings(
    num_epochs=15,
    num_workers=HAR_CNN_SETTINGS.num_workers,
    throughput=HAR_CNN_SETTINGS.throughput,
    batch_size=HAR_CNN_SETTINGS.batch_size,
)


METHODS: Mapping[str, Greedy | LocalLosses | SyntheticGradients] = {
    "greedy": Greedy(),
    "local-prediction": LocalLosses(similarity=0.0),
    "synthetic-gradients": SyntheticGradients(),
}
"""Teachers of the phones' stage by name of the run; `splitfed` needs none."""
ALONE = ("epoch-gossip", "edge-squeeze")
"""Runs that train whole models on the phones alone."""


def cloud_edge(
    settings: CommonSettings = DEFAULTS,
    *,
    data_dir: Path = default_data_dir(),
    phone_trace: Path | None = None,
    precision: str = "int8",
    teacher_lr: float = 1e-3,
) -> Comparison:
    """Activities of 21 people: phones train the first stage, a cloud the second.

    Each phone has one person's sensor data, which never leaves the phone. The cloud is twenty
    times as fast as the fastest phone. The runs are `epoch-gossip` and `edge-squeeze`, which
    train whole models on the phones alone, `greedy` and `local-prediction`, whose phones have a
    loss of their own, `synthetic-gradients`, and `splitfed` (with the true gradient).

    Args:
        settings: Settings of the recipe; `throughput` is that of the trace's fastest phone.
        data_dir: Folder with uci_har.npz; by default $EDGEGOSSIP_DATA.
        phone_trace: See `har-cnn`.
        precision: Precision of activations and gradients in transit: float32, bfloat16 or int8.
        teacher_lr: Adam's learning rate for the modules that teach the phones' stage.
    """
    phones = phone_platforms(settings, data_dir, phone_trace)
    task = make_task(
        har(data_dir),
        sensor_cnn,
        settings,
        batch_size=settings.batch_size,
        partition=BySubject(),
    )
    experiments = {
        name: cloud_run(name, task, phones, settings, precision, teacher_lr)
        for name in (*ALONE, *METHODS, "splitfed")
    }
    return Comparison(experiments=experiments, baseline="epoch-gossip")


def cloud_run(
    name: str,
    task: Task,
    phones: tuple[Platform, ...],
    settings: CommonSettings,
    precision: str,
    teacher_lr: float,
    at: tuple[int, ...] = AT,
    *,
    keeps_momentum: bool = False,
) -> Experiment:
    """Make one run of `cloud_edge`, which documents the arguments.

    Args:
        name: Name of the run.
        task: The whole model and its data, of `settings.num_workers` people.
        phones: A phone for each of them.
        settings: Settings of the recipe.
        precision: Precision of activations and gradients in transit.
        teacher_lr: Learning rate of teachers.
        at: The first block of the cloud's stage.
        keeps_momentum: Whether stages that predict gradients train with momentum, too; see
            `without_momentum`.
    """
    gossip = EpochGossip(
        topology=complete(settings.num_workers), num_rounds=settings.num_epochs
    )
    common: dict[str, Any] = {"links": Links(default=PHONE_LINK), "seed": settings.seed}
    if name == "epoch-gossip":
        return Experiment(task=task, algorithm=gossip, platforms=phones, **common)
    if name == "edge-squeeze":
        # In this time, phones that never wait process as many samples as in the other runs.
        speed = sum(phone.total_throughput for phone in phones)
        seconds = settings.num_epochs * len(task.dataset.train) / speed
        squeezed = edge_squeeze(settings.num_workers, seed=settings.seed)
        return Experiment(
            task=task, algorithm=squeezed, platforms=phones, max_seconds=seconds, **common
        )
    if name == "splitfed":
        pipelined = partial(PipelinedStage, max_passed=settings.num_workers)
        parts = staged(task, at, pipelined)
        kind: Callable[..., Any] = partial(Pipelined, in_flight=1)
    else:
        teacher = replace(METHODS[name], lr=teacher_lr)
        needs_gradients = teacher.learns_from_gradients
        if needs_gradients and not keeps_momentum:
            task = replace(task, optimizer=without_momentum(settings))
        parts = staged(task, at, DecoupledStage, teacher)
        kind = partial(Decoupled, gradient_every=1 if needs_gradients else None)
    algorithm = kind(
        inner=gossip,
        num_first=settings.num_workers,
        boundaries=parts.boundaries,
        num_classes=parts.num_classes,
        max_batch=settings.batch_size + 1,
        precision=precision,
    )
    cloud = Platform(name="cloud", throughput=CLOUD_SPEED * settings.throughput)
    return Experiment(
        task=parts.task, algorithm=algorithm, platforms=(*phones, cloud), **common
    )
