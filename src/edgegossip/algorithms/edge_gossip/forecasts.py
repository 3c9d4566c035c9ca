"""How the workers learn what the fastest of them needs for its data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from edgegossip.core.protocol import Message, Payload, Rank, Received, Seconds, Send
from edgegossip.core.schema import MessageSpec, TensorSpec

FIELD = "forecast"
"""Name of the tensor that a forecast adds to a payload."""
_INHERITED = "inherited"


@dataclass(slots=True)
class PlatformForecast:
    """What a platform says about its next epoch.

    Attributes:
        round: Its round when it said so.
        throughput: Training samples' worth per second.
        epoch_cost: What a pass over all its data costs, in training samples' worth.
        inherited: Whose data it has taken over, in order.
    """

    round: int
    throughput: float
    epoch_cost: float
    inherited: tuple[Rank, ...] = ()

    def message(self) -> Message:
        """As it travels: [throughput, epoch_cost], and whose data it has besides its own."""
        values = torch.tensor([self.throughput, self.epoch_cost], dtype=torch.float64)
        more = {_INHERITED: torch.tensor(self.inherited)} if self.inherited else {}
        return Message("forecast", self.round, {FIELD: values, **more})

    @staticmethod
    def from_message(message: Message) -> PlatformForecast:
        """What `message` says."""
        throughput, epoch_cost = message.payload[FIELD].tolist()
        ranks = message.payload.get(_INHERITED, torch.empty(0)).tolist()
        return PlatformForecast(message.round, throughput, epoch_cost, tuple(ranks))


@dataclass(slots=True)
class Fastest:
    r"""Push-min of :math:`T_i`, with an age so that what is no longer true dies out.

    A worker that knows of nobody faster is itself the fastest, at age 0. With every epoch of
    its own what it has heard grows older by one, and older than `max_age` it is forgotten: if
    the fastest slows down or is lost, everybody knows after that many epochs. On a complete
    graph, :math:`O(\log E)` random pushes spread a minimum to all.

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

    def hear(self, payload: Payload, max_age: int) -> None:
        """Take over what came with a message, if it is faster, or as fast and fresher."""
        if FIELD in payload:
            seconds, age = payload[FIELD].tolist()
            if age <= max_age and (seconds, age) < (self.seconds, self.age):
                self.seconds, self.age = seconds, int(age)

    def attach(self, payload: Payload, own_seconds: Seconds) -> Payload:
        """`payload` with the fastest known, the sender included; as it is if none is known."""
        known = (self.seconds, self.age) if self.seconds < own_seconds else (own_seconds, 0)
        if known[0] == math.inf:
            return payload
        return {**payload, FIELD: torch.tensor(known, dtype=torch.float64)}

    def ride_on(self, send: Send, own_seconds: Seconds) -> Send:
        """`send` with what `attach` adds to its payload."""
        payload = self.attach(send.message.payload, own_seconds)
        return replace(send, message=replace(send.message, payload=payload))


def detach(event: Received) -> Received:
    """`event` with the message as the inner algorithm sent it."""
    payload = {name: x for name, x in event.message.payload.items() if name != FIELD}
    return replace(event, message=replace(event.message, payload=payload))


def forecast_schema(max_ahead: int | None, num_workers: int) -> dict[str, MessageSpec]:
    """Of the messages that travel beside the inner algorithm's (`spread = "exact"`)."""
    ranks = TensorSpec(torch.int64, (None,), num_workers, minimum=0, maximum=num_workers - 1)
    forecast = MessageSpec({FIELD: _TWO_NUMBERS}, {_INHERITED: ranks}, max_ahead=max_ahead)
    return {"forecast": forecast, "spare-joined": MessageSpec(max_ahead=0)}


def with_forecast(schema: Mapping[str, MessageSpec]) -> dict[str, MessageSpec]:
    """Of the inner algorithm's messages, which may carry more (`spread = "gossip"`)."""
    more = {FIELD: _TWO_NUMBERS}
    return {
        kind: replace(spec, optional={**spec.optional, **more}) for kind, spec in schema.items()
    }


_TWO_NUMBERS = TensorSpec(torch.float64, (2,), minimum=0)
# [throughput, epoch_cost] of a platform, or [seconds, age] of the fastest.


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
