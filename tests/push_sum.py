"""One push-sum worker, to be driven by hand."""

from __future__ import annotations

from typing import Any

import torch
from tests.trained import trained_event

from edgegossip.algorithms.push_sum.push_sum import PushSum
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.contract.protocol import Effect, Event, Message, Received, Send
from edgegossip.contract.topology import directed_ring

# Worker 1 hears from 0 and sends to 2.
TRUSTING = StochasticGradientPush(topology=directed_ring(3), num_rounds=3)
CAREFUL = StochasticGradientPush(topology=directed_ring(3), num_rounds=3, resend_after=2.0)


class Worker:
    """Worker 1 of SGP, with two parameters."""

    def __init__(self, algorithm: PushSum[Any] = TRUSTING) -> None:
        self.algorithm = algorithm
        self.state: Any = algorithm.init(1, torch.zeros(2))

    def on(self, event: Event, now: float = 0.0) -> list[Effect]:
        return self.algorithm.handle(self.state, event, now)

    def trains_to(self, value: float, now: float = 0.0) -> list[Effect]:
        before = self.state.estimate
        after = torch.full_like(before, value)
        return self.on(
            trained_event(after, before),
            now,
        )

    def hears(self, round: int, value: float, weight: float = 1.0, **more: Any) -> list[Effect]:  # noqa: ANN401
        return self.on(pushed(round, value, weight, **more))

    @property
    def value(self) -> float:
        """The estimate of the first parameter."""
        return float(self.state.estimate[0])


def pushed(
    round: int,
    value: float,
    weight: float = 1.0,
    *,
    sender: int = 0,
    session: float = 0.0,
    kind: str = "push",
) -> Received:
    """A push of a worker whose *numerator* is `value`, or a catch-up with an estimate."""
    payload = {"params": torch.full((2,), value)}
    numbers = {"weight": weight, "session": session}
    return Received(sender, Message(kind, round, payload, numbers))


def acknowledged(next_round: int, session: float = 0.0, sender: int = 2) -> Received:
    message = Message("acknowledged", next_round, numbers={"session": session})
    return Received(sender, message)


def sends(effects: list[Effect], kind: str | None = None) -> list[tuple[int, str, int]]:
    return [
        (effect.receiver, effect.message.kind, effect.message.round)
        for effect in effects
        if isinstance(effect, Send) and kind in (None, effect.message.kind)
    ]
