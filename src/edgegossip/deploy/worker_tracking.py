"""Tracking of one worker on a real machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgegossip.core.protocol import Rank, Seconds
from edgegossip.experiments.event_log import EventLog
from edgegossip.experiments.tracking import Follower, TrackedRun, Tracker

_INTERVAL: Seconds = 2.0


class WorkerTracking:
    """Passes a worker's numbers to trackers, every two seconds and at its end.

    Args:
        trackers: The trackers.
        header: The experiment, as in `experiment.json`.
        rank: Rank of the worker.
        out: Folder of the worker.
        log: Log of the worker.

    Attributes:
        chores: Chores of the worker's host; empty without trackers.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        header: Mapping[str, Any],
        rank: Rank,
        out: Path,
        log: EventLog,
    ) -> None:
        name = f"{header['name']} worker {rank}"
        run = TrackedRun(name=name, folder=out, header={**header, "name": name, "rank": rank})
        self._follower = Follower(trackers, run)
        self._log = log
        self.chores: tuple[Callable[[Seconds], Seconds], ...] = (
            (self._tell,) if trackers else ()
        )

    def _tell(self, now: Seconds) -> Seconds:
        loss = self._log.take_training_loss()
        numbers = {
            **({} if loss is None else {"training_loss": loss}),
            "bytes_sent": self._log.bytes_sent,
            "samples_processed": self._log.samples_processed,
            "mean_staleness": self._log.mean_staleness,
        }
        self._follower.log(numbers, step=self._log.samples_processed, seconds=now)
        return now + _INTERVAL

    def end(self, now: Seconds) -> None:
        """Report the last numbers, and the numbers of `summary.json`."""
        self._tell(now)
        self._follower.end()
