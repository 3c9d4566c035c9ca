"""Signals: the first Ctrl+C, SIGTERM or SIGHUP asks to stop, the second forces it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

import torch

from edgegossip.contract.errors import Interrupted
from edgegossip.machine.system import is_hangup, stop_signals


def interrupt() -> None:
    """Raise KeyboardInterrupt, as Ctrl+C does by default."""
    raise KeyboardInterrupt


def interrupted(out: Path, where: str = "") -> Interrupted:
    """Make the error for interrupted runs; its message says how to resume.

    Args:
        out: Folder of the runs.
        where: The place, if known, e.g. "in gosgd" or "at 3 virtual seconds".
    """
    place = f" {where}" if where else ""
    return Interrupted(
        f"interrupted{place}; {out} holds everything so far, and the same command with "
        "--resume and --out continues"
    )


@contextmanager
def on_stop_signal(
    stop: Callable[[], None], insist: Callable[[], None] = interrupt
) -> Iterator[None]:
    """Call `stop` at the first signal, and `insist` at each later one.

    A closed terminal sends SIGHUP more than once, so SIGHUP never insists; an ignored SIGHUP,
    as under nohup, stays ignored. Only the main thread receives signals; in other threads, this
    has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            if is_hangup(number):
                return
            insist()
        is_asked = True
        stop()

    earlier = {
        number: signal.signal(number, handle)
        for number in stop_signals()
        if not is_hangup(number) or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def on_leave_signal(leave: Callable[[], None]) -> Iterator[None]:
    """Call `leave` at SIGUSR1, where there is this signal, and in the main thread only."""
    number = getattr(signal, "SIGUSR1", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(number, lambda *_: leave())
    try:
        yield
    finally:
        signal.signal(number, earlier)


# Threads.


def one_intra_op_thread() -> AbstractContextManager[None]:
    """Set one intra-op thread; more would slow down workers, which run in parallel."""
    return intra_op_threads(1)


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Set the number of intra-op threads for this thread and for threads that it starts."""
    earlier = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(earlier)
