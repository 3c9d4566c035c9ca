"""The log of a worker on a real machine: it may end, training does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from edgegossip.core.errors import RunFolderError
from edgegossip.core.observer import Observer
from edgegossip.core.protocol import Message, Rank, Seconds, Trained
from edgegossip.experiments.event_log import EventLog

_LOG = logging.getLogger("edgegossip.net")


class Diary(Observer):
    """An `EventLog` whose end is no reason to stop: a full disk is no reason to lose a model.

    Args:
        path: Of the log; one that is there goes on after its last whole line.

    Raises:
        RunFolderError: If the file cannot be written at all.
    """

    def __init__(self, path: Path) -> None:
        self.incarnation, size = _previous(path)
        self._log: EventLog | None = EventLog(path, size)
        self.bytes_sent = self.samples_processed = 0

    def write(self, event: str, /, **fields: object) -> None:
        """Add a line."""
        self._try(lambda log: log.write(event, **fields))

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self.samples_processed += event.num_samples
        self._try(lambda log: log.trained(now, rank, start, event))

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        self.bytes_sent += num_bytes
        self._try(lambda log: log.sent(now, rank, receiver, message, num_bytes, uplink))

    def received(self, now: Seconds, rank: Rank, sender: Rank, staleness: int) -> None:
        self._try(lambda log: log.received(now, rank, sender, staleness))

    def lost(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, reason: str
    ) -> None:
        self._try(lambda log: log.lost(now, rank, sender, message, reason))

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        self._try(lambda log: log.changed(now, rank, what))

    def show(self) -> None:
        """Let readers see what there is."""
        self._try(EventLog.show)

    @property
    def mean_staleness(self) -> float:
        """Of the messages received, in rounds."""
        log = self._log
        return 0.0 if log is None else log.total_staleness / max(1, log.num_received)

    def close(self) -> None:
        self._try(EventLog.close)

    def _try(self, write: Callable[[EventLog], object]) -> None:
        if self._log is None:
            return
        try:
            write(self._log)
        except RunFolderError as error:
            _LOG.warning("%s - training goes on, its log ends here", error)
            self._log.abandon()
            self._log = None


def _previous(path: Path) -> tuple[int, int]:
    """How often this worker was started before, and where the last whole line ends."""
    if not path.exists():
        return 0, 0
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    return content[:size].count(b'{"type":"worker"'), size
