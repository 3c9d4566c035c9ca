"""The material for fuzzing: messages that were sent, and their descriptions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from edgegossip.contract.algorithm import Traits
from edgegossip.contract.protocol import Message, Rank, Role
from edgegossip.contract.schema import Limits, MessageSpec, TensorSpec
from edgegossip.net.guard.envelope import Envelope, pack
from edgegossip.net.host.status import STATUS, Phase, WorkerStatus, spec

RUN, SENDER, OWN_ROUND, NUM_WORKERS = b"run 0001", 2, 40, 4
SENDER_LIFE, OWN_LIFE = 11, 12
PARAMS = torch.linspace(-1, 1, 50)
SENT = [
    Message("params", 41, {"params": PARAMS}),
    Message("params", 40, {"params": PARAMS}, {"fastest_seconds": 80.0, "fastest_age": 2}),
    Message("push", 7, {"params": PARAMS}, {"weight": 0.1}),
    Message("chunk", 39, {"chunk": PARAMS[:17]}),
    Message("spare-joined", 0),
    Message(
        "sparse",
        40,
        {
            "values": PARAMS[:9].bfloat16(),
            "indices": torch.arange(9),
            "signs": torch.tensor([True, False, True]),
            "scale": torch.tensor([0.5], dtype=torch.float16),
        },
    ),
    Message("told", 40, {"2.x": PARAMS[:5], "3.x": PARAMS[5:10]}),
    WorkerStatus(
        phase=Phase.WAITING,
        life=SENDER_LIFE,
        begun_with=OWN_LIFE,
        elapsed=7.5,
        silence=16.0,
        is_resumed=False,
        oldest=1,
        kept=0,
        left=3,
        sent=(5, 6, 0, 8),
        received=(4, 5, 0, 7),
    ).message(),
]
_WHOLE = {"params": TensorSpec.like(PARAMS)}
_FORECAST: dict[str, Limits] = {"fastest_seconds": (0, math.inf), "fastest_age": range(2**31)}
SCHEMA = {
    "params": MessageSpec(_WHOLE, optional_numbers=_FORECAST, max_ahead=1),
    "push": MessageSpec(_WHOLE, numbers={"weight": (0, 1)}),
    "chunk": MessageSpec({"chunk": TensorSpec(torch.float32, (None,), max_numel=17)}),
    "spare-joined": MessageSpec(),
    "sparse": MessageSpec(
        {
            "values": TensorSpec(torch.bfloat16, (9,)),
            "indices": TensorSpec(torch.int64, (9,), minimum=0, maximum=49),
            "signs": TensorSpec(torch.bool, (3,)),
            "scale": TensorSpec(torch.float16, (1,)),
        }
    ),
    "told": MessageSpec(
        optional={f"{rank}.x": TensorSpec(torch.float32, (5,)) for rank in range(4)},
        is_passed_on=True,
    ),
    STATUS: spec(NUM_WORKERS),
}


def frames() -> list[bytes]:
    """All sent messages as frames."""
    return [
        b"".join(pack(Envelope(RUN, SENDER, SENDER_LIFE, OWN_LIFE, number), message))
        for number, message in enumerate(SENT, 1)
    ]


class Described:
    """The part of an algorithm that `connect` uses."""

    traits = Traits()

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        return SCHEMA

    def role(self, rank: Rank) -> Role:
        return Role("worker")

    def joined(self, older: Message, newer: Message) -> Message | None:
        return None
