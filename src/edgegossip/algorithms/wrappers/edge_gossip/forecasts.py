"""Spreading of forecasts: workers learn the time that the fastest worker needs for its data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from edgegossip.contract import (
    Limits,
    Message,
    MessageSpec,
    Rank,
    Received,
    Seconds,
    Send,
    TensorSpec,
    with_numbers,
    without_numbers,
)

_SECONDS, _AGE = "fastest_seconds", "fastest_age"
"""Names of the additional numbers in the inner algorithm's messages."""
_OLDEST = 2**31  # any age that `max_age` may be
_INHERITED = "inherited"


@dataclass(slots=True)
class PlatformForecast:
    """Forecast of a platform for its next epoch.

    Attributes:
        round: The platform's round at the time of the forecast.
        throughput: Training samples per second.
        epoch_cost: Cost of a pass over all its data, in training samples.
        inherited: Workers whose data the platform has taken over, in rank order.
    """

    round: int
    throughput: float
    epoch_cost: float
    inherited: tuple[Rank, ...] = ()

    def message(self) -> Message:
        """Make a message with the throughput, cost, and workers whose data was taken over."""
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
    r"""Push-min of :math:`T_i`, with an age that removes stale values.

    A worker that knows no faster worker considers itself the fastest, at age 0. A received
    value ages by one in each epoch of the worker, and is forgotten above `max_age`. If the
    fastest worker slows down or is lost, all workers therefore notice after `max_age` epochs.
    On a complete graph, a minimum reaches all workers after :math:`O(\log E)` random pushes.

    Attributes:
        seconds: :math:`T_j` of the fastest known worker; infinite for none.
        age: Age of that value, in epochs.
    """

    seconds: Seconds = math.inf
    age: int = 0

    def grow_older(self, max_age: int) -> None:
        """Age the value by an epoch, and forget it above `max_age`."""
        self.age += 1
        if self.age > max_age:
            self.seconds, self.age = math.inf, 0

    def hear(self, message: Message, max_age: int) -> bool:
        """Adopt the value in a message if it is faster, or equally fast and fresher.

        Returns whether it is faster.
        """
        # Two workers with the same minimum must not refresh each other's forever, so a message
        # has the sender's age, and ages grow at each worker.
        heard = (message.numbers.get(_SECONDS, math.inf), int(message.numbers.get(_AGE, 0)))
        is_faster = heard[1] <= max_age and heard[0] < self.seconds
        if heard[1] <= max_age and heard < (self.seconds, self.age):
            self.seconds, self.age = heard
        return is_faster

    def piggyback(self, send: Send, own_seconds: Seconds) -> Send:
        """Add the fastest known worker, which may be the sender, to the message of `send`."""
        # Only the fastest worker itself sends age 0, so that its value dies out with it.
        known = (self.seconds, self.age) if self.seconds < own_seconds else (own_seconds, 0)
        if known[0] == math.inf:
            return send
        return with_numbers(send, {_SECONDS: known[0], _AGE: known[1]})


def detach(event: Received) -> Received:
    """Restore the message as the inner algorithm sent it."""
    return without_numbers(event, (_SECONDS, _AGE))


def forecast_schema(max_round: int | None, num_workers: int) -> dict[str, MessageSpec]:
    """Describe the messages that ``spread="exact"`` adds to the inner algorithm's."""
    ranks = TensorSpec(torch.int64, (None,), num_workers, minimum=0, maximum=num_workers - 1)
    positive = (0, math.inf)
    forecast = MessageSpec(
        optional={_INHERITED: ranks},
        numbers={"throughput": positive, "epoch_cost": positive},
        max_round=max_round,
    )
    return {"forecast": forecast, "spare-joined": MessageSpec(max_round=0)}


def with_forecast(schema: Mapping[str, MessageSpec]) -> dict[str, MessageSpec]:
    """Add the fastest worker's numbers to all messages of `schema` (``spread="gossip"``)."""
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

    A lost platform has throughput 0. An unknown platform is just fast enough not to have
    failed, and has no data, so it is never the fastest.
    """
    # Failed, it would count toward the policy before it had a chance to say anything.
    unheard = PlatformForecast(0, min_throughput or 1e-9, 0.0)
    throughputs, costs = [], []
    for rank in range(num_workers):
        forecast = forecasts.get(rank, unheard)
        throughputs.append(0.0 if rank in lost else forecast.throughput)
        costs.append(forecast.epoch_cost)
    return throughputs, costs
