"""Omissions of `docs/contract-design.md`: imports, states, fields, `init`, `role`, `schema`.

`test_contract_page.py` puts the page's blocks of code, in their order, where this file says
so. It is a module of its own so that formatter, lint and types look at it too.
"""
# ruff: noqa: F401 - the page uses what this file does not.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol

import torch
from torch import Tensor

from edgegossip.core.algorithm import Algorithm
from edgegossip.core.protocol import (
    WORKER,
    Effect,
    Epochs,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Message,
    Payload,
    Predict,
    Predicted,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    SetTimer,
    Started,
    State,
    Steps,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.core.schema import MessageSpec, TensorSpec
from edgegossip.core.topology import Topology

SERVER: Rank = 0


class Compressor(Protocol):
    def compress(self, tensor: Tensor) -> Payload: ...

    def decompress(self, payload: Payload) -> Tensor: ...

    def schema(self, params: Tensor) -> Mapping[str, TensorSpec]: ...


# 1. A server, and workers that commit at a searched rate.


@dataclass(slots=True, kw_only=True)
class CommitterState(WorkerState):
    base: Tensor
    interval: Seconds
    is_due: bool = False


@dataclass(slots=True, kw_only=True)
class ServerState(WorkerState):
    num_commits: dict[Rank, int]
    target: int = 0
    rate: int = 1
    loss: float = math.inf
    best_gain: float = -math.inf
    is_searching: bool = True


@dataclass(frozen=True, kw_only=True)
class ADSP(Algorithm[CommitterState | ServerState]):
    num_workers: int
    window: Seconds
    epoch: Seconds
    duration: Seconds
    min_interval: Seconds

    def role(self, rank: Rank) -> Role:
        if rank == SERVER:
            return Role("server", has_data=False)
        return Role("worker", is_evaluated=False)

    def init(self, rank: Rank, params: Tensor) -> CommitterState | ServerState:
        if rank == SERVER:
            num_commits = dict.fromkeys(range(1, self.num_workers + 1), 0)
            return ServerState(rank=rank, params=params, num_commits=num_commits)
        return CommitterState(rank=rank, params=params, base=params, interval=self.window)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        whole = TensorSpec.like(params)
        return {
            "commit": MessageSpec({"update": whole}),
            "params": MessageSpec({"params": whole}),
            "target": MessageSpec(numbers={"num_commits": range(1, 2**31)}),
        }

    # The page's next block.
    # The page's next block.


# 2. Compressed push-sum over links that lose messages.


@dataclass(slots=True, kw_only=True)
class SparsePushState(WorkerState):
    error: Tensor
    weight: float = 1.0
    num_sent: int = 0
    unacknowledged: dict[tuple[Rank, int], Message] = field(default_factory=dict)
    merged: dict[tuple[Rank, int], None] = field(default_factory=dict)
    lost: dict[Rank, None] = field(default_factory=dict)
    is_waiting: bool = False

    @property
    def estimate(self) -> Tensor:
        return self.params if self.is_waiting else self.params / self.weight


@dataclass(frozen=True, kw_only=True)
class SparsePush(Algorithm[SparsePushState]):
    topology: Topology
    compressor: Compressor
    consensus_step: float
    num_rounds: int
    timeout: Seconds

    def init(self, rank: Rank, params: Tensor) -> SparsePushState:
        return SparsePushState(rank=rank, params=params, error=torch.zeros_like(params))

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        optional = {**self.compressor.schema(params), "params": TensorSpec.like(params)}
        return {
            "mass": MessageSpec(
                optional=optional,
                numbers={"share": (0, 1), "weight": (0, math.inf)},
                optional_numbers={"round": range(self.num_rounds + 1)},
            ),
            "acknowledged": MessageSpec(),
        }

    # The page's next block.


# 3. A wrapper around any epoch-wise algorithm.


@dataclass(slots=True, kw_only=True)
class BalancedState(WorkerState, Generic[State]):
    inner: State
    num_samples: int = 0
    waiting: Train | None = None
    forecasts: dict[Rank, tuple[int, Seconds]] = field(default_factory=dict)
    lost: dict[Rank, None] = field(default_factory=dict)

    @property
    def estimate(self) -> Tensor:
        return self.inner.estimate


@dataclass(frozen=True, kw_only=True)
class EdgeGossip(Algorithm[BalancedState[State]], Generic[State]):
    inner: Algorithm[State]
    num_workers: int
    timeout: Seconds

    def role(self, rank: Rank) -> Role:
        return self.inner.role(rank)

    def init(self, rank: Rank, params: Tensor) -> BalancedState[State]:
        return BalancedState(rank=rank, params=params, inner=self.inner.init(rank, params))

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        forecast = MessageSpec(numbers={"seconds": (0, math.inf)})
        return {**self.inner.schema(params), "forecast": forecast}

    # The page's next block.


# 4. Three stages of one model.


@dataclass(slots=True, kw_only=True)
class StageState(WorkerState):
    jobs: list[Message] = field(default_factory=list)
    job: Message | None = None
    unanswered: dict[int, Payload] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stages(Algorithm[StageState]):
    num_stages: int
    num_rounds: int
    depth: int
    timeout: Seconds

    def role(self, rank: Rank) -> Role:
        return Role(f"stage-{rank}", has_data=rank == 0)

    def init(self, rank: Rank, params: Tensor) -> StageState:
        return StageState(rank=rank, params=params)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        # A stage knows neither the widths of the others nor the size of a batch.
        batch = TensorSpec(torch.float32, (None, None), max_numel=2**20)
        return {
            "activations": MessageSpec({"activations": batch, "labels": batch}),
            "gradient": MessageSpec({"gradient": batch}),
        }

    # The page's next block.
