"""Cancellation of long computations, which check at intervals whether to continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# A context variable, so that no aggregator needs an argument for it, and threads of other
# learners are not affected.
_CHECK: ContextVar[Callable[[], None]] = ContextVar("check", default=lambda: None)


@contextmanager
def cancellable(check: Callable[[], None]) -> Iterator[None]:
    """Let computations within the block call `check`, at least about every tenth of a second.

    Args:
        check: Raises any exception to cancel the computation.

    >>> with cancellable(lambda: print("still here?")):
    ...     check_cancellation()
    still here?
    """
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


def check_cancellation() -> None:
    """Run the check of `cancellable`; outside such a block, do nothing."""
    _CHECK.get()()
