"""A balanced worker, driven by hand: events in, effects out."""

from __future__ import annotations

import math
from typing import Any

import torch
from tests.trained import trained_event

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.wrappers.edge_gossip.forecasts import PlatformForecast
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Predicted,
    Received,
    Send,
    SetTimer,
    Started,
    Train,
)
from edgegossip.contract.topology import complete

INNER = EpochGossip(topology=complete(3), num_rounds=2)
BY_STEPS = Gossip(topology=complete(3), num_rounds=9, local_steps=10)
PUSHING = GoSGD(topology=complete(3), num_rounds=9, exchange_probability=1.0)
CANCEL = SetTimer("forecast", math.inf)


class Worker:
    """One worker of an algorithm; `cost` is what a pass over its data costs."""

    def __init__(self, algorithm: Algorithm[Any], rank: int = 0, cost: float = 100.0) -> None:
        self.algorithm = algorithm
        self.cost = cost
        self.state = algorithm.init(rank, torch.zeros(2))

    def on(self, event: Event, now: float = 0.0) -> list[Effect]:
        return self.algorithm.handle(self.state, event, now)

    def starts(self, now: float = 0.0) -> list[Effect]:
        return self.on(Started(False, int(self.cost), self.cost), now)

    def expects(self, throughput: float, now: float = 0.0) -> list[Effect]:
        return self.on(Predicted(throughput), now)

    def hears(
        self,
        sender: int,
        throughput: float,
        round: int = 0,
        cost: float = 100.0,
        now: float = 0,
    ) -> list[Effect]:
        message = PlatformForecast(round, throughput, cost).message()
        return self.on(Received(sender, message), now)

    def trains(
        self, train: Train, cost: float, now: float = 0.0, slow_down: float = 1.0, **more: int
    ) -> list[Effect]:
        """Train, for as long as was forecast, times `slow_down`."""
        seconds = slow_down * cost / self.state.throughput
        what = {"num_samples": int(cost), "cost": cost, "seconds": seconds, **more}
        trained = trained_event(train.params + 1, train.params, **what)
        return self.on(trained, now)

    def begins(self, own: float, *others: float) -> list[Effect]:
        """Start with these forecasts, and give what it does in the end."""
        self.starts()
        effects = self.expects(own)
        for sender, throughput in enumerate(others, start=1):
            effects = self.hears(sender, throughput)
        return effects


def sends(effects: list[Effect]) -> list[tuple[int, str]]:
    return [(e.receiver, e.message.kind) for e in effects if isinstance(e, Send)]
