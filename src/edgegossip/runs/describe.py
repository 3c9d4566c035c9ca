"""Descriptions of an experiment: every resolved setting as JSON, and its roles in words."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import itertools
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgegossip.contract.protocol import WORKER, Rank
from edgegossip.contract.topology import Topology
from edgegossip.data.dataset import Dataset
from edgegossip.data.local import Local
from edgegossip.machine.energy import OMIT_DEFAULT
from edgegossip.runs.events import SCHEMA
from edgegossip.runs.experiment import Experiment
from edgegossip.training.task import Task

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
        fields = {
            f.name: describe(getattr(value, f.name))
            for f in dataclasses.fields(value)
            # Experiments without settings of energy keep the descriptions that they always had,
            # so that their folders can be resumed.
            if f.metadata != OMIT_DEFAULT or getattr(value, f.name) != f.default
        }
        return {"type": type(value).__name__, **fields}
    return getattr(value, "__qualname__", type(value).__qualname__)


def _describe_task(task: Task) -> dict[str, object]:
    # Most tasks have the defaults of these; the header of a plain task stays short.
    fields = {f.name: f for f in dataclasses.fields(task)}
    for name in ("metrics", "target_metric", "forward", "step"):
        if getattr(task, name) == fields[name].default:
            del fields[name]
    return {"type": "Task", **{name: describe(getattr(task, name)) for name in fields}}


def _describe_dataset(dataset: Dataset) -> dict[str, object]:
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
    """Versions of the packages that affect numbers, without those that are not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        # A light install leaves out scikit-learn.
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


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
        platforms: Platform of each rank. `seconds_per_training`, `seconds_per_byte`,
            `seconds_per_message`, `idle_watts` and `busy_watts` are absent if they have their
            defaults, like `joules_per_byte` in `links`.
        task: Data set (`name`, `num_train`, `num_validation` if it has such a split,
            `num_test`, `num_classes`, `input_shape`), model, loss, optimizer and so on.
            `metrics` (each with `name`, `unit` and `higher_is_better`), `target_metric`,
            `forward` and `step` are absent if they have their defaults.
        links, faults: As in `Experiment`.
        max_seconds: Time limit, or null.
        until: Target loss or metric that ends the run, and the number of evaluations whose mean
            must reach it; or null.
        keep: How the best model is chosen (`metric`, or null for the chosen one), and when the
            run ends early (`patience`), with the `rounds` of real machines; absent without
            `keep`.
        final_average: `true` if the workers end with the mean of all models; else absent.
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
    kept = {} if experiment.keep is None else {"keep": describe(experiment.keep)}
    final = {"final_average": True} if experiment.final_average else {}
    return {
        "schema": SCHEMA,
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
        **kept,
        **final,
        "evaluation_interval": experiment.evaluation_interval,
        "evaluation_epochs": experiment.evaluation_epochs,
        "versions": versions(),
        "commit": source_commit(),
    }


# The source code.


@functools.cache
def source_commit(file: Path = Path(__file__)) -> str | None:
    """Commit of the Git repository that tracks `file`, by default of this package.

    `-dirty` follows the commit's twelve digits if any Python file of the repository differs
    from it or is new.

    Returns:
        None if no repository tracks the file, as in an installed package, or if Git is missing
        or refuses to read the repository.
    """
    try:
        # A package may be installed below a repository that does not track it.
        _git(file.parent, "ls-files", "--error-unmatch", file.name)
        commit = _git(file.parent, "rev-parse", "--short=12", "HEAD")
        changes = _git(file.parent, "status", "--porcelain", "--", ":(top)*.py")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changes else commit


def _git(folder: Path, *arguments: str) -> str:
    # A Git hook names its own repository in the environment.
    inherited = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        encoding="utf-8",
        timeout=30,
        env={**inherited, "GIT_OPTIONAL_LOCKS": "0"},  # somebody may be committing
    )
    return done.stdout.strip()


# Roles.


def described_roles(experiment: Experiment, shards: Mapping[Rank, Sized]) -> dict[str, Any]:
    """Describe roles and shard sizes by rank, the ranks that count in the final model, and
    whether workers train on shares of their data. The sizes of `Local` data are known only now.
    """
    num_workers, role = experiment.num_workers, experiment.algorithm.role
    sizes = [len(shards.get(rank, ())) for rank in range(num_workers)]
    local = {"num_train": sum(sizes)} if isinstance(experiment.task.dataset, Local) else {}
    balanced = {"is_balanced": True} if experiment.algorithm.traits.is_balanced else {}
    return {
        "roles": experiment.roles,
        "evaluated": [rank for rank in range(num_workers) if role(rank).is_evaluated],
        "shard_sizes": sizes,
        **local,
        **balanced,
    }


def stage_number(role: str) -> int | None:
    """Return the stage of a role, from 0; None for other roles.

    >>> stage_number("stage-2"), stage_number("server")
    (2, None)
    """
    found = re.fullmatch(r"stage-(\d{1,9})", role)
    return int(found[1]) if found else None


def role_words(role: str) -> str:
    """Write a role in words.

    >>> role_words("stage-2"), role_words("server")
    ('stage 2', 'server')
    """
    number = stage_number(role)
    return role if number is None else f"stage {number}"


def rank_name(roles: Sequence[str], rank: Rank) -> str:
    """Name a rank by its role, without a number if the role is unique.

    >>> [rank_name(["server", "worker", "worker"], rank) for rank in range(3)]
    ['server', 'worker 1', 'worker 2']
    >>> rank_name(["worker"], 0)
    'worker 0'
    >>> [rank_name(["stage-0", "stage-0", "stage-1"], rank) for rank in range(3)]
    ['worker 0 of stage 0', 'worker 1 of stage 0', 'stage 1']
    """
    role, is_only = roles[rank], roles.count(roles[rank]) == 1
    if role == WORKER.name or not (is_only or stage_number(role) is not None):
        return f"{role} {rank}"
    return role_words(role) if is_only else f"worker {rank} of {role_words(role)}"


def with_article(roles: Sequence[str], rank: Rank) -> str:
    """Name a rank within a sentence.

    >>> [with_article(["server", "worker", "worker"], rank) for rank in range(2)]
    ['the server', 'worker 1']
    >>> with_article(["stage-0", "stage-1"], 1)
    'stage 1'
    """
    name = rank_name(roles, rank)
    return f"the {name}" if name == roles[rank] else name


def who_is_who(roles: Sequence[str]) -> str:
    """List the ranks of each role; empty if all are workers.

    >>> who_is_who(["server", "worker", "worker", "worker"])
    'server: rank 0, worker: ranks 1 to 3'
    >>> who_is_who(["stage-0", "stage-0", "stage-1"])
    'stage 0: ranks 0 to 1, stage 1: rank 2'
    >>> who_is_who(["worker", "worker"])
    ''
    """
    if set(roles) <= {WORKER.name}:
        return ""
    by_role: dict[str, list[Rank]] = {}
    for rank, role in enumerate(roles):
        by_role.setdefault(role, []).append(rank)
    return ", ".join(
        f"{role_words(role)}: rank{'s' if len(ranks) > 1 else ''} {rank_spans(ranks)}"
        for role, ranks in by_role.items()
    )


def rank_spans(ranks: Sequence[Rank]) -> str:
    """Write ranks, with ranges for consecutive ones.

    >>> rank_spans([0, 1, 2, 5])
    '0 to 2, 5'
    """
    stretches = [
        [rank for _, rank in group]
        for _, group in itertools.groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    words = [
        str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in stretches
    ]
    return ", ".join(words)
