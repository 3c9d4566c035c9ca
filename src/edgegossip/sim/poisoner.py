"""The messages of poisoned workers, and what these know of all the others'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from edgegossip.contract.protocol import Message, Rank, Seconds, Send
from edgegossip.sim.attack import Attack, Knowledge
from edgegossip.sim.fault import Poison

_MODELS = ("params", "model")
"""Names of models in messages; other vectors are updates."""


@dataclass(slots=True)
class Memory:
    """All that workers have sent, by the vector's name, and then by ranks.

    Attributes:
        before: The model before each worker's last training.
        sent: The last vector of each sender.
        heard: The last vector of each sender, by receiver.
        first: The first vector of each poisoned sender.
    """

    before: dict[Rank, Tensor] = field(default_factory=dict)
    sent: dict[str, dict[Rank, Tensor]] = field(default_factory=dict)
    heard: dict[str, dict[Rank, dict[Rank, Tensor]]] = field(default_factory=dict)
    first: dict[str, dict[Rank, Tensor]] = field(default_factory=dict)


class Poisoner:
    """Changes the messages of poisoned workers.

    Args:
        poisons: The faults.
    """

    def __init__(self, poisons: Sequence[Poison]) -> None:
        self._poisons = poisons
        self._liars = {each.rank for each in poisons}
        self.memory = Memory()

    def trained(self, rank: Rank, before: Tensor) -> None:
        """Remember the model that a worker trained from."""
        self.memory.before[rank] = before

    def send(self, now: Seconds, rank: Rank, effect: Send, target: Tensor) -> Send:
        """Return the message that a worker sends to a receiver with the model `target`."""
        message = effect.message
        for name, vector in self._vectors(rank, message, target):
            self._remember(rank, effect.receiver, name.rpartition(".")[2], vector)
        attacks = [p.attack for p in self._poisons if p.rank == rank and p.applies(now)]
        for attack in attacks:
            message = self._poisoned(attack, rank, effect.receiver, message, target)
        return effect if message is effect.message else replace(effect, message=message)

    def _vectors(
        self, rank: Rank, message: Message, target: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """The whole vectors of a message that are its sender's own."""
        for name, tensor in message.payload.items():
            is_whole = tensor.is_floating_point() and tensor.shape == target.shape
            if is_whole and _is_own(name, rank):
                yield name, tensor

    def _remember(self, rank: Rank, receiver: Rank, name: str, vector: Tensor) -> None:
        memory = self.memory
        memory.sent.setdefault(name, {})[rank] = vector
        memory.heard.setdefault(name, {}).setdefault(receiver, {})[rank] = vector
        if rank in self._liars:
            memory.first.setdefault(name, {}).setdefault(rank, vector)

    def _poisoned(
        self, attack: Attack, rank: Rank, receiver: Rank, message: Message, target: Tensor
    ) -> Message:
        payload = dict(message.payload)
        whole = dict(self._vectors(rank, message, target))
        for name, tensor in payload.items():
            if name in whole:
                known = self._known(rank, receiver, name.rpartition(".")[2], target)
                payload[name] = attack.vector(tensor, known).to(tensor.dtype)
                continue
            is_scaled = tensor.is_floating_point() and _is_own(name, rank)
            if is_scaled and attack.factor is not None:
                payload[name] = attack.factor * tensor
        return replace(message, payload=payload, numbers=attack.numbers(message.numbers))

    def _known(self, rank: Rank, receiver: Rank, name: str, target: Tensor) -> Knowledge:
        memory, zeros = self.memory, torch.zeros_like(target)
        is_model = name in _MODELS
        honest = self._honest(memory.sent[name])
        bases = [memory.before[j] for j in honest if j in memory.before]
        heard = memory.heard[name].get(receiver, {})
        base = torch.stack(bases).mean(0) if len(bases) == len(honest) and bases else None
        return Knowledge(
            base=memory.before.get(rank, target) if is_model else zeros,
            honest=honest,
            honest_base=base if is_model else zeros,
            target=target,
            heard=self._honest(heard),
            num_liars=max(1, sum(j in self._liars for j in heard)),
            first=memory.first[name][rank],
        )

    def _honest(self, vectors: dict[Rank, Tensor]) -> dict[Rank, Tensor]:
        return {j: vectors[j] for j in sorted(vectors) if j not in self._liars}


def _is_own(name: str, rank: Rank) -> bool:
    """Whether a tensor is its sender's own, and not one that it passes on."""
    origin = name.partition(".")[0]
    return not origin.isdigit() or int(origin) == rank
