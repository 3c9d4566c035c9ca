"""Files that a worker writes while it trains: log, snapshots, and numbers for trackers.

A full disk never ends training: what cannot be written is left out, with one warning.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.protocol import Note, Rank, Seconds
from edgegossip.net.runtime import BackgroundThread
from edgegossip.runs.events import EventLog, whole_lines
from edgegossip.runs.files import ReservedFile, write_atomically
from edgegossip.runs.tracking import Follower, TrackedRun, Tracker

_LOG = logging.getLogger("edgegossip.real")
_SHORTEST: Seconds = 0.5
"""Shortest time between two snapshots."""
MAX_BYTES = 2**30
"""Maximum total bytes of one worker's snapshots; large models get fewer snapshots."""
NOTES_A_SECOND, NOTES_AT_ONCE = 10, 100
"""Limits of stored notes: average per second, and a burst."""
_LAST_LINES = 2**16
"""Bytes reserved for the last lines, more than Python buffers."""
_INTERVAL: Seconds = 2.0
"""Seconds between two reports to trackers."""


class DiskWarning:
    """Warns once when something cannot be written, and says once when it can be again.

    Args:
        what: What training continues without, e.g. "a new checkpoint".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lasts = False

    def begin(self, reason: object) -> None:
        """Report a failed attempt, unless the last one failed, too."""
        if not self._lasts:
            _LOG.warning("%s - training continues without %s", reason, self._what)
        self._lasts = True

    def end(self) -> None:
        """Report a successful attempt if the last one failed."""
        if self._lasts:
            _LOG.info("there is room again for %s", self._what)
        self._lasts = False


def schedule() -> Iterator[Seconds]:
    """The times of snapshots: at first every half second, then at the resolution of a plot.

    >>> times = schedule()
    >>> [next(times) for _ in range(3)]
    [0.0, 0.5, 1.0]
    """
    time = 0.0
    while True:
        yield time
        time += max(_SHORTEST, time / 60)


class Snapshots:
    """Writes snapshots during training; `due` is a chore for the host.

    Args:
        folder: Folder, made if missing.
        estimate: Returns the current parameters to evaluate, [num_params], or an empty tensor
            while this worker's parameters do not count.
        checkpoint_bytes: Returns the size of the last checkpoint, 0 if there is none. No
            snapshot takes the room of two checkpoints: the last and the next one.
    """

    def __init__(
        self,
        folder: Path,
        estimate: Callable[[], Tensor],
        checkpoint_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._folder = folder
        self._estimate = estimate
        self._checkpoint_bytes = checkpoint_bytes
        self._disk_warning = DiskWarning("new snapshots")
        self._times = enumerate(schedule())
        self._next = next(self._times)
        self._num_bytes = 0
        # Writing takes as long as the disk does, and the host's thread handles messages.
        self._writer = BackgroundThread("snapshots")
        folder.mkdir(parents=True, exist_ok=True)

    def due(self, now: Seconds) -> Seconds:
        """Take the snapshot that is due; return the time of the next snapshot."""
        # After a pause, several are due; all would hold the same parameters, so only the last
        # one is taken.
        index = self._next[0]
        while self._next[1] <= now:
            index = self._next[0]
            self._next = next(self._times)
        params = self._estimate()
        num_bytes = params.numel() * params.element_size()
        if self._num_bytes + num_bytes <= MAX_BYTES and self._has_room(num_bytes):
            self._num_bytes += num_bytes
            self._writer.submit(lambda: self._write(index, params))
        return self._next[1]

    def _has_room(self, num_bytes: int) -> bool:
        needed = num_bytes + 2 * max(num_bytes, self._checkpoint_bytes())
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            self._disk_warning.begin(error)
            return False
        if free < needed:
            self._disk_warning.begin(
                f"{free / 1e6:.1f} MB are free in {self._folder}, and a snapshot must leave "
                f"room for two checkpoints ({needed / 1e6:.1f} MB in all)"
            )
        return free >= needed

    def close(self) -> None:
        """Wait up to 60 s for all snapshots to be written."""
        self._writer.close(60.0)

    def _write(self, index: int, params: Tensor) -> None:
        try:
            write_atomically(
                snapshot_path(self._folder, index), safetensors.torch.save({"params": params})
            )
        except RunFolderError as error:
            self._disk_warning.begin(error)
        else:
            self._disk_warning.end()

    def delete(self) -> None:
        """Delete all snapshots, for the room that they take."""
        for index in indices(self._folder):
            with suppress(OSError):
                snapshot_path(self._folder, index).unlink()


def snapshot_path(folder: Path, index: int) -> Path:
    return folder / f"{index:06}.safetensors"


def indices(folder: Path) -> list[int]:
    """Indices of the existing snapshots, in order."""
    found = (path.stem for path in folder.glob("*.safetensors"))
    return sorted(int(stem) for stem in found if stem.isdecimal())


def read_params(
    path: Path, num_params: int | None = None, *, may_be_empty: bool = False
) -> Tensor:
    """Read a snapshot, or a worker's last parameters.

    Args:
        path: Path of the file.
        num_params: Required number of parameters; None for any number.
        may_be_empty: Whether there may also be none.

    Raises:
        RunFolderError: If the file is missing or damaged, or belongs to another model.
    """
    try:
        params = safetensors.torch.load_file(path)["params"]
    except (OSError, LookupError, ValueError, safetensors.SafetensorError) as error:
        raise RunFolderError(f"cannot read {path}: {error!r}; expected parameters") from error
    if params.dim() != 1 or not (
        num_params in (None, len(params)) or (may_be_empty and not len(params))
    ):
        expected = f"[{'num_params' if num_params is None else num_params}]"
        raise RunFolderError(
            f"{path} has parameters of shape {list(params.shape)}, expected {expected}; is it "
            "of another model?"
        )
    if params.dtype != torch.float32:
        raise RunFolderError(f"{path} has parameters of {params.dtype}, expected torch.float32")
    return params


class WorkerEventLog(EventLog):
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
        self._disk_warning = DiskWarning("new log lines")
        self._room = ReservedFile(path, _LAST_LINES)
        super().__init__(path, size)

    def show(self) -> None:
        if self._try(super().show):
            self._disk_warning.end()

    def noted(self, now: Seconds, rank: Rank, note: Note) -> None:
        """Keep a note unless notes exceed their limit."""
        if self._num_notes >= NOTES_AT_ONCE + NOTES_A_SECOND * now:
            if not self._has_dropped:
                _LOG.warning("more than %d notes per second; most are dropped", NOTES_A_SECOND)
            self._has_dropped = True
            return
        self._num_notes += 1
        super().noted(now, rank, note)

    def link_changed(
        self, rank: Rank, now: Seconds, peer: Rank, reason: str, is_up: bool
    ) -> None:
        """Write the change and show it at once: a lost worker can't say so in its own log."""
        what = "connected" if is_up else "disconnected"
        self.write(what, time=now, rank=rank, peer=peer, reason=reason)
        self.show()

    def end(self, **fields: object) -> None:
        """Write the line "ended", and close the file."""
        # On a full disk, the reserved bytes are what the buffered lines go to; only then does
        # the buffer have a place for the last line, without which the worker counts as killed.
        self._room.release()
        self._try(super().show)
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
            self._disk_warning.begin(error)
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
