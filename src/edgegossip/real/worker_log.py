"""A worker's log on a real machine; a failure to write it does not end training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.protocol import Note, Rank, Seconds
from edgegossip.real.lapse import Lapse
from edgegossip.runs.events import EventLog, whole_lines
from edgegossip.runs.files import ReservedFile
from edgegossip.runs.tracking import Follower, TrackedRun, Tracker

NOTES_A_SECOND, NOTES_AT_ONCE = 10, 100
"""Limits of stored notes: average per second, and a burst."""
_LAST_LINES = 2**16
"""Bytes reserved for the last lines, more than Python buffers."""
_LOG = logging.getLogger("edgegossip.real")


class Diary(EventLog):
    """An `EventLog` that tolerates a full disk, so that training continues.

    On a full disk, lines are lost, except the last ones. A line is lost as a whole: Python's
    buffer keeps what it could not write, and takes no line for which it has no place.

    Args:
        path: Path of the log; an existing log continues after its last complete line.

    Attributes:
        incarnation: Number of earlier starts of this worker.

    Raises:
        RunFolderError: If the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.incarnation, size = _previous(path)
        self._has_dropped = False
        self._num_notes = 0
        self._lapse = Lapse("new log lines")
        self._room = ReservedFile(path, _LAST_LINES)
        super().__init__(path, size)

    def show(self) -> None:
        if self._try(super().show):
            self._lapse.end()

    def noted(self, now: Seconds, rank: Rank, note: Note) -> None:
        """Keep a note unless notes exceed their limit."""
        if self._num_notes >= NOTES_AT_ONCE + NOTES_A_SECOND * now:
            if not self._has_dropped:
                _LOG.warning("more than %d notes per second; most are dropped", NOTES_A_SECOND)
            self._has_dropped = True
            return
        self._num_notes += 1
        super().noted(now, rank, note)

    def end(self, **fields: object) -> None:
        """Write the line "ended", and close the file."""
        self._room.release()
        self._try(super().show)  # so that the buffer has a place for the line
        self.write("ended", **fields)
        self.close()

    def close(self) -> None:
        self._room.release()
        self._try(super().close)
        self.abandon()

    def _write(self, line: dict[str, Any]) -> None:
        self._try(partial(super()._write, line))

    def _try(self, write: Callable[[], None]) -> bool:
        """Write; return whether it succeeded."""
        try:
            write()
        except RunFolderError as error:
            self._lapse.begin(error)
            return False
        return True


def _previous(path: Path) -> tuple[int, int]:
    """Number of earlier starts of this worker, and the end of the last complete line."""
    if not path.exists():
        return 0, 0
    incarnation = size = 0
    for line in whole_lines(path):
        incarnation += line.startswith(b'{"type":"worker"')
        size += len(line)
    return incarnation, size


# Tracking of one worker on a real machine.


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
