"""When a host acts without a message: timers, periodic chores, and patience with others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.host.settings import Chore


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
            # Each chore says itself when it is due again, so a slow one is not called in a row.
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
        self._update()

    def set(self, name: str, at: Seconds) -> None:
        """Set timer `name` to fire at `at`; infinity cancels it."""
        # One timer per name: an algorithm that sets it again waits for something else by now.
        self._times.pop(name, None)
        if at < math.inf:
            self._times[name] = at
        self._update()

    def pop_due(self, now: Seconds) -> list[str]:
        """Remove the due timers; return their names, the earliest first."""
        if now < self.next_at:
            return []
        # By time and then by name, so that equal runs fire in the same order.
        due = sorted((at, name) for name, at in self._times.items() if at <= now)
        for _, name in due:
            del self._times[name]
        self._update()
        return [name for _, name in due]

    def state_dict(self) -> dict[str, Seconds]:
        return dict(self._times)

    def load_state_dict(self, state: dict[str, Seconds]) -> None:
        self._times = dict(state)
        self._update()

    def _update(self) -> None:
        self.next_at = min(self._times.values(), default=math.inf)


# Patience: the time that a worker waits for silent workers before giving up on them.


_MEMORY = 10


@dataclass(slots=True, kw_only=True)
class Patience:
    """A deadline learned from the training and waiting times of past rounds.

    The deadline is `factor` times the longest training or wait of the last ten rounds, plus
    `slack`; waits never raise it above `first`. The transport usually notices lost machines
    long before that; this deadline is for silent workers and lost messages.

    An idle worker announces itself four times per `slack`, so that workers that wait for the
    same silent worker do not consider this one silent, too, and find it again if they have lost
    it. Its own timers may be far away, and it need have nothing to send. One that trains does
    not: training may hang. After `factor` deadlines, announcements no longer count: a message
    was lost, and workers wait for each other.

    Only a worker itself knows how long its work takes: partners that have not waited for it
    lately would give it up. So each asks the others for a silence, and the longest one that is
    asked for is the least deadline.

    Args:
        factor: At least 1.
        slack: Seconds, above 0.
        first: Seconds to wait during the first round; also the limit up to which waits raise
            the deadline.
        most: Longest silence that is granted to others.

    Attributes:
        asked: Longest silence that another worker asks for, in seconds.
        trains: Whether this worker has begun to train; a parameter server never does.

    >>> patience = Patience(factor=3.0, slack=1.0)
    >>> patience.watch(True, now=5.0)
    >>> patience.watch(False, now=7.0)
    >>> patience.next_round(now=7.0)
    >>> patience.deadline
    7.0
    """

    factor: float = 3.0
    slack: Seconds = 10.0
    first: Seconds = 600.0
    most: Seconds = 3600.0
    asked: Seconds = field(default=0.0, init=False)
    trains: bool = field(default=False, init=False)
    _rounds: deque[Seconds] = field(default_factory=lambda: deque(maxlen=_MEMORY), init=False)
    _worked: Seconds = field(default=0.0, init=False)
    _waited: Seconds = field(default=0.0, init=False)
    _longest_work: Seconds = field(default=0.0, init=False)
    _since: Seconds | None = field(default=None, init=False)
    _has_given_up: bool = field(default=False, init=False)
    _waited_before: Seconds = field(default=0.0, init=False)
    check_at: Seconds = field(default=math.inf, init=False)
    """Time of the next announcement, and check for silent workers if the worker waits; infinity
    unless idle.
    """

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and self.slack > 0 and self.first > 0):
            raise ValueError(f"factor must be >= 1, slack and first > 0, got {self}")

    def worked(self, seconds: Seconds) -> None:
        """Record the duration of a piece of training."""
        self._worked += seconds
        self._longest_work = max(self._longest_work, self._worked)

    def watch(self, is_idle: bool, now: Seconds, *, has_timer: bool = False) -> None:
        """Record whether the worker has no work, and whether it has a timer.

        Without either, only a message can wake it: it waits.
        """
        is_waiting = is_idle and not has_timer
        if is_waiting and self._since is None:
            self._since, self._has_given_up = now, False
            self.check_again(now)
        elif not is_waiting and self._since is not None:
            self._end_wait(now)
            self._since = None
        if not is_idle:
            self.check_at = math.inf
        elif self.check_at == math.inf:
            self.check_again(now)

    @property
    def is_waiting(self) -> bool:
        """Whether only a message can wake the worker."""
        return self._since is not None

    def _end_wait(self, now: Seconds) -> None:
        assert self._since is not None
        self._waited_before += now - self._since
        if not self._has_given_up:  # otherwise it says nothing about the others' durations
            self._waited = max(self._waited, now - self._since)

    def next_round(self, now: Seconds) -> None:
        """Record the end of a round, even if the worker did not wait in it.

        A worker that never trains, such as a parameter server, then waits for the next round.
        """
        if self._since is not None:
            self._end_wait(now)
            self._since, self._has_given_up = now, False
        self._rounds.append(max(self._worked, self._waited))
        self._worked = self._waited = 0.0

    def total_waited(self, now: Seconds) -> Seconds:
        """Seconds of all waits, the present one included; other threads may ask."""
        since = self._since
        return self._waited_before + (0.0 if since is None else max(0.0, now - since))

    @property
    def deadline(self) -> Seconds:
        """Seconds for which the other workers may be silent."""
        if not self._rounds:
            return self.first
        longest = max(*self._rounds, self._worked, self._waited)
        # If a worker were always just in time, waits would multiply each other.
        limit = max(self.first, self._own_work)
        return max(min(self.factor * longest + self.slack, limit), min(self.asked, self.most))

    @property
    def asks(self) -> Seconds:
        """Seconds for which this worker asks the others to bear its silence.

        Rounded up to a power of two, so that it seldom changes, and statuses seldom tell it.
        """
        # A round may end while its training goes on.
        is_known = not self.trains or (self._rounds and self._longest_work > 0)
        return 2.0 ** math.ceil(math.log2(self._own_work if is_known else self.first))

    @property
    def _own_work(self) -> Seconds:
        return self.factor * self._longest_work + self.slack

    def check_again(self, now: Seconds) -> None:
        """Postpone `check_at`."""
        self.check_at = now + self.slack / 4

    def silent(
        self, heard_at: Mapping[Rank, Seconds], spoke_at: Mapping[Rank, Seconds], now: Seconds
    ) -> list[Rank]:
        """List the workers to give up on; see `is_over`."""
        return [r for r, at in heard_at.items() if self.is_over(at, spoke_at[r], now)]

    def is_over(self, heard_at: Seconds, spoke_at: Seconds, now: Seconds) -> bool:
        """Whether to give up on a worker that was last heard from at these times.

        Args:
            heard_at: Time at which its last algorithm message arrived.
            spoke_at: Time at which its last status arrived.
            now: Current time on the clock of the wait.
        """
        assert self._since is not None
        silent = now - max(self._since, heard_at, spoke_at)
        # Its messages in the meantime may be useless, so speaking alone does not reset the
        # limit.
        waited = now - self._since
        is_over = silent >= self.deadline or waited >= self.factor * self.deadline
        self._has_given_up |= is_over
        return is_over
