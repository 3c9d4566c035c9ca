"""When a worker that has no work left may leave the run."""

from __future__ import annotations

import math

from edgegossip.core.protocol import Evaluated, Event, Predicted, Seconds, TimerFired
from edgegossip.net.host_settings import HostSettings
from edgegossip.net.post import Post

_PATIENCE = 10.0
"""A worker that has finished answers the others for so many times as long as it took."""


class Ending:
    """Knows whether all is over, and when to tell the others how far one is.

    A worker that has finished stays until all have, and all that was sent has arrived: others
    may need its answers. It leaves earlier only if at least half of all that are there, itself
    included, have finished and the rest takes ten times as long: what one worker says of itself
    must not keep the others for ever, and not the only other one.

    Args:
        settings: How long to wait.
        post: Knows what the others have said.
    """

    def __init__(self, settings: HostSettings, post: Post) -> None:
        self.has_finished = False
        self._settings = settings
        self._post = post
        self._finished_at: Seconds = math.inf
        self._changed_at: Seconds = math.inf

    def changed(self, now: Seconds, event: Event | None = None) -> None:
        """Something happened to the algorithm; what it has asked for itself keeps nobody."""
        if not isinstance(event, TimerFired | Evaluated | Predicted):
            self._changed_at = now

    def finish(self, now: Seconds) -> None:
        """No work of its own is left."""
        self.has_finished, self._finished_at = True, now

    @property
    def tell_at(self) -> Seconds:
        """When to tell the others one's counts, if nothing happens before."""
        return self._changed_at + self._settings.quiet_seconds

    def is_over(self, now: Seconds) -> bool:
        """Nobody needs this worker any more."""
        if not self.has_finished:
            return False
        quiet, settings = now - self._changed_at, self._settings
        if quiet > 2 * settings.quiet_seconds and self._post.is_over:
            return True
        unfinished, active = self._post.peers.unfinished, self._post.peers.active
        if not unfinished:
            # The counts still disagree, so a message was lost in flight.
            return quiet > settings.settle_seconds
        are_few = 2 * len(unfinished) <= len(active) + 1
        latest = (1 + _PATIENCE) * self._finished_at + settings.settle_seconds
        return are_few and now > latest
