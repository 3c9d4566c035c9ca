"""Compressed push-sum over links that lose messages, in the words of the contract."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Message,
    Payload,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    Steps,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.schema import MessageSpec, TensorSpec
from edgegossip.contract.topology import Topology


class Compressor(Protocol):
    def compress(self, tensor: Tensor) -> Payload: ...

    def decompress(self, payload: Payload) -> Tensor: ...

    def schema(self, params: Tensor) -> Mapping[str, TensorSpec]: ...


@dataclass(slots=True, kw_only=True)
class SparsePushState(WorkerState):
    """A numerator `params` and its `weight`.

    Attributes:
        error: Entries that compression has held back; only the sender remembers them, so the
            graph may change from round to round.
        weight: Push-sum weight.
        num_sent: Number of the next message.
        unacknowledged: Messages by receiver and number.
        merged: Sender and number of each message that arrived.
        lost: Workers that cannot be reached.
        is_waiting: It has rejoined and waits for a model.
    """

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
    """Compressed push-sum over lossy links (Aketi, Singh and Rabaey, arXiv:2102.05715).

    The sums of numerators and weights, over workers and messages in flight, never change. A
    timer sends again what was not acknowledged; mass is taken back only from a lost receiver.
    """

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

    def handle(self, state: SparsePushState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started(has_rejoined=True):
                # The initial parameters are out of date, so they weigh nothing.
                state.params, state.weight = torch.zeros_like(state.params), 0.0
                state.is_waiting = True
            case Started():
                return self.train_or_finish(state)
            case Trained():
                # The weight may have changed meanwhile; so x / w moves by exactly delta.
                state.params = state.params + state.weight * event.delta
                return [*self.push(state, now), *self.train_or_finish(state)]
            case Received(sender, Message("mass") as message):
                return self.accept(state, sender, message)
            case Received(sender, Message("acknowledged", number)):
                state.unacknowledged.pop((sender, number), None)
                return self.finish_if_done(state)
            case TimerFired("resend") if state.unacknowledged:
                again = [Send(j, message) for (j, _), message in state.unacknowledged.items()]
                return [*again, SetTimer("resend", now + self.timeout)]
            case WorkerLost(rank):
                state.lost[rank] = None
                for key in [key for key in state.unacknowledged if key[0] == rank]:
                    self.merge(state, state.unacknowledged.pop(key))
                return self.finish_if_done(state)
            case WorkerJoined(rank, has_restarted):
                state.lost.pop(rank, None)
                if has_restarted:
                    return self.welcome(state, rank, now)
        return []

    def train_or_finish(self, state: SparsePushState) -> list[Effect]:
        if state.round < self.num_rounds:
            return [Train(state.estimate, Steps(1))]
        return self.finish_if_done(state)

    def finish_if_done(self, state: SparsePushState) -> list[Effect]:
        is_done = state.round == self.num_rounds and not state.unacknowledged
        return [Finish()] if is_done else []

    def push(self, state: SparsePushState, now: Seconds) -> list[Effect]:
        neighbors = self.topology.out_neighbors(state.rank, state.round)
        receivers = [j for j in neighbors if j not in state.lost]
        share = self.consensus_step / (len(receivers) + 1)
        packed = self.compressor.compress(state.params + state.error)
        state.error = state.params + state.error - self.compressor.decompress(packed)
        state.round += 1
        return self.give(state, receivers, share, packed, now)

    def welcome(self, state: SparsePushState, rank: Rank, now: Seconds) -> list[Effect]:
        state.merged = {key: None for key in state.merged if key[0] != rank}  # it counts anew
        if state.is_waiting or rank not in self.topology.all_out_neighbors(state.rank):
            return []
        model, round = {"params": state.params}, {"round": state.round}
        return self.give(state, [rank], 0.5, model, now, **round)

    def give(
        self,
        state: SparsePushState,
        receivers: list[Rank],
        share: float,
        x: Payload,
        now: Seconds,
        **more: float,
    ) -> list[Effect]:
        mass = {"share": share, "weight": share * state.weight, **more}
        message = Message("mass", state.num_sent, x, mass)
        effects: list[Effect] = [Send(j, message) for j in receivers]
        if not state.unacknowledged:
            effects.append(SetTimer("resend", now + self.timeout))
        for j in receivers:
            state.unacknowledged[j, state.num_sent] = message
            self.merge(state, message, sign=-1)
        state.num_sent += 1
        return effects

    def accept(self, state: SparsePushState, sender: Rank, message: Message) -> list[Effect]:
        effects: list[Effect] = [Send(sender, Message("acknowledged", message.round))]
        if (sender, message.round) in state.merged:
            return effects
        state.merged[sender, message.round] = None
        self.merge(state, message)
        if state.is_waiting and "round" in message.numbers:
            state.is_waiting, state.round = False, int(message.numbers["round"])
            effects += self.train_or_finish(state)
        return effects

    def merge(self, state: SparsePushState, mass: Message, sign: int = 1) -> None:
        is_model = "params" in mass.payload
        x = mass.payload["params"] if is_model else self.compressor.decompress(mass.payload)
        state.params = state.params + sign * mass.numbers["share"] * x
        state.weight += sign * mass.numbers["weight"]
