"""One message at a time on each link, for algorithms that never wait.

A worker that trains faster than its uplink carries models would otherwise queue ever more of
them. Here it sends the next message to a neighbor when the neighbor has acknowledged the last
one, so at most one message per neighbor is under way, and each is made from the newest model.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edgegossip.contract import (
    Asynchronous,
    AsynchronousState,
    Effect,
    Message,
    MessageSpec,
    Rank,
    Seconds,
    Send,
    Setting,
    check_ranges,
)


@dataclass(slots=True, kw_only=True)
class PacedState(AsynchronousState):
    """State of a worker.

    Attributes:
        under_way: By receiver, the round and the sending time of the message that it has not
            yet acknowledged.
    """

    under_way: dict[Rank, tuple[int, Seconds]] = field(default_factory=dict)


S = TypeVar("S", bound=PacedState)


@dataclass(frozen=True, kw_only=True)
class Paced(Asynchronous[S], Generic[S]):
    """Base of algorithms that send a neighbor the next message when it has the last one.

    Args:
        timeout: Seconds after which a message without acknowledgement counts as lost, so that
            the next one is sent; None for never, which is safe only on lossless links.
    """

    timeout: Seconds | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, timeout="above 0 or None")

    def warnings(self, setting: Setting) -> list[str]:
        """Warn about links that one lost message silences."""
        if not setting.drops_messages or self.timeout is not None:
            return []
        return [
            f"{type(self).__name__} sends a neighbor nothing more after a message or its "
            "acknowledgement is lost; give it a timeout"
        ]

    @abstractmethod
    def next_message(self, state: S, receiver: Rank) -> Message | None:
        """Make the message that `receiver` is to get now; None if there is nothing new."""

    @abstractmethod
    def take(self, state: S, sender: Rank, message: Message) -> None:
        """Keep a message."""

    def acknowledgement(self) -> dict[str, MessageSpec]:
        """The schema of acknowledgements, which have the round of the acknowledged message."""
        return {"ack": MessageSpec(max_round=self.num_rounds)}

    def send(self, state: S, receivers: Iterable[Rank], now: Seconds) -> list[Effect]:
        """Send the next message to all `receivers` that are free."""
        patience = math.inf if self.timeout is None else self.timeout
        effects: list[Effect] = []
        for receiver in receivers:
            _, sent_at = state.under_way.get(receiver, (0, -math.inf))
            # A clock that shows an earlier time has restarted, and so has the network's memory.
            is_free = sent_at == -math.inf or not sent_at <= now < sent_at + patience
            if receiver in state.lost or not is_free:
                continue
            message = self.next_message(state, receiver)
            if message is not None:
                state.under_way[receiver] = message.round, now
                effects.append(Send(receiver, message))
        return effects

    def receive(self, state: S, sender: Rank, message: Message, now: Seconds) -> list[Effect]:
        if message.kind != "ack":
            self.take(state, sender, message)
            return [Send(sender, Message("ack", message.round))]
        if state.under_way.get(sender, (-1, now))[0] != message.round:
            return []  # late: this message has been given up
        del state.under_way[sender]
        return self.send(state, [sender], now)

    def lose(self, state: S, rank: Rank) -> list[Effect]:
        state.under_way.pop(rank, None)  # its acknowledgement may be lost, too
        return []
