"""`events.jsonl`: the events of a run, one JSON object per line, in order of time.

Each line has a `type`. The type of the first line is `experiment`, and that of the last line is
`ended`, unless the run was killed. Times are seconds since the run began: virtual in a
simulation, real on real machines. Names of wall-clock fields begin with ``wall_``; all other
fields are identical, byte for byte, whenever the same experiment is simulated. Arriving
messages are not logged.

Fields of `experiment`, in addition to those of `experiment.json`:
    command: Command that repeats the run, without `--out`, `--threads`, `--pool` and
        `--resume`; null for a run from Python.
    roles: Name of each rank's role: `"worker"`, `"server"`, `"stage-0"`. Absent in old folders,
        where all ranks are workers.
    evaluated: Ranks whose parameters count in the reported model; absent in old folders, where
        all count.
    shard_sizes: Training samples of each rank.
    is_balanced: True if workers train on shares that fit their speeds (EdgeGossip); otherwise
        absent.
    wall_started: First start of the run, UTC, ISO 8601.

Fields of `trained`, a finished piece of work (training cut short by a crash has no line):
    time, start: End and beginning.
    rank: The worker.
    num_steps, num_samples: SGD steps taken, samples processed.
    cost: Cost in training samples: `num_samples` plus the cost of choosing them.
    loss: Mean training loss over the steps.

Fields of `sent`, messages of one kind and round that one worker hands over together:
    time: Time of the handover.
    rank: The sender.
    kind: Kind in the algorithm's words: `"params"`, `"push"`, `"catch-up"`.
    round: Round of the message.
    receivers: Ranks of the receivers.
    num_bytes: Bytes of all these messages, headers included.
    start, end: Beginning of the first transmission and end of the last.

Fields of `lost`, a message that did not arrive:
    time: Time of the drop, or of the expected arrival.
    rank, sender: Receiver and sender.
    kind: As in `sent`.
    reason: `"dropped"`; `"crashed"`, if the receiver crashed, or the sender crashed before the
        message had left; `"partitioned"`; on real machines also `"unreachable"`.

Fields of `crashed`, `recovered` and `finished`, a change in one worker's state:
    time: Time of the change.
    rank: The worker.

Fields of `evaluated`, a measurement of the averaged model:
    time: Time of the evaluation.
    epochs: Samples processed by all workers / training samples.
    accuracy: Accuracy on the test split. A task with other metrics has a field for each
        instead, under its key: `"mae"`, `"bits_per_character"`.
    loss: Mean loss on the test split.
    consensus_distance: Root mean square distance of the workers from their mean.
    bytes_sent: Bytes sent by all workers so far, lost messages included.
    samples_processed: Samples processed by all workers so far, in work that has ended.

Fields of `noted`, numbers that the algorithm recorded (`Note`):
    time: Time of the note.
    rank: The worker.
    kind: Subject, in the algorithm's words.
    numbers: Numbers by name; null if not finite.

Fields of `data`, in the log of a worker on a real machine:
    num_samples: Training samples of this worker.

Fields of `ended`, which a resumed run removes, like all lines after its checkpoint:
    time: Time of the end.
    reason: `"finished"`, `"time limit"`, `"target"` (see `until`), `"all crashed"`,
        `"interrupted"` or `"failed"`.
    error: The failure, or null.
    wall_seconds: Duration of the run, including parts before an interruption; in a worker's
        log, only the last part.
    disagreements: Sentences about workers on real machines that ended with other models than
        the rest; absent if all agree.
    cut_off: Rank and start of each training that the end of the run cut off. Workers that are
        not listed were waiting, unless they had finished or crashed. Absent if the run finished
        by itself, and in old folders, where it is unknown.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.contract.protocol import Message, Note, Rank, Seconds, Trained
from edgegossip.runs.files import to_json

_KEPT = (
    "bytes_sent",
    "samples_processed",
    "total_staleness",
    "num_received",
    "num_lost",
    "commits",
    "_sends",  # a line that may still grow
)
_READ_AT_ONCE = 2**16
_LONGEST_LINE = 2**26
"""Maximum bytes of a line; a longer one is not an event, and might not fit into memory."""
_MAX_WARNINGS = 5
_LOG = logging.getLogger("edgegossip.runs")


def cut_off(reason: str, in_training: Iterable[tuple[Rank, Seconds]]) -> dict[str, Any]:
    """The field `cut_off` of `ended`; empty if the reason excludes training at the end."""
    return {} if reason == "finished" else {"cut_off": [[*each] for each in in_training]}


def to_line(event: Mapping[str, Any]) -> bytes:
    """Format an event as a line of the file."""
    return to_json(event, separators=(",", ":")).encode() + b"\n"


def whole_lines(path: Path, start: int = 0, end: float = math.inf) -> Iterator[bytes]:
    """The complete lines between two positions of a file.

    Raises:
        OSError: If the file cannot be read.
        RunFolderError: If a line is longer than any event.
    """
    while start < end:
        # Not left open: a run may have more workers than a process may have files.
        with path.open("rb") as file:
            file.seek(start)
            lines = _some_lines(file)
        if not lines:
            return
        if len(lines[-1]) >= _LONGEST_LINE:
            raise RunFolderError(
                f"{path} has a line of more than {_LONGEST_LINE:,} bytes, which no event has; "
                "the file is damaged - delete that line"
            )
        for line in lines:
            if start >= end or not line.endswith(b"\n"):
                return
            start += len(line)
            yield line


def _some_lines(file: BinaryIO) -> list[bytes]:
    lines: list[bytes] = []
    num_bytes = 0
    while num_bytes < _READ_AT_ONCE and (line := file.readline(_LONGEST_LINE)):
        lines.append(line)
        num_bytes += len(line)
    return lines


def parse_event(line: bytes) -> dict[str, Any]:
    """Parse a line as an event.

    Raises:
        ValueError: If the line is not an event.
    """
    try:
        # Decoded here: `json` would take a damaged line for one of another encoding.
        event = json.loads(line.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise ValueError(f"expected a JSON object with a type, got {event!r:.60}")
    return event


class SkippedLines:
    """Warns about each skipped line of a log, up to a limit.

    Args:
        path: Path of the log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_skipped = 0

    def add(self, number: int, error: Exception) -> None:
        """Record that line `number`, counted from 1, is skipped."""
        self._num_skipped += 1
        if self._num_skipped <= _MAX_WARNINGS:
            is_last = self._num_skipped == _MAX_WARNINGS
            _LOG.warning(
                "%s, line %d is damaged and skipped (%s: %s)%s",
                self._path,
                number,
                type(error).__name__,
                error,
                "; further ones are skipped silently" if is_last else "",
            )


def read_events(path: Path, skipped: SkippedLines) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events of a run, with their line numbers from 1.

    Damaged lines are skipped, even the first one, and so is an incomplete last line.

    Raises:
        RunFolderError: If the file cannot be read, or has no event.
    """
    is_empty = True
    try:
        for number, line in enumerate(whole_lines(path), start=1):
            try:
                event = parse_event(line)
            except ValueError as error:
                skipped.add(number, error)
                continue
            is_empty = False
            yield number, event
    except OSError as error:
        raise RunFolderError(
            f"cannot read {path} ({error.strerror}); expected the events of a run - "
            "give the folder that a run wrote"
        ) from error
    if is_empty:
        raise RunFolderError(
            f"{path} holds no events; expected those of a run - run the experiment again"
        )


def read_notes(path: Path, kind: str) -> Iterator[dict[str, float]]:
    """The numbers of all notes of one kind, with the `time` of each.

    Args:
        path: The events of a run.
        kind: Kind of the notes; see `Note.kind`.

    Raises:
        RunFolderError: See `read_events`.
    """
    for _, event in read_events(path, SkippedLines(path)):
        if event["type"] == "noted" and event["kind"] == kind:
            yield {"time": event["time"], **event["numbers"]}


class EventLog:
    """Writes the events of a run; a `sim.Observer`.

    Simultaneous sends of one message to several receivers share a line.

    Args:
        path: File, emptied unless `offset` is given.
        offset: Continue after this many bytes, and remove the rest.

    Attributes:
        bytes_sent: Bytes sent by all workers so far.
        samples_processed: Samples processed by all workers so far.
        total_staleness: Total staleness of all messages received so far, in rounds.
        num_received: Messages received so far.
        num_lost: Messages lost so far.
        commits: Counter of the commits so far.

    Raises:
        RunFolderError: If the file cannot be written.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.bytes_sent = 0
        self.samples_processed = 0
        self.total_staleness = 0
        self.num_received = 0
        self.num_lost = 0
        self.commits = Commits()
        self._recent_losses = [0.0, 0]  # the sum over samples, and their number
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
        """Mean staleness of the messages received so far, in rounds."""
        return self.total_staleness / max(1, self.num_received)

    def take_training_loss(self) -> float | None:
        """Mean training loss per sample since the last call; None without new samples."""
        total, num_samples = self._recent_losses
        self._recent_losses = [0.0, 0]
        return total / num_samples if num_samples else None

    def write(self, event: str, /, **fields: object) -> None:
        """Add the line ``{"type": event, **fields}``."""
        self._flush_sends()
        self._write({"type": event, **fields})

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self.samples_processed += event.num_samples
        if event.num_samples:  # without samples, the loss may be NaN
            self._recent_losses[0] += event.loss * event.num_samples
            self._recent_losses[1] += event.num_samples
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
        self.commits.add(rank, message.kind, message.round)
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

    def received(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, staleness: int
    ) -> None:
        self.num_received += 1
        self.commits.add(sender, message.kind, message.round)
        self.total_staleness += staleness

    def lost(
        self, now: Seconds, rank: Rank, sender: Rank, message: Message, reason: str
    ) -> None:
        self.num_lost += 1
        self.write("lost", time=now, rank=rank, sender=sender, kind=message.kind, reason=reason)

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        self.write(what, time=now, rank=rank)

    def noted(self, now: Seconds, rank: Rank, note: Note) -> None:
        self.write("noted", time=now, rank=rank, kind=note.kind, numbers=dict(note.numbers))

    def show(self) -> None:
        """Flush the file for readers."""
        try:
            self._flush_sends()
            self._file.flush()
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def flush(self) -> int:
        """Sync all complete lines to the disk; return the file's size in bytes."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())  # a checkpoint must not outlive its log lines
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
        """Close the file even if writing fails; no effect if it is already closed."""
        with suppress(OSError):
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """State that a checkpoint keeps in addition to the size of the file."""
        return {name: getattr(self, name) for name in _KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
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
            f"{path} has {found} bytes, but its checkpoint continues after {num_bytes}; delete "
            "the checkpoint, and --resume begins from the start"
        )


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"cannot write {path}: {error.strerror}; free some space or choose another --out"
    )


# Commits of each worker to a server, counted from the logged messages.


COMMIT = "commit"
"""The kind of a worker's commit to a server."""


@dataclass(slots=True)
class Commits:
    """Counts messages of the kind `COMMIT`; a resent message counts once.

    Attributes:
        by_rank: Commits of each worker so far.

    >>> commits = Commits()
    >>> [commits.add(1, "commit", 0), commits.add(1, "commit", 0), commits.add(1, "params", 1)]
    [True, False, False]
    >>> commits.by_rank
    {1: 1}
    """

    by_rank: dict[Rank, int] = field(default_factory=dict)
    _last_round: dict[Rank, int] = field(default_factory=dict)

    def add(self, rank: Rank, kind: str, round: int) -> bool:
        """Count a message of `rank` if it is a new commit; return whether it is."""
        if kind != COMMIT or round <= self._last_round.get(rank, -1):
            return False
        self._last_round[rank] = round
        self.by_rank[rank] = self.by_rank.get(rank, 0) + 1
        return True

    @property
    def total(self) -> int | None:
        """Commits of all workers; None in a run without commits."""
        return sum(self.by_rank.values()) if self.by_rank else None


# The metrics of a run, from its header.


def recorded_metrics(header: Mapping[str, Any]) -> tuple[MetricSpec, ...]:
    """The metrics of the run with this header, the chosen one first.

    Headers that name no metric are from classification runs, which are measured by accuracy.

    Raises:
        LookupError: If a field of a metric is missing.
        TypeError: If a field has the wrong type.
        ValueError: If the chosen metric is not among the run's metrics.

    >>> recorded_metrics({"task": {}})[0].name
    'accuracy'
    """
    task = header.get("task", {})
    if not isinstance(task, Mapping):
        raise TypeError(f"`task` is {task!r:.60}")
    described = task.get("metrics", [])
    if not isinstance(described, list):
        raise TypeError(f"`metrics` is {described!r:.60}")
    metrics = {each.name: each for each in map(_metric, described)} or {ACCURACY.name: ACCURACY}
    chosen = task.get("target_metric") or next(iter(metrics))
    if chosen not in metrics:
        raise ValueError(f"`target_metric` is {chosen!r:.60}, none of {[*metrics]!r:.60}")
    return tuple({chosen: metrics[chosen], **metrics}.values())


def _metric(described: object) -> MetricSpec:
    if not isinstance(described, Mapping):
        raise TypeError(f"a metric is {described!r:.60}")
    name, unit, higher = (described[key] for key in ("name", "unit", "higher_is_better"))
    if not (isinstance(name, str) and isinstance(unit, str) and isinstance(higher, bool)):
        raise TypeError(f"a metric is {described!r:.60}")
    return MetricSpec(name=name, unit=unit, higher_is_better=higher)
