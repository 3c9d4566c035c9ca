"""The runtime of a host: its clock, its inbox, and background threads.

The host uses time and threads only through a `Runtime`. Tests use a virtual runtime, with which
a run of minutes takes milliseconds and one seed gives one trace.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, Protocol, TypeAlias, TypeVar

from edgegossip.core.protocol import Seconds
from edgegossip.net.fair_queue import FairQueue

T = TypeVar("T")
Life: TypeAlias = int
"""A life of a rank, drawn at each start with an empty state; a resumed worker keeps its own."""
Course: TypeAlias = Generator[Seconds, Any, T]
"""Yields the time, by `Runtime.clock`, until which there is nothing to do, and receives the
next item of the inbox, or None at that time.
"""
_LONGEST_WAIT: Seconds = 3600.0
"""Longest wait in one system call, which does not support infinity."""


class Background(Protocol):
    """Runs jobs in sequence, in the background."""

    def submit(self, job: Callable[[], T], done: Callable[[T], object] | None = None) -> None:
        """Run `job` after earlier ones, then call `done` with its result; neither may raise."""

    def close(self, seconds: Seconds) -> None:
        """Accept no more jobs, and wait at most `seconds` for submitted ones."""


class Runtime(Protocol):
    """Clock, inbox and threads of a host."""

    def clock(self) -> Seconds:
        """Time in seconds; it never decreases."""

    def inbox(self) -> FairQueue:
        """Make an empty inbox."""

    def background(self, name: str) -> Background:
        """Make a `Background`; `name` is for display."""

    def new_life(self) -> Life:
        """Draw a unique life in 1..2**63 - 1."""


def drive(course: Course[T], inbox: FairQueue, clock: Callable[[], Seconds]) -> T:
    """Run `course`, and wait when it asks to; return its result."""
    item = None
    with closing(course):
        while True:
            try:
                until = course.send(item)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            item = inbox.get(timeout=min(max(0.0, until - clock()), _LONGEST_WAIT))


class BackgroundThread:
    """A `Background` with a daemon thread."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], done: Callable[[T], object] | None = None) -> None:
        """See `Background`."""

        def run() -> None:
            result = job()
            if done is not None:
                done(result)

        self._jobs.put(run)

    def close(self, seconds: Seconds) -> None:
        """See `Background`."""
        self._jobs.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class RealRuntime:
    """The `Runtime` of a process: the machine's clock, and threads.

    >>> 0 < RealRuntime().new_life() < 2**63
    True
    """

    def clock(self) -> Seconds:
        """See `Runtime`."""
        return time.monotonic()

    def inbox(self) -> FairQueue:
        """See `Runtime`."""
        return FairQueue()

    def background(self, name: str) -> Background:
        """See `Runtime`."""
        return BackgroundThread(name)

    def new_life(self) -> Life:
        """See `Runtime`."""
        # From the system's generator: two workers with one seed must draw different numbers.
        return 1 + secrets.randbelow(2**63 - 1)
