"""A worker's log on a real machine; a failure to write it does not end training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from edgegossip.core.errors import RunFolderError
from edgegossip.core.protocol import Note, Rank, Seconds
from edgegossip.experiments.event_log import EventLog, whole_lines

NOTES_A_SECOND, NOTES_AT_ONCE = 10, 100
"""Limits of stored notes: average per second, and a burst."""
_LOG = logging.getLogger("edgegossip.deploy")


class Diary(EventLog):
    """An `EventLog` that tolerates a full disk, so that training continues.

    Args:
        path: Path of the log; an existing log continues after its last complete line.

    Attributes:
        incarnation: Number of earlier starts of this worker.

    Raises:
        RunFolderError: If the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.incarnation, size = _previous(path)
        self._has_ended = self._has_dropped = False
        self._num_notes = 0
        super().__init__(path, size)

    def show(self) -> None:
        self._try(super().show)

    def noted(self, now: Seconds, rank: Rank, note: Note) -> None:
        """Keep a note unless notes exceed their limit."""
        if self._num_notes >= NOTES_AT_ONCE + NOTES_A_SECOND * now:
            if not self._has_dropped:
                _LOG.warning("more than %d notes per second; most are dropped", NOTES_A_SECOND)
            self._has_dropped = True
            return
        self._num_notes += 1
        super().noted(now, rank, note)

    def close(self) -> None:
        self._try(super().close)
        self.abandon()

    def _write(self, line: dict[str, Any]) -> None:
        self._try(partial(super()._write, line))

    def _try(self, write: Callable[[], None]) -> None:
        if self._has_ended:
            return
        try:
            write()
        except RunFolderError as error:
            if not self._has_ended:
                _LOG.warning("%s - training continues, its log ends here", error)
            self._has_ended = True


def _previous(path: Path) -> tuple[int, int]:
    """Number of earlier starts of this worker, and the end of the last complete line."""
    if not path.exists():
        return 0, 0
    incarnation = size = 0
    for line in whole_lines(path):
        incarnation += line.startswith(b'{"type":"worker"')
        size += len(line)
    return incarnation, size
