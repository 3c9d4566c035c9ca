"""Ways in which worker 0 lies, and the case that each is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.liars import HONEST, honestly

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Message, Rank
from edgegossip.net.host.status import STATUS, Phase

RESTARTED = 3

Lie = Callable[[Algorithm[Any], Rank, Message], Message]


def says(**numbers: float) -> Lie:
    """In its account of itself."""

    def lie(algorithm: Algorithm[Any], receiver: Rank, message: Message) -> Message:
        if message.kind != STATUS:
            return message
        return replace(message, numbers={**message.numbers, **numbers})

    return lie


def _is_late(algorithm: Algorithm[Any], message: Message) -> bool:
    num_rounds = algorithm.traits.num_rounds
    assert num_rounds is not None
    return not message.kind.startswith("net/") and message.round >= num_rounds // 2


def huge(algorithm: Algorithm[Any], receiver: Rank, message: Message) -> Message:
    if not _is_late(algorithm, message):
        return message
    payload = {
        name: torch.full_like(x, 3e38) if x.is_floating_point() else x
        for name, x in message.payload.items()
    }
    return replace(message, payload=payload)


def weight(algorithm: Algorithm[Any], receiver: Rank, message: Message) -> Message:
    if not _is_late(algorithm, message) or "weight" not in message.numbers:
        return message
    return replace(message, numbers={**message.numbers, "weight": 1e308})


def made_up(algorithm: Algorithm[Any], receiver: Rank, message: Message) -> Message:
    """Updates of all others, as large as an honest one may be."""
    if not _is_late(algorithm, message) or message.kind != "params":
        return message
    values = next((x for name, x in message.payload.items() if name.endswith(".values")), None)
    if values is None:
        return message
    others = {f"{rank}.values": torch.full_like(values, 0.5) for rank in HONEST}
    return replace(message, payload={**message.payload, **others})


def at_the_end(algorithm: Algorithm[Any], receiver: Rank, message: Message) -> Message:
    """To the worker that is restarted: that it has finished, and in the last round."""
    if receiver != RESTARTED:
        return message
    if message.kind == STATUS:
        return says(phase=int(Phase.FINISHED))(algorithm, receiver, message)
    if message.kind != "catch-up":
        return message
    return replace(message, round=algorithm.traits.num_rounds or 0)


def truly(algorithm: Algorithm[Any], receiver: Rank, message: Message) -> Message:
    return honestly(receiver, message)


@dataclass(frozen=True)
class Case:
    """The behavior of worker 0.

    Attributes:
        lie: Instead of what is true.
        compared_with: The case without it; None where that is this one.
        only: The algorithms that it is for; none for all.
        is_absent: It never comes.
        leaves: It is gone at half of the run.
        floods: It floods from half of the run on.
        restarts: An honest one is killed at half of the run, and started again.
    """

    lie: Lie = truly
    compared_with: str | None = None
    only: tuple[str, ...] = ()
    is_absent: bool = False
    leaves: bool = False
    floods: bool = False
    restarts: bool = False


CASES = {
    "nobody lies": Case(),
    "absent": Case(is_absent=True),
    "leaves": Case(leaves=True),
    "restart, nobody lies": Case(restarts=True),
    "restart, absent": Case(is_absent=True, restarts=True),
    "says that the run is old": Case(says(elapsed=1e9), "absent"),
    "says that it was resumed": Case(says(is_resumed=1), "absent"),
    "says that it waits for ever": Case(says(phase=int(Phase.WAITING)), "absent"),
    "makes up others' updates": Case(made_up, "leaves", ("diloco",)),
    "sends 3e38": Case(huge, "leaves"),
    "sends weight 1e308": Case(weight, "leaves", ("gosgd", "stochastic-gradient-push")),
    "floods": Case(compared_with="leaves", floods=True),
    "sends one that rejoins to the end": Case(at_the_end, "restart, absent", restarts=True),
}
