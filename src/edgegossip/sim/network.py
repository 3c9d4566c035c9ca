"""Sent messages: their sizes, and whether the algorithm's schema describes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from edgegossip.contract import codec
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import Message, Rank, Seconds, Send
from edgegossip.contract.randomness import uniform
from edgegossip.contract.schema import MessageSpec, require_described
from edgegossip.sim.agenda import Delivery, FirstByte, WorkerRecord
from edgegossip.sim.fault import Faults, applies
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform

InitialParams: TypeAlias = Tensor | Callable[[Rank], Tensor]
_MOST_FORMS = 4096


def initial_params_of(given: InitialParams, rank: Rank) -> Tensor:
    """The initial parameters of worker `rank`, [num_params]."""
    return given if isinstance(given, Tensor) else given(rank)


class Outgoing:
    """Measures each form of message, and checks it against the schema, when it is first sent.

    Messages have one form if they agree in kind, names, types and shapes. An algorithm without
    a schema may send anything.

    Args:
        algorithm: Algorithm of the workers.
        initial_params: Initial parameters of every worker, or a function of the rank.
    """

    def __init__(self, algorithm: Algorithm[Any], initial_params: InitialParams) -> None:
        self._algorithm = algorithm
        self._initial_params = initial_params
        # By length of the initial parameters, which differs between roles.
        self._schemas: dict[int, Mapping[str, MessageSpec] | None] = {}
        self._sizes: dict[tuple[object, ...], int] = {}

    def num_bytes(self, sender: Rank, message: Message) -> int:
        """The size of a message of worker `sender`, in bytes.

        Raises:
            UndescribedError: If the schema does not describe the message.
        """
        form: tuple[object, ...] = codec.form(message)
        # Two sets of numbers may have texts of equal length, but only one may be allowed.
        if message.numbers:
            form = *form, *message.numbers
        if (size := self._sizes.get(form)) is None:
            # Only for a new form: shapes and names decide, and a run has few of them.
            if (schema := self._schema(sender)) is not None:
                require_described(schema, message, sender)
            if len(self._sizes) == _MOST_FORMS:  # compressed messages may have any length
                self._sizes.clear()
            size = self._sizes[form] = codec.num_bytes(message)
        return size

    def _schema(self, rank: Rank) -> Mapping[str, MessageSpec] | None:
        params = initial_params_of(self._initial_params, rank)
        if len(params) not in self._schemas:
            try:
                self._schemas[len(params)] = self._algorithm.schema(params)
            except LocalProtocolError:  # it has none, and runs only in a simulator
                self._schemas[len(params)] = None
        return self._schemas[len(params)]


# The network: durations and losses of messages.


class Network:
    """Uplinks, links with their faults, and downlinks.

    An uplink carries one message after another, in the order of sending. A downlink takes
    messages in the order in which their first bytes arrive; ties keep the order of sending.
    Bytes are forwarded as they arrive, so a message between two equally fast ends takes only as
    long as at one end.

    Args:
        links: Latencies and bandwidths.
        faults: Faults that drop or delay messages.
        platforms: One for each worker, with its uplink and downlink.
        outgoing: Measures and checks messages.
        wire: Whether to encode and decode every message.

    Attributes:
        joules: Energy of all messages that were handed over, lost ones included.
    """

    def __init__(
        self,
        links: Links,
        faults: Faults,
        platforms: Sequence[Platform],
        outgoing: Outgoing,
        *,
        wire: bool,
    ) -> None:
        self._links = links
        self._seed = faults.seed
        self._drops, self._delays = faults.drops, faults.delays
        self._platforms = platforms
        self._outgoing = outgoing
        self._wire = wire
        self.joules = 0.0

    def send(
        self, now: Seconds, record: WorkerRecord, sender: Rank, effect: Send, serial: int
    ) -> Delivery:
        """Transmit a message when its sender's uplink is free; `serial` keys its random draws.

        Raises:
            LocalProtocolError: If the receiver is not another worker, or the algorithm's schema
                does not describe the message.
        """
        receiver, message = effect.receiver, effect.message
        if not 0 <= receiver < len(self._platforms) or receiver == sender:
            raise LocalProtocolError(
                f"worker {sender} sent to {receiver!r}; receivers are other ranks in "
                f"0..{len(self._platforms) - 1}"
            )
        num_bytes = self._outgoing.num_bytes(sender, message)
        # The receiver sees what a network would give it, so a difference shows in a simulation.
        if self._wire:
            message = codec.decode(bytearray().join(codec.encode(message)))
        link = self._links.link(sender, receiver)
        self.joules += num_bytes * link.joules_per_byte
        # Comparisons in place of `max` and `min`: this runs for each message.
        start = now if now > record.uplink_free else record.uplink_free
        uplink = self._platforms[sender].uplink
        bandwidth = link.bandwidth if link.bandwidth < uplink else uplink
        end = record.uplink_free = start + num_bytes / bandwidth
        # A lost message has used the uplink all the same.
        is_dropped, delay = False, 0.0
        if self._drops or self._delays:
            is_dropped, delay = self._disturb(now, sender, receiver, serial)
        first, last = start + link.latency + delay, end + link.latency + delay
        return Delivery(
            sender, receiver, message, num_bytes, start, end, first, last, is_dropped
        )

    def _disturb(
        self, now: Seconds, sender: Rank, receiver: Rank, serial: int
    ) -> tuple[bool, Seconds]:
        """Return whether the link loses a message sent at `now`, and the message's delay."""
        # Keyed by fault and message, so that one more fault changes no other draw.
        is_dropped = any(
            applies(drop, now, sender, receiver)
            and uniform(self._seed, "drop", k, serial) < drop.probability
            for k, drop in enumerate(self._drops)
        )
        delay = sum(
            delay.seconds * uniform(self._seed, "delay", k, serial)
            for k, delay in enumerate(self._delays)
            if applies(delay, now, sender, receiver)
        )
        return is_dropped, delay

    def arrival(self, delivery: Delivery) -> tuple[Seconds, FirstByte | Delivery]:
        """Return the time and the item of the next event of a sent message.

        An unlimited downlink delays nothing, so only the last byte counts there.
        """
        if self._platforms[delivery.receiver].downlink == math.inf:
            return delivery.last, delivery
        return delivery.first, FirstByte(delivery)

    def receive(self, now: Seconds, record: WorkerRecord, delivery: Delivery) -> Seconds:
        """Queue a message whose first byte arrives; return the time when it has passed."""
        bandwidth = self._platforms[delivery.receiver].downlink
        return record.downlink.receive(now, delivery.last, delivery.num_bytes, bandwidth)
