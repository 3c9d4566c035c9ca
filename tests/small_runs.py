"""Runs of milliseconds that have everything in them: dropout, batch norm, Adam, faults."""

from __future__ import annotations

import itertools
import json
import re
import resource
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from edgegossip.algorithms.gossip.adpsgd import ADPSGD
from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.choco_gossip import ChocoGossip
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.divshare import DivShare
from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.gossip.epidemic_learning import EpidemicLearning
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gasloc import GASLoC
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.gossip.noloco import NoLoCo
from edgegossip.algorithms.gossip.quasi_global_gossip import QuasiGlobalGossip
from edgegossip.algorithms.gossip.sparseloco import SparseLoCo
from edgegossip.algorithms.gossip.streaming_diloco import StreamingDiLoCo
from edgegossip.algorithms.gossip.swift import SWIFT
from edgegossip.algorithms.push_sum.difference_push import DifferencePush
from edgegossip.algorithms.push_sum.skew_compensated_sparse_push import (
    SkewCompensatedSparsePush,
)
from edgegossip.algorithms.server.async_local_sgd import AsyncLocalSGD
from edgegossip.algorithms.server.halos import HALoS
from edgegossip.compression.sparse import TopK
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.randomness import generator
from edgegossip.contract.topology import (
    complete,
    directed_ring,
    one_peer_exponential,
    random_matching,
    random_receivers,
    ring,
)
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.pictures import flip_and_crop
from edgegossip.recipes.edge_squeeze import edge_squeeze
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.tracking import Status
from edgegossip.sim.fault import Crash, Delay, Drop, Faults, Partition, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.training.task import Task

NUM_WORKERS = 4
_COMMITTING: dict[str, Any] = {"num_rounds": 6, "local_steps": 2, "resend_after": 0.1}
SHAPE = (1, 6, 6)

ALGORITHMS: dict[str, Algorithm[Any]] = {
    "all-reduce": AllReduce(topology=complete(NUM_WORKERS), num_rounds=6, timeout=0.5),
    "epoch-gossip": EpochGossip(topology=complete(NUM_WORKERS), num_rounds=3, timeout=0.5),
    "gosgd": GoSGD(topology=complete(NUM_WORKERS), num_rounds=8, exchange_probability=0.5),
    "gossip": Gossip(topology=ring(NUM_WORKERS), num_rounds=6, timeout=0.5),
    "adpsgd": ADPSGD(topology=ring(NUM_WORKERS), num_rounds=8, resend_after=0.3),
    "swift": SWIFT(topology=ring(NUM_WORKERS), num_rounds=8, timeout=0.3),
    "div-share": DivShare(topology=complete(NUM_WORKERS), num_rounds=8, timeout=0.3),
    "choco-gossip": ChocoGossip(
        topology=ring(NUM_WORKERS), num_rounds=6, compressor=TopK(keep_ratio=0.1), timeout=0.5
    ),
    "difference-push": DifferencePush(
        topology=directed_ring(NUM_WORKERS),
        num_rounds=6,
        compressor=TopK(keep_ratio=0.1),
        resend_after=0.1,
    ),
    "diloco": DiLoCo(
        topology=directed_ring(NUM_WORKERS),
        num_rounds=3,
        compressor=TopK(keep_ratio=0.1),
        timeout=0.5,
    ),
    "double-squeeze": DoubleSqueeze(
        topology=complete(NUM_WORKERS),
        num_rounds=6,
        compressor=TopK(keep_ratio=0.1),
        timeout=0.5,
    ),
    "edge-squeeze": edge_squeeze(NUM_WORKERS, 6, local_steps=4, timeout=0.5),
    "gasloc": GASLoC(topology=ring(NUM_WORKERS), num_rounds=6, timeout=0.5),
    "noloco": NoLoCo(
        topology=random_matching(NUM_WORKERS, period=6, seed=0), num_rounds=6, timeout=0.5
    ),
    "epidemic-learning": EpidemicLearning(
        topology=random_receivers(NUM_WORKERS, num_receivers=1, period=6, seed=0),
        num_rounds=6,
        timeout=0.5,
    ),
    "sparseloco": SparseLoCo(topology=complete(NUM_WORKERS), num_rounds=6, timeout=0.5),
    "streaming-diloco": StreamingDiLoCo(
        topology=complete(NUM_WORKERS), num_rounds=6, num_fragments=2, timeout=0.5
    ),
    "quasi-global-gossip": QuasiGlobalGossip(
        topology=ring(NUM_WORKERS), num_rounds=6, timeout=0.5
    ),
    "skew-compensated-sparse-push": SkewCompensatedSparsePush(
        topology=one_peer_exponential(NUM_WORKERS),
        num_rounds=6,
        compressor=TopK(keep_ratio=0.1),
        compensation_rounds=2,
        resend_after=0.1,
    ),
    "async-local-sgd": AsyncLocalSGD(num_workers=NUM_WORKERS - 1, **_COMMITTING),
    "halos": HALoS(regions=(0, 0), commits_per_sum=2, **_COMMITTING),
}
"""Servers only once with one and once with two levels: the others differ in how they merge."""

FAULTS = Faults(
    script=(
        Crash(at=0.061, rank=1),
        Recover(at=0.173, rank=1),
        Partition(start=0.2, end=0.3, group=(0, 2)),
        Drop(probability=0.2),
        Delay(seconds=0.02),
    ),
    detection_time=0.03,
)


def pictures(num_samples: int, seed: int) -> ArraySplit:
    """Noise whose mean brightness says the class: learnable at once."""
    random = generator(seed, "pictures")
    y = torch.randint(3, (num_samples,), generator=random)
    noise = torch.randint(60, (num_samples, *SHAPE), generator=random)
    x = noise + 70 * y.view(-1, 1, 1, 1)
    return ArraySplit(x.to(torch.uint8), y)


def dataset() -> Dataset:
    return Dataset(
        "noise",
        pictures(64, seed=0),
        pictures(24, seed=1),
        num_classes=3,
        input_shape=SHAPE,
        mean=torch.tensor([0.4]),
        std=torch.tensor([0.25]),
    )


def small_model() -> nn.Module:
    """A convolution, batch norm and dropout: all that has a state or draws at random."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(16, 3),
    )


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """A user's own optimizer, with groups by kind of parameter."""
    params = list(params)
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in params if p.ndim <= 1], "lr": 0.02},
    ]
    return torch.optim.Adam(groups, lr=0.01)


def small_task(**changes: Any) -> Task:  # noqa: ANN401
    settings: dict[str, Any] = {
        "dataset": dataset(),
        "model": small_model,
        "optimizer": adam,
        "batch_size": 8,
        "augmentation": partial(flip_and_crop, padding=1),
    }
    return Task(**settings | changes)


def small_run(algorithm: str = "gossip", **changes: Any) -> Experiment:  # noqa: ANN401
    """An experiment of a few hundred events at most."""
    settings: dict[str, Any] = {
        "task": small_task(),
        "algorithm": ALGORITHMS[algorithm],
        "platforms": tuple(Platform(throughput=v) for v in (400.0, 320.0, 130.0, 100.0)),
        "links": Links(default=Link(latency=0.01, bandwidth=1e6)),
        "seed": 3,
        "evaluation_interval": 0.1,
    }
    return Experiment(**settings | changes)


def with_rounds(experiment: Experiment, num_rounds: int) -> Experiment:
    algorithm: Any = experiment.algorithm
    return replace(experiment, algorithm=replace(algorithm, num_rounds=num_rounds))


def quick(name: str = "gosgd", **changes: Any) -> Experiment:  # noqa: ANN401
    """A run of a tenth of a second or less."""
    return with_rounds(small_run(name, **changes), 3)


def repeatable_events(folder: Path) -> bytes:
    """The events without their fields of wall-clock origin, byte for byte."""
    text = (folder / "events.jsonl").read_text()
    return re.sub(r',"wall_\w+":("[^"]*"|[^,}]*)', "", text).encode()


def parameters(folder: Path) -> bytes:
    return (folder / "params.safetensors").read_bytes()


def events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["type"])]


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


@contextmanager
def ctrl_c_at(num_events: int, algorithm: object, times: int = 1) -> Iterator[None]:
    """Send this process a real SIGINT while the algorithm handles its n-th event."""
    kind: Any = type(algorithm)
    handle, count = kind.handle, itertools.count(1)

    def interrupted(self: object, *arguments: object) -> object:
        if next(count) == num_events:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return handle(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "handle", interrupted)
        yield


@contextmanager
def small_disk(max_bytes: int) -> Iterator[None]:
    """Let no file grow beyond `max_bytes`: what a full disk does, without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Recorder:
    """A live view that only remembers."""

    def __init__(self) -> None:
        self.statuses: list[Status] = []

    def update(self, status: Status) -> None:
        self.statuses.append(status)


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "params.safetensors")
