"""Spread of forecasts: workers learn how long the fastest of them needs for its data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from edgegossip.algorithms.riding import with_numbers, without_numbers
from edgegossip.core.protocol import Message, Rank, Received, Seconds, Send
from edgegossip.core.schema import Limits, MessageSpec, TensorSpec

_SECONDS, _AGE = "fastest_seconds", "fastest_age"
"""Names of the numbers that ride on the inner algorithm's messages."""
_OLDEST = 2**31
_INHERITED = "inherited"


@dataclass(slots=True)
class PlatformForecast:
    """Forecast of a platform for its next epoch.

    Attributes:
        round: Its round at the time of the forecast.
        throughput: Training samples' worth per second.
        epoch_cost: Cost of a pass over all its data, in training samples' worth.
        inherited: Workers whose data it has taken over, in order.
    """

    round: int
    throughput: float
    epoch_cost: float
    inherited: tuple[Rank, ...] = ()

    def message(self) -> Message:
        """Make a message of it: both numbers, and the workers whose data it has taken over."""
        inherited = {_INHERITED: torch.tensor(self.inherited)} if self.inherited else {}
        numbers = {"throughput": self.throughput, "epoch_cost": self.epoch_cost}
        return Message("forecast", self.round, inherited, numbers)

    @staticmethod
    def from_message(message: Message) -> PlatformForecast:
        """Read the forecast in `message`."""
        ranks = message.payload.get(_INHERITED, torch.empty(0)).tolist()
        return PlatformForecast(message.round, **message.numbers, inherited=tuple(ranks))


@dataclass(slots=True)
class Fastest:
    r"""Push-min of :math:`T_i`, with an age so that stale values die out.

    A worker that knows of nobody faster is itself the fastest, at age 0. With each of its own
    epochs, the value that it has heard ages by one; above `max_age` it is forgotten. So if the
    fastest slows down or is lost, everybody knows after that many epochs. On a complete graph,
    :math:`O(\log E)` random pushes spread a minimum to all.

    Attributes:
        seconds: :math:`T_j` of the fastest that was heard of; infinite for none.
        age: Epochs since it said so, along the way by which it came.
    """

    seconds: Seconds = math.inf
    age: int = 0

    def grow_older(self, max_age: int) -> None:
        """An epoch has passed."""
        self.age += 1
        if self.age > max_age:
            self.seconds, self.age = math.inf, 0

    def hear(self, message: Message, max_age: int) -> None:
        """Take over the value in a message, if it is faster, or as fast and fresher."""
        heard = (message.numbers.get(_SECONDS, math.inf), int(message.numbers.get(_AGE, 0)))
        if heard[1] <= max_age and heard < (self.seconds, self.age):
            self.seconds, self.age = heard

    def ride_on(self, send: Send, own_seconds: Seconds) -> Send:
        """Let `send` tell the fastest known, the sender included, if any is known."""
        known = (self.seconds, self.age) if self.seconds < own_seconds else (own_seconds, 0)
        if known[0] == math.inf:
            return send
        return with_numbers(send, {_SECONDS: known[0], _AGE: known[1]})


def detach(event: Received) -> Received:
    """Give the message as the inner algorithm sent it."""
    return without_numbers(event, (_SECONDS, _AGE))


def forecast_schema(max_ahead: int | None, num_workers: int) -> dict[str, MessageSpec]:
    """Describe the messages that travel beside the inner algorithm's (`spread = "exact"`)."""
    ranks = TensorSpec(torch.int64, (None,), num_workers, minimum=0, maximum=num_workers - 1)
    positive = (0, math.inf)
    forecast = MessageSpec(
        optional={_INHERITED: ranks},
        numbers={"throughput": positive, "epoch_cost": positive},
        max_ahead=max_ahead,
    )
    return {"forecast": forecast, "spare-joined": MessageSpec(max_ahead=0)}


def with_forecast(schema: Mapping[str, MessageSpec]) -> dict[str, MessageSpec]:
    """Let the inner algorithm's messages tell the fastest as well (`spread = "gossip"`)."""
    more: dict[str, Limits] = {_SECONDS: (0, math.inf), _AGE: range(_OLDEST)}
    return {
        kind: replace(spec, optional_numbers={**spec.optional_numbers, **more})
        for kind, spec in schema.items()
    }


def known_of(
    forecasts: Mapping[Rank, PlatformForecast],
    lost: Mapping[Rank, None],
    num_workers: int,
    min_throughput: float,
) -> tuple[list[float], list[float]]:
    """Throughputs and costs of all platforms, as `Balancer.balance` takes them.

    A lost platform has throughput 0. One that nobody has heard of yet is just fast enough not
    to have failed, and has no data, so that it is not among the fastest either.
    """
    unheard = PlatformForecast(0, min_throughput or 1e-9, 0.0)
    throughputs, costs = [], []
    for rank in range(num_workers):
        forecast = forecasts.get(rank, unheard)
        throughputs.append(0.0 if rank in lost else forecast.throughput)
        costs.append(forecast.epoch_cost)
    return throughputs, costs
