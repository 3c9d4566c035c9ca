"""Readable JSON of an experiment, with every resolved setting."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from edgegossip.core.topology import Topology
from edgegossip.experiments.experiment import Experiment
from edgegossip.experiments.source_commit import source_commit
from edgegossip.learning.dataset import Dataset
from edgegossip.learning.local import Local
from edgegossip.learning.task import Task

PACKAGES = ("edgegossip", "torch", "numpy", "scikit-learn", "safetensors")


def describe(value: object) -> Any:  # noqa: ANN401
    """Describe `value` as JSON values: dataclasses by name and fields, functions by name.

    >>> from edgegossip.sim.link import Link
    >>> describe(Link(latency=0.01))
    {'type': 'Link', 'latency': 0.01, 'bandwidth': None}
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Topology():
            return value.name
        case Local():
            return _describe_local(value)
        case Dataset():
            return _describe_dataset(value)
        case Task():
            return _describe_task(value)
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case Tensor():
            return f"tensor{list(value.shape)}"
        case functools.partial():
            settings = {name: describe(item) for name, item in value.keywords.items()}
            return {"type": describe(value.func), **settings}
        case Mapping():
            return {str(key): describe(item) for key, item in value.items()}
        case list() | tuple():
            return [describe(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    return getattr(value, "__qualname__", type(value).__qualname__)


def _describe_task(task: Task) -> dict[str, object]:
    # Left out where they are defaults, as in folders from before these fields existed.
    fields = {f.name: f for f in dataclasses.fields(task)}
    for name in ("metrics", "target_metric", "forward", "step"):
        if getattr(task, name) == fields[name].default:
            del fields[name]
    return {"type": "Task", **{name: describe(getattr(task, name)) for name in fields}}


def _describe_dataset(dataset: Dataset) -> dict[str, object]:
    # Left out where there is none, as in folders that were written before there could be one.
    held_out = {} if dataset.validation is None else {"num_validation": len(dataset.validation)}
    return {
        "name": dataset.name,
        "num_train": len(dataset.train),
        **held_out,
        "num_test": len(dataset.test),
        "num_classes": dataset.num_classes,
        "input_shape": list(dataset.input_shape),
    }


def _describe_local(local: Local) -> dict[str, object]:
    # The data's location concerns only its worker.
    names = ("name", "num_classes", "classes", "input_shape", "held_out", "may_share")
    scaling = {name: getattr(local, name) for name in ("mean", "std")}
    return {
        "type": "Local",
        **{name: describe(getattr(local, name)) for name in names},
        **{name: None if each is None else each.tolist() for name, each in scaling.items()},
    }


def versions() -> dict[str, str]:
    """Versions of the packages that affect numbers."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **found}


def flatten(described: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Map the path of each plain value of a description to the value.

    >>> flatten({"task": {"type": "Task", "sizes": [1, {"lr": 0.1}]}, "seed": 0})
    {'task': 'Task', 'task.sizes.0': 1, 'task.sizes.1.lr': 0.1, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in described.items():
        name = prefix if key == "type" and prefix else f"{prefix}.{key}".lstrip(".")
        if isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        flat |= flatten(value, name) if isinstance(value, Mapping) else {name: value}
    return flat


def header(experiment: Experiment, recipe: str | None) -> dict[str, object]:
    """Contents of `experiment.json`, also contained in the first line of `events.jsonl`.

    Dataclasses appear as their fields and a `type`; functions by name, and `functools.partial`
    with its keywords; topologies as the call that makes them (`"ring(8)"`). A run cannot be
    rebuilt from this file: it is for people, for the report, and for recognizing the experiment
    on `--resume`.

    Fields:
        schema: Version of this layout: 1.
        recipe: Name of the recipe as typed; null for a run from Python.
        name: Name of the run, e.g. `"epoch-gossip"`.
        seed: Seed of the run.
        num_workers: Number of workers.
        num_train: Training samples; absent for `Local` data, whose sizes are in `events.jsonl`.
        algorithm: Settings of the algorithm.
        platforms: Platform of each rank.
        task: Data set (`name`, `num_train`, `num_validation` if it has such a split,
            `num_test`, `num_classes`, `input_shape`), model, loss, optimizer and so on.
            `metrics` (each with `name`, `unit` and `higher_is_better`), `target_metric`,
            `forward` and `step` are absent if they have their defaults.
        links, faults: As in `Experiment`.
        max_seconds: Time limit, or null.
        until: Target loss or metric that ends the run, and the number of evaluations whose mean
            must reach it; or null.
        evaluation_interval: Seconds between two evaluations, or null.
        evaluation_epochs: Epochs of all workers together between two evaluations, or null. If
            both are null, the interval is the default.
        driver: `"network"` for a run on real machines; absent for a simulated one.
        versions: Versions of `python`, `edgegossip`, `torch`, `numpy`, `scikit-learn` and
            `safetensors`.
        commit: Git commit of edgegossip's source, with `-dirty` if Python code differs from it;
            null if unknown, as for an installed package.
    """
    # The sizes of the workers' local data are not known here.
    dataset = experiment.task.dataset
    known = {} if isinstance(dataset, Local) else {"num_train": len(dataset.train)}
    return {
        "schema": 1,
        "recipe": recipe,
        "name": experiment.run_name,
        "seed": experiment.seed,
        "num_workers": experiment.num_workers,
        **known,
        "algorithm": describe(experiment.algorithm),
        "platforms": describe(experiment.platforms),
        "task": describe(experiment.task),
        "links": describe(experiment.links),
        "faults": describe(experiment.faults),
        "max_seconds": experiment.max_seconds,
        "until": describe(experiment.until),
        "evaluation_interval": experiment.evaluation_interval,
        "evaluation_epochs": experiment.evaluation_epochs,
        "versions": versions(),
        "commit": source_commit(),
    }
