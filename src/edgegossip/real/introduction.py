"""A worker's introduction when it meets the other workers: settings, parameters, data."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgegossip.contract.protocol import Seconds
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.hold_out import some_of
from edgegossip.data.local import Local
from edgegossip.data.nested import leaves
from edgegossip.models.blocks import drawn_from
from edgegossip.net.host.introduction import MAX_TEXT, Introduction, Setting
from edgegossip.runs.describe import flatten, header, versions
from edgegossip.runs.experiment import Experiment
from edgegossip.training.step import TrainingStep
from edgegossip.training.task import Workload

_SIMULATED = (
    "platforms",
    "links",
    "faults",
    "max_seconds",
    "evaluation_interval",
    "evaluation_epochs",
    "versions",
    "commit",
    "recipe",
)
"""Fields in which workers of one real run may differ, because they describe simulated
machines."""
_OF_MACHINE = (
    "task.torch_device",
    "task.step.autocast",
    "task.step.micro_batch_size",
    "task.step.compile",
    "task.step.cuda_graph",
    "task.optimizer.fused",
    "task.optimizer.foreach",
    "task.optimizer.capturable",
)
"""Settings with which each machine computes the same training, except for rounding. The batch
size is none of them, because it determines the number and the noise of a worker's steps."""
MAX_LISTED = 256
"""Tensors that an introduction lists, so that it stays far below its limit of bytes."""
_NUM_SAMPLES = 64
_NUM_MEASURED = 8
_NUM_VALUES = 2**20
_FREQUENCIES = (0.7390851332, 1.2020569032, 1.7724538509, 2.6651441427)


def run_key(experiment: Experiment, recipe: str | None, name: str = "") -> str:
    """The run's name on the network, by which its workers find each other.

    >>> from edgegossip.recipes.quickstart import quickstart
    >>> run_key(quickstart().experiments["gosgd"], "my.py:cancer", "second try")
    'second_try:cancer'
    """
    known = (recipe or experiment.run_name).rpartition(":")[2]
    # The first part is the name that certificates may be bound to.
    parts = [name, known] if name else [known]
    return ":".join(re.sub(r"[^A-Za-z0-9_.-]", "_", part) for part in parts)


def run_id(key: str) -> bytes:
    """The 8 bytes that represent a run's name in every message."""
    return hashlib.sha256(key.encode()).digest()[:8]


def shared_settings(described: Mapping[str, object]) -> dict[str, Setting]:
    """The settings that all workers of a run must share, by name, from a `header`."""
    return without_machine({k: v for k, v in described.items() if k not in _SIMULATED})


def without_machine(described: Mapping[str, object]) -> dict[str, Setting]:
    """All settings in a `header`, by name, except those of the machine, such as its device.

    >>> without_machine({"task": {"torch_device": "cuda", "batch_size": 8}})
    {'task.batch_size': 8}
    """
    flat = flatten(described)
    kept = {name: value for name, value in flat.items() if name not in _OF_MACHINE}
    step = {name: value for name, value in kept.items() if name.startswith("task.step")}
    # A step that has only settings of the machine is as none, which a description leaves out.
    is_plain = {*step.values()} <= {None, TrainingStep.__name__}
    return {name: value for name, value in kept.items() if not is_plain or name not in step}


def introduce(
    experiment: Experiment,
    workload: Workload,
    max_seconds: Seconds | None = None,
    *,
    final_average: bool = False,
) -> Introduction:
    """Make a worker's introduction.

    Args:
        experiment: Experiment of the worker.
        workload: Workload of `experiment`.
        max_seconds: The worker's time limit.
        final_average: Whether the worker ends with the mean of all models.
    """
    first_of_role = {
        experiment.algorithm.role(rank).name: rank
        for rank in reversed(range(experiment.num_workers))
    }
    num_listed = MAX_LISTED // len(first_of_role)
    tensors, parameters, frozen = (dict[str, Setting]() for _ in range(3))
    for role, rank in sorted(first_of_role.items()):
        found = workload.described_tensors(rank)
        tensors |= compared_tensors(found, f" of a {role}", num_listed)
        parameters[f"initial parameters of a {role}"] = sketch(workload.initial_params(rank))
        if (sample := workload.frozen_sample(rank)) is not None:
            frozen[f"frozen parameters of a {role}"] = sketch(sample)
    described = header(experiment, None)
    flat = flatten(described)
    machine = {name: flat[name] for name in _OF_MACHINE if flat.get(name) is not None}
    return Introduction(
        settings={
            **shared_settings(described),
            "final_average": final_average,
            **tensors,
            **parameters,
            **frozen,
            **_sketch_data(experiment.task.dataset),
            **_sketch_loss(workload),
        },
        versions={**versions(), **machine, "max_seconds": max_seconds},
    )


def compared_tensors(
    described: Sequence[str], whose: str = "", num_listed: int = MAX_LISTED
) -> dict[str, Setting]:
    """Settings that differ if workers do not exchange the same tensors in the same order.

    Args:
        described: The exchanged tensors, from `flat.described`.
        whose: Text behind each name.
        num_listed: Maximum number of tensors that a difference can name; a digest compares all.

    >>> compared_tensors(["weight float32 [3, 2]"])["tensor 0"]
    'weight float32 [3, 2]'
    """
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
    # The end of a long text has the shape; the digest tells the rest.
    listed = {
        f"tensor {index}{whose}": each
        if len(each) <= MAX_TEXT
        else f"...{each[3 - MAX_TEXT :]}"
        for index, each in enumerate(described[:num_listed])
    }
    return {**listed, f"tensors{whose}": f"sha256:{digest[:16]}"}


def sketch(vector: Tensor) -> list[float]:
    """The norm of a vector and its projections on fixed waves, which identify it.

    Unlike a hash, they hardly change if values differ by rounding, as happens between kinds of
    processors.

    >>> sketch(torch.tensor([3.0, 4.0]))[0]
    5.0
    """
    flat = vector.detach().flatten()
    flat = flat[:: max(1, len(flat) // _NUM_VALUES)].to("cpu", torch.float64)
    flat = flat.nan_to_num(0.0, 0.0, 0.0)  # a frozen mask may be infinite, and nan != nan
    places = torch.arange(len(flat), dtype=torch.float64)
    length = float(torch.linalg.vector_norm(flat))
    waves = [float(flat @ torch.cos(places * w)) for w in _FREQUENCIES]
    return [round(length, 9), *(round(wave / (length or 1.0), 6) for wave in waves)]


def _sketch_loss(workload: Workload) -> dict[str, Setting]:
    """Sketch the loss function, whose description is only its name, by a value.

    There is no sketch of a random loss or of `Local` data, and samples that may be transformed
    at random are not used.
    """
    train = workload.task.dataset.train
    if not isinstance(train, ArraySplit) or train.is_mapped:
        return {}
    samples = some_of(train, torch.arange(min(len(train), _NUM_MEASURED)))
    found = []
    try:
        for seed in range(2):
            with drawn_from(seed):
                found.append(workload.initial_loss(samples))
    except Exception:  # a loss that fails is reported by training, which knows more about it
        found = [math.nan, math.nan]
    is_usable = math.isfinite(found[0]) and math.isclose(*found, rel_tol=1e-5)
    return {"loss of the initial parameters": [round(found[0], 9)] if is_usable else []}


def _sketch_data(dataset: Dataset) -> dict[str, Setting]:
    """Sketch labels and some samples, but not samples that may be transformed at random.

    There is no sketch of `Local` data, whose description is compared as a setting.
    """
    if isinstance(dataset, Local):
        return {}
    train = dataset.train
    indices = torch.linspace(0, len(train) - 1, min(len(train), _NUM_SAMPLES)).long()
    is_in_memory = isinstance(train, ArraySplit) and not train.is_mapped
    if is_in_memory and not dataset.num_classes:
        return {
            f"training samples{path}": sketch(leaf.double())
            for path, leaf in leaves(train.batch(indices))
        }
    if not dataset.num_classes:
        return {}
    labels = hashlib.sha256(train.labels.contiguous().numpy().tobytes()).hexdigest()
    data: dict[str, Setting] = {"training labels": f"sha256:{labels[:16]}"}
    if is_in_memory:
        data["training samples"] = sketch(train.batch(indices)[0].double())
    return data
