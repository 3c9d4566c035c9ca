"""The end of a run: the time at which a finished worker may leave."""

from __future__ import annotations

import math

from edgegossip.core.protocol import Evaluated, Event, Predicted, Seconds, TimerFired, Trained
from edgegossip.net.host_settings import HostSettings
from edgegossip.net.post import Post

_PATIENCE = 10.0
"""Time for which a finished worker stays to answer, as a multiple of the run so far."""


class Ending:
    """Decides whether the run is over, and when to report progress to the other workers.

    A finished worker stays until all workers have finished and all messages have arrived (or
    nothing has happened for `settle_seconds`), because other workers may need its answers. It
    leaves earlier only if at least half of all present workers, including itself, have finished
    and the rest take ten times as long again. A single worker's claims must not hold up the
    other workers forever, even in a run of two.

    Args:
        settings: Durations of waits.
        post: Source of the other workers' reports.
    """

    def __init__(self, settings: HostSettings, post: Post) -> None:
        self.has_finished = False
        self._settings = settings
        self._post = post
        self._finished_at: Seconds = math.inf
        self._trained_at: Seconds = math.inf
        self._changed_at: Seconds = math.inf

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

    @property
    def tell_at(self) -> Seconds:
        """Time of the next report of counts, unless an event comes first."""
        return self._changed_at + self._settings.quiet_seconds

    def is_over(self, now: Seconds) -> bool:
        """Whether no other worker needs this one any more."""
        if not self.has_finished:
            return False
        quiet, settings = now - self._changed_at, self._settings
        if quiet > 2 * settings.quiet_seconds and self._post.is_over:
            return True
        unfinished, active = self._post.peers.unfinished, self._post.peers.active
        if not unfinished and quiet > settings.settle_seconds:
            return True  # the counts still disagree, so a message was lost in flight
        # One that goes on sending after its end keeps nobody for ever, either.
        are_few = 2 * len(unfinished) <= len(active) + 1
        latest = (1 + _PATIENCE) * self._finished_at + settings.settle_seconds
        return are_few and now > latest
