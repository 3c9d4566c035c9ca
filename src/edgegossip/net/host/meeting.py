"""Meeting: conditions for beginning without some workers, and for ending with too few left."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.host.peers import Peers
from edgegossip.net.host.receiving import Post
from edgegossip.net.host.settings import HostSettings
from edgegossip.net.runtime import Course

_LOG = logging.getLogger("edgegossip.net")
_SOON: Seconds = 3.0
_LATER: Seconds = 30.0
_AGAIN: Seconds = 1.0
"""Seconds between two statuses during the meeting, in case one was lost."""
_STRAGGLERS: Seconds = 2.0
"""Seconds to wait for missing workers once other workers have begun."""


class Meeting:
    """Watches the number of present workers before and during the run.

    Args:
        peers: The other workers.
        post: Post with the other workers' introductions.
        settings: Required number of workers and length of waits.
    """

    def __init__(self, peers: Peers, post: Post, settings: HostSettings) -> None:
        self._peers = peers
        self._post = post
        self._introductions = post.introductions
        self._settings = settings
        self._calls = f", calling {', '.join(post.calls)}" if post.calls else ""
        self._say_at: Seconds | None = None
        self._few_since: Seconds = math.inf
        self.shortage: str | None = None
        """Reason why the run cannot continue, if any."""

    # Before the run.

    def meet(
        self,
        take_next: Callable[[Seconds], Course[None]],
        now: Callable[[], Seconds],
        has_stopped: Callable[[], bool],
    ) -> Course[None]:
        """Wait until all workers are present, or until waiting is pointless.

        Args:
            take_next: Waits until the given time at most and takes an item.
            now: Returns the host's time.
            has_stopped: Returns whether the host was stopped.

        Raises:
            NetworkError: If the transport cannot be opened, too few workers join, or most of
                them have different settings.
        """
        peers, deadline = self._peers, now() + self._settings.meet_seconds
        try:
            self._post.open(lambda: not has_stopped() and now() < deadline)
        except NetworkError:
            if not has_stopped():
                raise
            return
        again = now() + _AGAIN
        while not (peers.are_all_here or has_stopped()) and now() < deadline:
            yield from take_next(min(deadline, again))
            self._wait(now())
            if now() >= again:
                again = now() + _AGAIN
                self._post.tell_all(again=True)
            if peers.began_at is not None:
                deadline = min(deadline, now() + _STRAGGLERS)
        if not has_stopped():
            self._conclude()

    def _wait(self, now: Seconds) -> None:
        """Check the majority; log at intervals which workers are missing."""
        self._introductions.require_majority(is_waiting=True)
        if self._say_at is None:
            self._say_at = now + _SOON
        elif now >= self._say_at:
            self._say_at = now + _LATER
            missing = self._peers.missing
            _LOG.warning("still trying to reach %s%s", workers(missing), self._calls)

    def _conclude(self) -> None:
        """End the wait; raise `NetworkError` if the run cannot begin."""
        self._introductions.require_majority(is_waiting=False)
        missing, settings = self._peers.missing, self._settings
        num_here = self._peers.num_workers - len(missing)
        if num_here < min(settings.min_to_begin, self._peers.num_workers):
            ended = " ".join(map(str, sorted({*missing, *settings.ended})))
            raise NetworkError(
                f"{num_here} of the {settings.min_to_begin} workers that a run needs to begin "
                f"came within {settings.meet_seconds:g} s; {workers(missing)} cannot be reached"
                f"{self._calls}. Start them with the same recipe and --name, see which "
                "workers `edgegossip doctor` reaches, name those that have finished (--ended "
                f"{ended}), or require fewer (--min-workers 1)"
            )
        if missing:
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


def workers(ranks: Sequence[Rank]) -> str:
    """Name workers in a sentence.

    >>> workers([2]), workers([0, 1])
    ('worker 2', 'workers 0, 1')
    """
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
