"""One worker of a run in stages, told by hand what happens; and what the others send it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.effects import of_type
from tests.trained import trained_event
from torch import Tensor

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.algorithms.stages.state import StageState
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Message,
    Payload,
    Rank,
    Received,
    Seconds,
    Send,
    Started,
    Train,
)

PARAMS = torch.zeros(4)
SHAPE = (3,)
SETTINGS: dict[str, Any] = {"boundaries": (SHAPE, SHAPE), "num_classes": 5, "max_batch": 4}
ALONE = Alone(num_rounds=100, local_steps=10)
FIRST, MIDDLE, LAST = 0, 1, 2


def decoupled(**changes: Any) -> Decoupled:  # noqa: ANN401
    return Decoupled(**{"inner": ALONE, **SETTINGS, **changes})


def pipelined(**changes: Any) -> Pipelined:  # noqa: ANN401
    return Pipelined(**{"inner": ALONE, **SETTINGS, **changes})


BOTH = {"decoupled": decoupled(), "pipelined": pipelined()}
each_algorithm = pytest.mark.parametrize("algorithm", BOTH.values(), ids=BOTH)


class Worker:
    """One worker of a run, told what happens by hand."""

    def __init__(self, algorithm: Stages, rank: Rank) -> None:
        self.algorithm, self.rank = algorithm, rank
        self.state: StageState = algorithm.init(rank, PARAMS)
        self.effects: list[Effect] = []

    def tell(self, event: Event, now: Seconds = 0.0) -> list[Effect]:
        self.effects = self.algorithm.handle(self.state, event, now)
        return self.effects

    def start(self, now: Seconds = 0.0) -> list[Effect]:
        return self.tell(Started(num_samples=40, epoch_cost=40.0), now)

    def hear(self, sender: Rank, message: Message, now: Seconds = 0.0) -> list[Effect]:
        return self.tell(Received(sender, message), now)

    @property
    def request(self) -> Train:
        """The batch that it trains on now."""
        (request,) = of_type(self.effects, Train)
        return request

    @property
    def sent(self) -> Message:
        """The one message that it has sent now."""
        (send,) = of_type(self.effects, Send)
        return send.message

    def train(
        self, outputs: Payload | None = None, now: Seconds = 1.0, **more: Tensor
    ) -> list[Effect]:
        """Be done with what it trains on."""
        outputs = {**(outputs or {}), **more}
        num_samples = 2 if self.rank == FIRST else 0
        return self.tell(
            trained_event(PARAMS + now, PARAMS, outputs=outputs, num_samples=num_samples), now
        )


def batch(value: float = 1.0, num_samples: int = 2) -> dict[str, Tensor]:
    labels = torch.zeros(num_samples, dtype=torch.int64)
    return {"activations": torch.full((num_samples, *SHAPE), value), "labels": labels}


def up(number: int, value: float = 1.0, boundary: int = 0, round: int = 0) -> Message:
    numbers = {"batch": number, "wants_gradient": 1}
    return Message(f"activations-{boundary}", round, batch(value), numbers)


def down(
    number: int, gradient: Tensor | None = None, boundary: int = 0, round: int = 0
) -> Message:
    payload = {} if gradient is None else {"gradient": gradient}
    return Message(f"done-{boundary}", round, payload, {"batch": number})


def gradient(value: float = 0.5, num_samples: int = 2) -> Tensor:
    return torch.full((num_samples, *SHAPE), value)
