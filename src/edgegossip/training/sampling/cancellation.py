"""Cancellation of long computations, which ask at intervals whether to continue.

`asking` sets the check for the current thread; any exception from the check ends the
computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


def _nothing() -> None:
    """Check that never cancels."""


_ASK: ContextVar[Callable[[], None]] = ContextVar("ask", default=_nothing)


@contextmanager
def asking(ask: Callable[[], None]) -> Iterator[None]:
    """Let computations within the block call `ask`, at least about every tenth of a second.

    Args:
        ask: Raises an exception to cancel the computation.

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
    """Run the check; outside `asking`, it has no effect."""
    _ASK.get()()
