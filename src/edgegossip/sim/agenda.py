"""Agenda: the simulator's queue of future items."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from edgegossip.core.protocol import Rank, Seconds

Entry: TypeAlias = tuple[Seconds, Rank, Any]
"""Time, rank and item."""


class Agenda:
    """Entries ordered by time; entries with equal times, by insertion.

    The heap holds each time once and compares floats only. Equal platforms finish at equal
    times, so the heap is often far smaller than the number of entries.

    Attributes:
        times: Heap of the times that have entries; the first is the next time.
        serial: Number of the next entry. Serials are never reused. They also identify
            individual messages and timer settings.

    >>> agenda = Agenda()
    >>> for at, item in [(2.0, "c"), (1.0, "a"), (1.0, "b")]:
    ...     agenda.push(at, 0, item)
    >>> [agenda.pop() for _ in range(3)]
    [(1.0, 0, 'a'), (1.0, 0, 'b'), (2.0, 0, 'c')]
    """

    __slots__ = ("_at", "serial", "times")

    def __init__(self) -> None:
        self.times: list[Seconds] = []
        self.serial = 0
        # An entry that is alone at its time needs no container.
        self._at: dict[Seconds, Entry | deque[Entry]] = {}

    def push(self, at: Seconds, rank: Rank, item: object) -> None:
        """Add an entry."""
        self.serial += 1
        entry = (at, rank, item)
        others = self._at.get(at)
        if others is None:
            self._at[at] = entry
            heapq.heappush(self.times, at)
        elif isinstance(others, deque):
            others.append(entry)
        else:
            self._at[at] = deque((others, entry))

    def pop(self) -> Entry:
        """Remove and return the next entry; there must be one."""
        at = self.times[0]
        entry = self._at[at]
        if isinstance(entry, deque):
            entries, entry = entry, entry.popleft()
            if entries:
                return entry
        heapq.heappop(self.times)
        del self._at[at]
        return entry

    def __iter__(self) -> Iterator[Entry]:
        """All entries in order."""
        for at in sorted(self.times):
            entries = self._at[at]
            yield from entries if isinstance(entries, deque) else (entries,)

    def keep(self, is_kept: Callable[[Entry], bool]) -> None:
        """Drop all entries except those that `is_kept` accepts."""
        self.load([entry for entry in self if is_kept(entry)], self.serial)

    def load(self, entries: list[Entry], serial: int) -> None:
        """Replace all entries; `entries` must be in order."""
        # In place, because the simulator's loop holds the list.
        self.times.clear()
        self._at.clear()
        for entry in entries:
            self.push(*entry)
        self.serial = serial
