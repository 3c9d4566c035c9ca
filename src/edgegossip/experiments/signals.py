"""Ctrl+C, SIGTERM and SIGHUP: the first asks to stop, the second insists."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from edgegossip.core.errors import Interrupted

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt() -> None:
    """As Ctrl+C does where nothing else is said."""
    raise KeyboardInterrupt


def interrupted(out: Path, where: str = "") -> Interrupted:
    """Say that several runs were interrupted, and how to go on.

    Args:
        out: Their folder.
        where: In which of them, if that is known.
    """
    place = f" in {where}" if where else ""
    return Interrupted(
        f"interrupted{place}; {out} holds everything so far, and the same command with "
        "--resume and --out goes on"
    )


@contextmanager
def on_stop_signal(
    stop: Callable[[], None], insist: Callable[[], None] = interrupt
) -> Iterator[None]:
    """Call `stop` at the first signal, and `insist` at each one after it.

    A terminal that is closed hangs up more than once, so SIGHUP never insists; one that is
    ignored, as under nohup, stays so. Only the main thread is told of signals; in others this
    does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            if number == signal.SIGHUP:
                return
            insist()
        is_asked = True
        stop()

    earlier = {
        number: signal.signal(number, handle)
        for number in _NUMBERS
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
