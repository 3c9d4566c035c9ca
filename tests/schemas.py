"""Whether what algorithms send is what their schema says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.observers import Silent
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Message, Rank, Seconds
from edgegossip.contract.schema import MessageSpec


@dataclass
class SchemaCheck(Silent):
    """An observer that fails where a message is sent that a network would refuse.

    Attributes:
        schema: What is promised.
        num_sent: Messages seen, by kind.
    """

    schema: Mapping[str, MessageSpec]
    num_sent: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, algorithm: Algorithm[Any], params: Tensor) -> SchemaCheck:
        return cls(algorithm.schema(params))

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        spec = self.schema[message.kind]
        assert spec.mismatch(message.payload, message.numbers) is None
        assert spec.bad_values(message.payload, message.numbers) is None
        assert message.round >= 0
        assert spec.max_round is None or message.round <= spec.max_round
        self.num_sent[message.kind] += 1
