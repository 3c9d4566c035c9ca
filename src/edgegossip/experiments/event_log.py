"""`events.jsonl`: what happened in a run, one JSON object a line, in order of virtual time.

`docs/run-folder.md` is the schema. Fields of wall-clock origin begin with ``wall_``; all
others are the same bytes whenever the same experiment runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgegossip.core.errors import RunFolderError
from edgegossip.core.protocol import Message, Rank, Seconds, Trained


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
        try:
            self._file = path.open("r+b" if offset else "wb")
            self._file.truncate(offset)
            self._file.seek(offset)
        except OSError as error:
            raise _unwritable(path, error) from error

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

    def flush(self) -> int:
        """Bring all lines to the disk's file; returns its size in bytes."""
        self._flush_sends()
        try:
            self._file.flush()
            return self._file.tell()
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()

    def counters(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        names = ("bytes_sent", "samples_processed", "total_staleness", "num_received")
        return {name: getattr(self, name) for name in (*names, "num_lost")}

    def restore(self, counters: dict[str, int]) -> None:
        for name, value in counters.items():
            setattr(self, name, value)

    def _flush_sends(self) -> None:
        line, self._sends = self._sends, None
        if line is not None:
            self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise _unwritable(self._path, error) from error


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"cannot write {path}: {error.strerror}; free some space or choose another --out"
    )
