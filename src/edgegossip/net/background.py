"""A thread that does one job after the other, and does not keep the process alive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Background:
    """Runs jobs in the order given, beside the caller.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` when those before it are done; it must not raise."""
        self._jobs.put(job)

    def close(self, seconds: float) -> None:
        """Take no more jobs and wait for those that are there, for at most so long."""
        self._jobs.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
