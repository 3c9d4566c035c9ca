"""A worker of a round-based algorithm, driven by hand: events in, effects out."""

from __future__ import annotations

import torch
from tests.trained import trained_event
from torch import Tensor

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.protocol import Effect, Event, Message, Received, Send, Trained
from edgegossip.contract.rounds import RoundState
from edgegossip.contract.topology import ring

RING = Gossip(topology=ring(4), num_rounds=3)  # worker 0 hears from 1 and 3
PATIENT = Gossip(topology=ring(4), num_rounds=3, timeout=10.0)


class Worker:
    """Worker 0 of an algorithm, and what it has answered last."""

    def __init__(self, algorithm: Gossip, start: float = 0.0) -> None:
        self.algorithm = algorithm
        self.state: RoundState = algorithm.init(0, torch.full((2,), start))

    def on(self, event: Event, now: float = 0.0) -> list[Effect]:
        return self.algorithm.handle(self.state, event, now)

    def trains_to(self, value: float, now: float = 0.0) -> list[Effect]:
        return self.on(trained(value, self.state.params), now)

    def hears(self, sender: int, round: int, value: float, now: float = 0.0) -> list[Effect]:
        return self.on(heard(sender, round, value), now)

    @property
    def value(self) -> float:
        return float(self.state.params[0])


def trained(value: float, before: Tensor) -> Trained:
    after = torch.full_like(before, value)
    return trained_event(after, before)


def heard(sender: int, round: int, value: float, kind: str = "params") -> Received:
    return Received(sender, Message(kind, round, {"params": torch.full((2,), value)}))


def sends(effects: list[Effect]) -> list[tuple[int, str, int]]:
    """(receiver, kind, round) of each message."""
    return [
        (effect.receiver, effect.message.kind, effect.message.round)
        for effect in effects
        if isinstance(effect, Send)
    ]
