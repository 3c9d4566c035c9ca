"""When a worker begins without some of the others, and when too few are left to go on."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from edgegossip.core.errors import NetworkError
from edgegossip.core.protocol import Rank, Seconds
from edgegossip.net.host_settings import HostSettings
from edgegossip.net.introduction import Introductions
from edgegossip.net.peers import Peers

_LOG = logging.getLogger("edgegossip.net")
_SOON: Seconds = 3.0
_LATER: Seconds = 30.0


class Meeting:
    """Watches how many workers have come, before the run and while it lasts.

    Args:
        peers: The others.
        introductions: Their settings.
        settings: How many are needed, and how long to wait for them.
        calls: The endpoints that this worker calls, for the log.
    """

    def __init__(
        self,
        peers: Peers,
        introductions: Introductions,
        settings: HostSettings,
        calls: Sequence[str],
    ) -> None:
        self._peers = peers
        self._introductions = introductions
        self._settings = settings
        self._calls = f", calling {', '.join(calls)}" if calls else ""
        self._say_at: Seconds | None = None
        self._few_since: Seconds = math.inf
        self.shortage: str | None = None
        """Why the run cannot go on."""

    # Before it.

    def wait(self, now: Seconds) -> None:
        """Not all are here: say so now and then.

        Raises:
            NetworkError: If most of the others have other settings.
        """
        self._introductions.require_majority(is_waiting=True)
        if self._say_at is None:
            self._say_at = now + _SOON
        elif now >= self._say_at:
            self._say_at = now + _LATER
            missing = self._peers.missing
            _LOG.warning("still trying to reach %s%s", workers(missing), self._calls)

    def conclude(self) -> None:
        """The wait is over.

        Raises:
            NetworkError: If too few are here, or most of those have other settings.
        """
        self._introductions.require_majority(is_waiting=False)
        missing, settings = self._peers.missing, self._settings
        num_here = self._peers.num_workers - len(missing)
        if num_here < min(settings.min_to_begin, self._peers.num_workers):
            raise NetworkError(
                f"{num_here} of the {settings.min_to_begin} workers that a run needs to begin "
                f"came within {settings.meet_seconds:g} s; {workers(missing)} cannot be reached"
                f"{self._calls}. Start them with the same recipe and --name, see whom "
                "`edgegossip doctor` reaches, or ask for fewer (--min-workers 1)"
            )
        if missing:
            what = "absent, or of other settings; their shares of the data go untrained"
            _LOG.warning("beginning without %s: %s", missing, what)

    # While it lasts.

    @property
    def ends_at(self) -> Seconds:
        """When there will have been too few for too long; infinity for never."""
        return self._few_since + self._settings.meet_seconds

    def has_too_few(self, now: Seconds) -> bool:
        """Whether there have been fewer workers than needed for too long; sets `shortage`."""
        needed, missing = self._settings.min_workers, self._peers.lost
        if self._peers.num_workers - len(missing) >= needed:
            self._few_since = math.inf
        elif self._few_since == math.inf:
            self._few_since = now
            _LOG.warning(
                "%s cannot be reached, and fewer than %d workers are left: going on for %g s",
                workers(missing),
                needed,
                self._settings.meet_seconds,
            )
        if now < self.ends_at:
            return False
        self.shortage = (
            f"fewer than {needed} workers were left for {self._settings.meet_seconds:g} s: "
            f"{workers(missing)} cannot be reached. Start them again, then this one, which "
            "goes on from its checkpoint if it keeps any; --min-workers says how many it takes"
        )
        return True


def workers(ranks: Sequence[Rank]) -> str:
    """Name workers in a sentence.

    >>> workers([2]), workers([0, 1])
    ('worker 2', 'workers 0, 1')
    """
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
