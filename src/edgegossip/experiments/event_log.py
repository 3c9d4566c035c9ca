"""`events.jsonl`: what happened in a run, one JSON object a line, in order of virtual time.

`docs/run-folder.md` is the schema. Fields of wall-clock origin begin with ``wall_``; all
others are the same bytes whenever the same experiment runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgegossip.core.errors import RunFolderError
from edgegossip.core.protocol import Message, Rank, Seconds, Trained
from edgegossip.experiments.files import to_json

_KEPT = (
    "bytes_sent",
    "samples_processed",
    "total_staleness",
    "num_received",
    "num_lost",
    "_sends",  # a line that may grow on
)
_READ_AT_ONCE = 2**16


def to_line(event: Mapping[str, Any]) -> bytes:
    """An event as it stands in the file."""
    return to_json(event, separators=(",", ":")).encode() + b"\n"


def whole_lines(path: Path, start: int = 0, end: float = math.inf) -> Iterator[bytes]:
    """The lines between two places of a file, but for a last one that has not ended."""
    while start < end:
        # Not left open: a run may have more workers than a process may have files.
        with path.open("rb") as file:
            file.seek(start)
            lines = file.readlines(_READ_AT_ONCE)
        if not lines:
            return
        for line in lines:
            if start >= end or not line.endswith(b"\n"):
                return
            start += len(line)
            yield line


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run, the experiment first; a last one that a killed process tore is not.

    Raises:
        RunFolderError: If the file cannot be read, is empty, or holds something else.
    """
    number = 0
    try:
        for number, line in enumerate(whole_lines(path), start=1):
            event = json.loads(line)
            if not isinstance(event, dict):
                raise bad_line(path, number, "one JSON object", TypeError(f"got {event!r:.60}"))
            yield event
    except OSError as error:
        raise RunFolderError(
            f"cannot read {path} ({error.strerror}); expected the events of a run - "
            "give the folder that a run wrote"
        ) from error
    except ValueError as error:
        raise bad_line(path, number, "one JSON object", error) from error
    if number == 0:
        raise RunFolderError(f"{path} is empty; expected the events of a run - run it again")


def bad_line(path: Path, number: int, expected: str, error: Exception) -> RunFolderError:
    """What to say of a line, counted from 1, that is not what it should be."""
    return RunFolderError(
        f"{path}, line {number}: expected {expected} "
        f"({type(error).__name__}: {error}); the file is damaged - run the experiment again"
    )


class EventLog:
    """Writes the events of a run; a `sim.Observer`.

    Sends of one message to several receivers at once are one line.

    Args:
        path: The file, emptied unless `offset` is given.
        offset: Go on after this many bytes; what stands behind them is cut off.

    Attributes:
        bytes_sent: By all workers so far.
        samples_processed: By all workers so far.
        total_staleness: Over all messages received so far, in rounds.
        num_received: Messages received so far.
        num_lost: Messages lost so far.

    Raises:
        RunFolderError: If the file cannot be written.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.bytes_sent = 0
        self.samples_processed = 0
        self.total_staleness = 0
        self.num_received = 0
        self.num_lost = 0
        self._path = path
        self._sends: dict[str, Any] | None = None
        if offset:
            _require_size(path, offset)
        try:
            self._file = path.open("r+b" if offset else "wb")
            self._file.truncate(offset)
            self._file.seek(offset)
        except OSError as error:
            raise _unwritable(path, error) from error

    @property
    def mean_staleness(self) -> float:
        """Of the messages received so far, in rounds."""
        return self.total_staleness / max(1, self.num_received)

    def write(self, event: str, /, **fields: object) -> None:
        """Add the line ``{"type": event, **fields}``."""
        self._flush_sends()
        self._write({"type": event, **fields})

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self.samples_processed += event.num_samples
        self.write(
            "trained",
            time=now,
            start=start,
            rank=rank,
            num_steps=event.num_steps,
            num_samples=event.num_samples,
            cost=event.cost,
            loss=event.loss,
        )

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
        line = self._sends
        key = (now, rank, message.kind, message.round)
        if line is None or (line["time"], line["rank"], line["kind"], line["round"]) != key:
            self._flush_sends()
            line = self._sends = {
                "type": "sent",
                "time": now,
                "rank": rank,
                "kind": message.kind,
                "round": message.round,
                "receivers": [],
                "num_bytes": 0,
                "start": uplink[0],
            }
        line["receivers"].append(receiver)
        line["num_bytes"] += num_bytes
        line["end"] = uplink[1]

    def received(self, now: Seconds, rank: Rank, sender: Rank, staleness: int) -> None:
        self.num_received += 1
        self.total_staleness += staleness

    def lost(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, reason: str
    ) -> None:
        self.num_lost += 1
        self.write("lost", time=now, rank=rank, sender=sender, kind=message.kind, reason=reason)

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        self.write(what, time=now, rank=rank)

    def show(self) -> None:
        """Let readers of the file see what there is."""
        try:
            self._flush_sends()
            self._file.flush()
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def flush(self) -> int:
        """Bring all whole lines to the disk; returns the file's size in bytes."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())  # a checkpoint must not outlive what it counts on
            return self._file.tell()
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def close(self) -> None:
        try:
            self._flush_sends()
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file even if not everything can be written; once closed, do nothing."""
        with suppress(OSError):
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, besides the size of the file."""
        return {name: getattr(self, name) for name in _KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for name in _KEPT:
            setattr(self, name, state[name])

    def _flush_sends(self) -> None:
        line, self._sends = self._sends, None
        if line is not None:
            self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(to_line(line))
        except OSError as error:
            raise _unwritable(self._path, error) from error


def _require_size(path: Path, num_bytes: int) -> None:
    found = path.stat().st_size if path.exists() else 0
    if found < num_bytes:
        raise RunFolderError(
            f"{path} has {found} bytes, but its checkpoint goes on after {num_bytes}; delete "
            "the checkpoint, and --resume begins from the start"
        )


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"cannot write {path}: {error.strerror}; free some space or choose another --out"
    )
