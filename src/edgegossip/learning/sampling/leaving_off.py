"""Long computations ask now and then whether anybody waits for them still.

`asking` says how, for the thread that it is used in; whatever that raises ends the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


def _nothing() -> None:
    """As where nobody can tell it to leave off."""


_ASK: ContextVar[Callable[[], None]] = ContextVar("ask", default=_nothing)


@contextmanager
def asking(ask: Callable[[], None]) -> Iterator[None]:
    """Let computations within the block call `ask`, at least every tenth of a second or so.

    Args:
        ask: Raises if they shall leave off.

    >>> with asking(lambda: print("still here?")):
    ...     leave_off_if_told()
    still here?
    """
    token = _ASK.set(ask)
    try:
        yield
    finally:
        _ASK.reset(token)


def leave_off_if_told() -> None:
    """Ask; does nothing outside of `asking`."""
    _ASK.get()()
