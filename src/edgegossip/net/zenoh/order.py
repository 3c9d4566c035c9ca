"""Order of one process's pieces, over links that may lose some without a word."""

from __future__ import annotations

from enum import Enum, auto

from edgegossip.net.transport import Incarnation

FIRST = b"t"
"""The first piece of a turn."""
_NUMBERS = 2**32 - 1


def following(number: int) -> int:
    """The number after `number`; it fits a zenoh source, and 0 is of pieces without order."""
    return number % _NUMBERS + 1


def is_since(number: int, begin: int) -> bool:
    """Whether the piece with `number` was not sent before the one with number `begin`."""
    return (number - begin) % _NUMBERS <= _NUMBERS // 2


class Arrival(Enum):
    """How a piece has arrived."""

    IN_ORDER = auto()
    LATE = auto()
    AFTER_A_GAP = auto()


class Order:
    """Finds out whether a piece of one process is missing; not thread-safe.

    Pieces have consecutive numbers. zenoh loses some without a report when one of two links
    ends. No piece after a gap may count, so none does until the sender, which is told of the
    gap, begins a new *turn*.

    Attributes:
        process: The process that sends the pieces; None for none.
        last: Number of the last piece in order.

    >>> order = Order(7)
    >>> [order.take(3, is_first=True).name, order.take(5, is_first=False).name]
    ['IN_ORDER', 'AFTER_A_GAP']
    >>> [order.take(6, is_first=False).name, order.take(7, is_first=True).name]
    ['AFTER_A_GAP', 'IN_ORDER']
    """

    def __init__(self, process: Incarnation | None) -> None:
        self.process = process
        self.last: int | None = None
        self._is_broken = True

    def break_off(self) -> None:
        """Let no piece count until the next turn."""
        self._is_broken = True

    def take(self, number: int, *, is_first: bool) -> Arrival:
        """Take note of a piece, which may be the first of a turn."""
        expected = None if self.last is None else following(self.last)
        if expected is not None and not is_since(number, expected):
            return Arrival.LATE
        if is_first:
            self._is_broken = False
        elif self._is_broken or number != expected:
            self._is_broken = True
            return Arrival.AFTER_A_GAP
        self.last = number
        return Arrival.IN_ORDER
