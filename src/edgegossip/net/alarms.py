"""Timers and periodic chores of one worker."""

from __future__ import annotations

import math
from collections.abc import Iterable

from edgegossip.core.protocol import Seconds
from edgegossip.net.host_settings import Chore


class Chores:
    """Periodic chores; each runs immediately the first time.

    >>> chores = Chores([lambda now: now + 5.0])
    >>> chores.do_due(2.0)
    >>> chores.next_at
    7.0
    """

    next_at: Seconds
    """Time at which the next chore is due; infinity if none is."""

    def __init__(self, chores: Iterable[Chore]) -> None:
        self._due = [(0.0, chore) for chore in chores]
        self.next_at = 0.0 if self._due else math.inf

    def do_due(self, now: Seconds) -> None:
        """Run all due chores."""
        if now >= self.next_at:
            self._due = [(chore(now) if at <= now else at, chore) for at, chore in self._due]
            self.next_at = min(at for at, _ in self._due)


class Alarms:
    """Keeps timers by name; setting a name again replaces its timer.

    >>> alarms = Alarms()
    >>> alarms.set("round", 2.0)
    >>> alarms.set("round", 3.0)
    >>> alarms.next_at, alarms.pop_due(2.5), alarms.pop_due(3.0)
    (3.0, [], ['round'])
    """

    next_at: Seconds
    """Time at which the next timer is due; infinity if none is."""

    def __init__(self) -> None:
        self._times: dict[str, Seconds] = {}
        self._look()

    def set(self, name: str, at: Seconds) -> None:
        """Set timer `name` to fire at `at`; infinity cancels it."""
        self._times.pop(name, None)
        if at < math.inf:
            self._times[name] = at
        self._look()

    def pop_due(self, now: Seconds) -> list[str]:
        """Remove the due timers; return their names, the earliest first."""
        if now < self.next_at:
            return []
        due = sorted((at, name) for name, at in self._times.items() if at <= now)
        for _, name in due:
            del self._times[name]
        self._look()
        return [name for _, name in due]

    def state_dict(self) -> dict[str, Seconds]:
        return dict(self._times)

    def load_state_dict(self, state: dict[str, Seconds]) -> None:
        self._times = dict(state)
        self._look()

    def _look(self) -> None:
        self.next_at = min(self._times.values(), default=math.inf)
