"""Numbers that a wrapper adds to its inner algorithm's messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from edgegossip.core.protocol import Received, Send


def with_numbers(send: Send, numbers: Mapping[str, float]) -> Send:
    """Add these numbers to the message of `send`."""
    carried = {**send.message.numbers, **numbers}
    return replace(send, message=replace(send.message, numbers=carried))


def without_numbers(event: Received, names: Collection[str]) -> Received:
    """Restore the message of `event` as the inner algorithm sent it."""
    known = event.message.numbers.items()
    numbers = {name: number for name, number in known if name not in names}
    return replace(event, message=replace(event.message, numbers=numbers))
