"""Meeting and ending: when a worker begins without some others, and when it may leave."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import (
    Evaluated,
    Event,
    Predicted,
    Rank,
    Seconds,
    TimerFired,
    Trained,
)
from edgegossip.net.host.introduction import Introductions
from edgegossip.net.host.peers import Peers
from edgegossip.net.host.sending import Sending
from edgegossip.net.host.settings import HostSettings
from edgegossip.net.host.status import Phase

_LOG = logging.getLogger("edgegossip.net")
_SOON: Seconds = 3.0
_LATER: Seconds = 30.0
_AGAIN: Seconds = 1.0
"""Seconds between two statuses during the meeting, in case one was lost."""
_STRAGGLERS: Seconds = 2.0
"""Seconds to wait for missing workers once other workers have begun."""
_OPEN_WAIT: Seconds = 1.0
"""Seconds for which an open run waits for others once it has enough to begin."""
_PATIENCE = 10.0
"""Time for which a finished worker stays to answer, as a multiple of the run so far."""


class Meeting:
    """Watches the number of present workers before and during the run.

    Args:
        peers: The other workers.
        sending: Tells them this worker's status.
        introductions: The other workers' introductions.
        settings: Required number of workers and length of waits.
        calls: Endpoints to which the transport connects.

    Attributes:
        deadline: Time at which the wait ends, even if workers are missing.
    """

    deadline: Seconds
    _tell_at: Seconds

    def __init__(
        self,
        peers: Peers,
        sending: Sending,
        introductions: Introductions,
        settings: HostSettings,
        calls: Sequence[str],
    ) -> None:
        self._peers = peers
        self._sending = sending
        self._introductions = introductions
        self._settings = settings
        self._calls = f", calling {', '.join(calls)}" if calls else ""
        self._say_at: Seconds | None = None
        self._has_said = False
        self._enough_since: Seconds = math.inf
        self._few_since: Seconds = math.inf
        self.shortage: str | None = None
        """Reason why the run cannot continue, if any."""

    # Before the run.

    def start(self, now: Seconds) -> None:
        """Begin to wait for the other workers."""
        self.deadline = now + self._settings.meet_seconds
        self._tell_at = now + _AGAIN

    def is_over(self, now: Seconds) -> bool:
        """Whether all workers are present, or waiting for the rest is pointless."""
        return self._peers.are_all_here or now >= self.deadline

    @property
    def wake_at(self) -> Seconds:
        """Time of the next `check`, unless a message comes first."""
        return min(self.deadline, self._tell_at)

    def check(self, now: Seconds) -> None:
        """Check who is here by now; tell the others again, and log who is missing.

        Raises:
            NetworkError: If most workers have different settings.
        """
        self._introductions.require_majority(is_waiting=True)
        if self._say_at is None:
            self._say_at = now + _SOON
        elif now >= self._say_at:
            # At first this is no fault: people start one machine after the other.
            level = logging.WARNING if self._has_said else logging.INFO
            self._say_at, self._has_said = now + _LATER, True
            _LOG.log(level, "waiting for %s%s", workers(self._peers.missing), self._calls)
        # A status may have been lost, and nothing else would repeat it before the run begins.
        if now >= self._tell_at:
            self._tell_at = now + _AGAIN
            self._sending.tell_all(again=True)
        if not self._has_enough:
            self._enough_since = math.inf
        elif self._settings.is_open:
            self._enough_since = min(self._enough_since, now)
            self.deadline = min(self.deadline, self._enough_since + _OPEN_WAIT)
        # The others wait for nobody any more, so waiting much longer only puts this one back.
        if self._peers.began_at is not None:
            self.deadline = min(self.deadline, now + _STRAGGLERS)

    @property
    def _has_enough(self) -> bool:
        """Whether enough workers have come or ended; one that has ended is not missing."""
        num_here = self._peers.num_workers - len(self._peers.missing)
        return num_here >= min(self._settings.min_to_begin, self._peers.num_workers)

    def conclude(self) -> None:
        """End the wait.

        Raises:
            NetworkError: If too few workers have come, or most have different settings.
        """
        self._introductions.require_majority(is_waiting=False)
        missing, settings = self._peers.missing, self._settings
        num_here = self._peers.num_workers - len(missing)
        if not self._has_enough:
            ended = " ".join(map(str, sorted({*missing, *settings.ended})))
            raise NetworkError(
                f"{num_here} of the {settings.min_to_begin} workers that a run needs to begin "
                f"came within {settings.meet_seconds:g} s; {workers(missing)} cannot be reached"
                f"{self._calls}. Start them with the same recipe and --name, see which "
                "workers `edgegossip doctor` reaches, name those that have finished (--ended "
                f"{ended}), or require fewer (--min-workers 1)"
            )
        if settings.is_open:
            _LOG.info(
                "beginning with %d of at most %d workers; others may come at any time",
                num_here,
                self._peers.num_workers,
            )
        elif missing:
            _LOG.warning(
                "beginning without %s: absent, not linked to this worker, or with different "
                "settings; the data of an absent worker is not used",
                workers(missing),
            )

    # During the run.

    @property
    def ends_at(self) -> Seconds:
        """Time at which a shortage of workers ends the run; infinity without a shortage."""
        return self._few_since + self._settings.meet_seconds

    def has_too_few(self, now: Seconds) -> bool:
        """Whether a shortage of workers has lasted too long; sets `shortage`."""
        # A run of one needs nobody, so nobody is looked for.
        needed = self._settings.min_workers
        missing = self._peers.lost if needed > 1 else []
        if self._peers.num_workers - len(missing) >= needed:
            self._few_since = math.inf
        elif self._few_since == math.inf:
            self._few_since = now
            _LOG.warning(
                "%s cannot be reached, and fewer than %d workers are left: continuing for %g s",
                workers(missing),
                needed,
                self._settings.meet_seconds,
            )
        if now < self.ends_at:
            return False
        self.shortage = (
            f"fewer than {needed} workers were left for {self._settings.meet_seconds:g} s: "
            f"{workers(missing)} cannot be reached. Start them again, then this one, which "
            "continues from its checkpoint, if any; --min-workers sets the required number"
        )
        return True


class Ending:
    """Decides whether the run is over, and when to report progress to the other workers.

    A finished worker stays until all workers have finished and all messages have arrived (or
    nothing has happened for `settle_seconds`), because other workers may need its answers. It
    leaves earlier only if at least half of all present workers, including itself, have finished
    and the rest take ten times as long again. A single worker's claims must not hold up the
    other workers forever, even in a run of two.

    Args:
        settings: Durations of waits.
        sending: Knows this worker's phase, and what has not left yet.
        peers: The other workers' reports.
    """

    def __init__(self, settings: HostSettings, sending: Sending, peers: Peers) -> None:
        self.has_finished = False
        self._settings = settings
        self._sending = sending
        self._peers = peers
        self._finished_at: Seconds = math.inf
        self._trained_at: Seconds = math.inf
        self._changed_at: Seconds = math.inf
        self._repeat_at: Seconds = math.inf

    def changed(self, now: Seconds, event: Event | None = None) -> None:
        """Record the time of an event; timers, evaluations and forecasts do not count."""
        if not isinstance(event, TimerFired | Evaluated | Predicted):
            self._changed_at = now
        if isinstance(event, Trained):
            self._trained_at = now

    def finish(self, now: Seconds) -> None:
        """Record that the worker has no work of its own left."""
        # A wait between its last training and its end is a part of the wait for the others.
        self.has_finished, self._finished_at = True, min(now, self._trained_at)
        self._repeat_at = now + self._settings.settle_seconds

    @property
    def tell_at(self) -> Seconds:
        """Time of the next report of counts, unless an event comes first."""
        return self._changed_at + self._settings.quiet_seconds

    def repeats(self, now: Seconds) -> bool:
        """Whether to report again what the others know, unless that report was lost."""
        is_due = now >= self._repeat_at
        if is_due:
            self._repeat_at = now + self._settings.settle_seconds
        return is_due

    def is_over(self, now: Seconds) -> bool:
        """Whether no other worker needs this one any more."""
        if not self.has_finished:
            return False
        quiet, settings, peers = now - self._changed_at, self._settings, self._peers
        unfinished = peers.unfinished
        # Twice, because the others report at these intervals, and their last report must have
        # arrived here. It may still say that something is under way.
        if quiet > 2 * settings.quiet_seconds and not unfinished and self._is_all_said:
            return True
        if not unfinished and quiet > settings.settle_seconds:
            return True  # the counts still disagree, so a message was lost in flight
        # One that goes on sending after its end keeps nobody for ever, either.
        are_few = 2 * len(unfinished) <= len(peers.active) + 1
        latest = (1 + _PATIENCE) * self._finished_at + settings.settle_seconds
        return are_few and now > latest

    @property
    def _is_all_said(self) -> bool:
        """Whether the others know of this worker's end, and no message is under way."""
        sending = self._sending
        has_told = sending.phase == Phase.FINISHED and sending.is_idle
        return has_told and self._peers.is_nothing_under_way


def workers(ranks: Sequence[Rank]) -> str:
    """Name workers in a sentence.

    >>> workers([2]), workers([0, 1])
    ('worker 2', 'workers 0, 1')
    """
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
