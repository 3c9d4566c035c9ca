"""A wrapper around any epoch-wise algorithm, in the words of the contract."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic

from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Effect,
    Epochs,
    Event,
    Message,
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
    TimerFired,
    Train,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.schema import MessageSpec


@dataclass(slots=True, kw_only=True)
class BalancedState(WorkerState, Generic[State]):
    """A wrapped state.

    Attributes:
        inner: State of the wrapped algorithm.
        num_samples: Samples of this worker.
        waiting: The training that waits for forecasts.
        forecasts: Round and duration of a pass, by rank.
        lost: Workers that cannot be reached.
    """

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
    """Shares of work by predicted speed (Han et al., IEEE TPDS 32(7), 2021), around `inner`.

    Each worker tells the others how long its whole data would take, and trains on the share
    `T_min / T_i`. The wrapped algorithm asks for `Epochs(1)` and does not notice. A lost
    forecast costs up to `timeout`, after which the last one is used.
    """

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

    def handle(self, state: BalancedState[State], event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                state.num_samples = event.num_samples
            case Predicted(throughput):
                return self.announce(state, state.num_samples / throughput, now)
            case Received(sender, Message("forecast", round, numbers=numbers)):
                state.forecasts[sender] = (round, numbers["seconds"])
                return self.train_if_complete(state)
            case TimerFired("forecast"):
                return self.train(state)
            case WorkerLost(rank):
                state.lost[rank] = None
                return [*self.pass_on(state, event, now), *self.train_if_complete(state)]
            case WorkerJoined(rank):
                state.lost.pop(rank, None)
        return self.pass_on(state, event, now)

    def pass_on(self, state: BalancedState[State], event: Event, now: Seconds) -> list[Effect]:
        effects = self.inner.handle(state.inner, event, now)
        state.params, state.round = state.inner.params, state.inner.round
        for i, effect in enumerate(effects):
            match effect:
                case Train(work=Epochs(1.0)):
                    state.waiting, effects[i] = effect, Predict()
        return effects

    def announce(
        self, state: BalancedState[State], seconds: Seconds, now: Seconds
    ) -> list[Effect]:
        state.forecasts[state.rank] = (state.round, seconds)
        message = Message("forecast", state.round, numbers={"seconds": seconds})
        others = [j for j in range(self.num_workers) if j != state.rank]
        timer = SetTimer("forecast", now + self.timeout)
        return [*(Send(j, message) for j in others), timer, *self.train_if_complete(state)]

    def train_if_complete(self, state: BalancedState[State]) -> list[Effect]:
        for j in range(self.num_workers):
            if j not in state.lost and state.forecasts.get(j, (-1, 0.0))[0] < state.round:
                return []
        return self.train(state)

    def train(self, state: BalancedState[State]) -> list[Effect]:
        if state.waiting is None or state.rank not in state.forecasts:
            return []
        times = {
            j: seconds for j, (_, seconds) in state.forecasts.items() if j not in state.lost
        }
        keep_ratio = min(times.values()) / times[state.rank]
        train, state.waiting = replace(state.waiting, keep_ratio=keep_ratio), None
        return [SetTimer("forecast", math.inf), train]
