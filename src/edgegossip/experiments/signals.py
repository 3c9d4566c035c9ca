"""Ctrl+C and SIGTERM: the first asks to stop, the second insists."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def interrupt() -> None:
    """As Ctrl+C does where nothing else is said."""
    raise KeyboardInterrupt


@contextmanager
def on_stop_signal(
    stop: Callable[[], None], insist: Callable[[], None] = interrupt
) -> Iterator[None]:
    """Call `stop` at the first signal, and `insist` at each one after it.

    Only the main thread is told of signals; in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            insist()
        is_asked = True
        stop()

    earlier = {number: signal.signal(number, handle) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
