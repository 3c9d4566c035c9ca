"""Lines in the log that say how a worker gets on."""

from __future__ import annotations

import logging
from typing import Any

from edgegossip.contract.protocol import Seconds
from edgegossip.net.host.host import Host
from edgegossip.runs.experiment import Experiment

_LOG = logging.getLogger("edgegossip.real")
EVERY: Seconds = 30.0
"""Seconds between two lines."""


class ProgressLines:
    """A chore that logs a worker's round, speed, waiting, peers and remaining time.

    Speed and waiting are those since the line before, so that no line is stale: a mean since
    the start would hide that a worker has become slow, or waits for a lost one.

    Args:
        host: The worker's host.
        experiment: Its experiment, with the time limit of this run.
    """

    def __init__(self, host: Host[Any], experiment: Experiment) -> None:
        self._host = host
        self._experiment = experiment
        self._last: tuple[Seconds, int, Seconds] | None = None
        self._began: tuple[Seconds, float] = (0.0, 0.0)

    def due(self, now: Seconds) -> Seconds:
        """Log a line if the run has begun; return when the next is due."""
        host = self._host
        if not host.peers.has_begun:
            return now + 1.0
        seen = (now, host.trainings.num_samples, host.waiting_seconds)
        share = self._experiment.completed_share(now, [host.state.round])
        if self._last is None:  # nothing to compare with; a resumed worker begins midway
            self._began = (now, share)
        else:
            line, fields = self._line(share, self._last, seen)
            _LOG.info("%s", line, extra=fields)
        self._last = seen
        return now + EVERY

    def _line(
        self,
        share: float,
        before: tuple[Seconds, int, Seconds],
        seen: tuple[Seconds, int, Seconds],
    ) -> tuple[str, dict[str, float]]:
        """The line, and its numbers by name, for a log in JSON."""
        now, samples, waited = (new - old for new, old in zip(seen, before, strict=True))
        peers = [*dict(self._host.peers).values()]
        fields: dict[str, float] = {
            "round": self._host.state.round,
            "completed_share": share,
            "samples_per_second": samples / now,
            "waiting_share": min(1.0, max(0.0, waited / now)),
            "peers": len(peers),
            "peers_in_reach": sum(peer.is_reachable for peer in peers),
            "peers_lost": sum(peer.is_lost for peer in peers),
        }
        words = [
            f"round {fields['round']:,}",
            f"{share:.0%} done",
            f"{fields['samples_per_second']:,.0f} samples/s",
            f"{fields['waiting_share']:.0%} waiting",
            f"{fields['peers_in_reach']} of {len(peers)} peers in reach",
        ]
        if fields["peers_lost"]:
            words.append(f"{fields['peers_lost']} lost")
        since, first = self._began
        if share > first:
            left = fields["seconds_left"] = (seen[0] - since) * (1 - share) / (share - first)
            words.append(f"about {left:,.0f} s left")
        return ", ".join(words), fields
