"""A schedule of events in virtual time, all in one thread."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import TypeVar

from edgegossip.contract.protocol import Seconds

T = TypeVar("T")


class VirtualTime:
    """A schedule of events; `sleep` makes the current job take time."""

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self.num_actions = 0
        self.ahead: Seconds = 0.0  # what the job at hand has slept
        self._serials = itertools.count()
        self._heap: list[tuple[Seconds, int, Callable[[], None]]] = []

    def clock(self) -> Seconds:
        return self.now + self.ahead

    def sleep(self, seconds: Seconds) -> None:
        self.ahead += seconds

    def timed(self, job: Callable[[], T]) -> tuple[T, Seconds]:
        """Run `job`; returns its result, and how long it slept."""
        result = job()
        seconds, self.ahead = self.ahead, 0.0
        return result, seconds

    def at(self, time: Seconds, action: Callable[[], None]) -> None:
        time = time if time > self.now else self.now
        heapq.heappush(self._heap, (time, next(self._serials), action))

    def run(self, until: Seconds, is_over: Callable[[], bool]) -> bool:
        """Let time pass; says whether `is_over` came true before `until`."""
        while not is_over():
            if not self._heap or self._heap[0][0] > until:
                return False
            self.now, _, action = heapq.heappop(self._heap)
            self.num_actions += 1
            action()
        return True
