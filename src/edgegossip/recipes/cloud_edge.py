"""Cloud and edge: phones with private data hold a model's first stage, a cloud the second."""

from __future__ import annotations

from collections.abc import Callable
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
from edgegossip.recipes.tasks import CommonSettings, default_data_dir, make_task
from edgegossip.runs.experiment import Comparison, Experiment
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform
from edgegossip.training.stages.decoupled import DecoupledStage
from edgegossip.training.stages.pipelined import PipelinedStage
from edgegossip.training.stages.staged import Staged, staged
from edgegossip.training.stages.teachers import Greedy

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


def cloud_edge(
    settings: CommonSettings = DEFAULTS,
    *,
    data_dir: Path = default_data_dir(),
    phone_trace: Path | None = None,
    precision: str = "int8",
) -> Comparison:
    """Activities of 21 people: phones train the first stage, a cloud the second.

    Each phone has one person's sensor data, which never leaves the phone. The cloud is twenty
    times as fast as the fastest phone. The runs are `greedy`, `splitfed` (with the true
    gradient), and `epoch-gossip`, which trains whole models on the phones alone.

    Args:
        settings: Settings of the recipe; `throughput` is that of the trace's fastest phone.
        data_dir: Folder with uci_har.npz; by default $EDGEGOSSIP_DATA.
        phone_trace: See `har-cnn`.
        precision: Precision of activations and gradients in transit: float32, bfloat16 or int8.
    """
    phones = phone_platforms(settings, data_dir, phone_trace)
    dataset = har(data_dir)
    task = make_task(
        dataset,
        sensor_cnn,
        settings,
        batch_size=settings.batch_size,
        partition=BySubject(),
    )
    cloud = Platform(name="cloud", throughput=CLOUD_SPEED * settings.throughput)
    gossip = EpochGossip(
        topology=complete(settings.num_workers), num_rounds=settings.num_epochs
    )
    common: dict[str, Any] = {"links": Links(default=PHONE_LINK), "seed": settings.seed}

    def with_cloud(kind: Callable[..., Any], parts: Staged) -> Experiment:
        algorithm = kind(
            inner=gossip,
            num_first=settings.num_workers,
            boundaries=parts.boundaries,
            num_classes=parts.num_classes,
            max_batch=settings.batch_size + 1,
            precision=precision,
        )
        return Experiment(
            task=parts.task, algorithm=algorithm, platforms=(*phones, cloud), **common
        )

    pipelined = partial(PipelinedStage, max_passed=settings.num_workers)
    experiments = {
        "epoch-gossip": Experiment(task=task, algorithm=gossip, platforms=phones, **common),
        "greedy": with_cloud(
            partial(Decoupled, gradient_every=None), staged(task, AT, DecoupledStage, Greedy())
        ),
        "splitfed": with_cloud(partial(Pipelined, in_flight=1), staged(task, AT, pipelined)),
    }
    return Comparison(experiments=experiments, baseline="epoch-gossip")
