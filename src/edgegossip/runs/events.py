"""`events.jsonl`: the events of a run, one JSON object per line, in order of time.

Each line has a `type`. The type of the first line is `experiment`, and that of the last line is
`ended`, unless the run was killed. Times are seconds since the run began: virtual in a
simulation, real on real machines. Names of wall-clock fields begin with ``wall_``; all other
fields are identical, byte for byte, whenever the same experiment is simulated. Arriving
messages are not logged.

Fields of `experiment`, in addition to those of `experiment.json`:
    command: Command that repeats the run, without `--out`, `--threads`, `--pool` and
        `--resume`; null for a run from Python.
    roles: Name of each rank's role: `"worker"`, `"server"`, `"stage-0"`.
    evaluated: Ranks whose parameters count in the reported model.
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
    time: Time of the change. A worker that leaves crashes, too, and one that is not there yet
        crashes at time 0.
    rank: The worker.

Fields of `disconnected` and `connected`: a worker on a real machine has lost a link, or has one
that it did not have; each end logs its own view:
    time: Time at which the worker learnt of it.
    rank: The worker.
    peer: The worker at the other end.
    reason: What is known of `peer`: `"it has failed, or the path to it is cut"`, `"it was
        stopped, and keeps a checkpoint"`, `"it has left the run"`, `"it was started again"`.
        The end of a finished worker is no loss. A link that comes and goes has twenty losses
        and one for each ten seconds; further ones are left out, each with its return.

Fields of `evaluated`, a measurement of the averaged model:
    time: Time of the evaluation.
    epochs: Samples processed by all workers / training samples.
    accuracy: Accuracy on the test split. A task with other metrics has a field for each
        instead, under its key: `"mae"`, `"bits_per_character"`.
    loss: Mean loss on the test split.
    consensus_distance: Root mean square distance of the workers from their mean.
    bytes_sent: Bytes sent by all workers so far, lost messages included.
    samples_processed: Samples processed by all workers so far, in work that has ended.
    validation_value: The metric of `keep` on the validation split; absent without `keep`, and
        on real machines.
    joules: Energy of all machines and links so far, work in progress included. This field and
        the next three are absent from logs of versions before they were counted.
    busy_joules, idle_joules, link_joules: The same by cause: machines that work, machines that
        are on and do not work, and bytes sent.
    goodput: Useful samples / samples that the machines which train could have processed so far,
        work in progress included; see `edgegossip.machine.goodput.NodeUse`. This field and the
        next two are absent from logs of versions before they were counted.
    compute_used: Work / work that these machines could have done so far while they were on.
    node_seconds: Seconds for which machines were on so far, added up.

Fields of `noted`, numbers that the algorithm recorded (`Note`):
    time: Time of the note.
    rank: The worker.
    kind: Subject, in the algorithm's words.
    numbers: Numbers by name; null if not finite.

Fields of `data`, in the log of a worker on a real machine:
    num_samples: Training samples of this worker.

Fields of `ended`, which a resumed run removes, like all lines after its checkpoint:
    time: Time of the end.
    rank: The worker, in its own log; absent from the log of a run.
    reason: `"finished"`, `"time limit"`, `"target"` (see `until`), `"early stop"` (see
        `keep`), `"all crashed"`, `"interrupted"` or `"failed"`.
    error: The failure, or null.
    wall_seconds: Duration of the run, including parts before an interruption; in a worker's
        log, only the last part.
    disagreements: Sentences about workers on real machines that ended with other models than
        the rest; absent if all agree.
    cut_off: Rank and start of each training that the end of the run cut off. Workers that are
        not listed were waiting, unless they had finished or crashed. Absent if the run finished
        by itself, and on real machines if a worker's log does not tell.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.contract.protocol import COMMIT, Message, Note, Rank, Seconds, Trained
from edgegossip.runs.files import read_json, to_json, writing
from edgegossip.runs.results import Evaluation

_KEPT = (
    "bytes_sent",
    "samples_processed",
    "total_staleness",
    "num_received",
    "num_lost",
    "commits",
    "_sends",  # a line that may still grow
)
SCHEMA = 1
"""Version of the layout of run folders."""
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


Event: TypeAlias = dict[str, Any]
"""A line of the log: its `type` and its fields."""


def whole_lines(path: Path, start: int = 0, end: float = math.inf) -> Iterator[bytes]:
    """The complete lines between two positions of a file.

    Raises:
        OSError: If the file cannot be read.
        RunFolderError: If a line is longer than any event.
    """
    while start < end:
        lines: list[bytes] = []
        # Not left open: a run may have more workers than a process may have files.
        with path.open("rb") as file:
            file.seek(start)
            stop = start + _READ_AT_ONCE
            while file.tell() < stop and (line := file.readline(_LONGEST_LINE)):
                lines.append(line)
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


def parse_event(line: bytes) -> Event:
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


class EventReader:
    """Reads a log of events: the whole log, or what was added since the last reading.

    Damaged lines are skipped with a warning.

    Args:
        path: The log; it must exist when it is read.

    Attributes:
        position: Bytes read so far; while an event is used, the beginning of its line.
    """

    def __init__(self, path: Path) -> None:
        self.position = 0
        self._path = path
        self._num_lines = 0
        self._num_skipped = 0

    @cached_property
    def first(self) -> Event:
        """The first event that is not damaged.

        Raises:
            RunFolderError: If the log cannot be read, or has no event.
        """
        if (found := next(self.between(0, math.inf), None)) is None:
            raise RunFolderError(
                f"{self._path} holds no events; expected those of a run - run the experiment "
                "again"
            )
        return found[1]

    @cached_property
    def header(self) -> Event:
        """The experiment: the first line, or `experiment.json` if that line is damaged.

        Raises:
            LookupError: If the experiment has no `schema`.
            RunFolderError: If the log has no event, no file has the experiment, or another
                version of this package wrote it.
        """
        found = self.first
        if found["type"] != "experiment":
            found = read_json(self._path.with_name("experiment.json"))
        if found["schema"] != SCHEMA:
            raise RunFolderError(
                f"{self._path} has schema {found['schema']!r}, this version reads {SCHEMA}; "
                "use the version of edgegossip that wrote it"
            )
        return found

    @cached_property
    def metrics(self) -> tuple[MetricSpec, ...]:
        """The metrics of the run, the chosen one first; accuracy unless the header names some.

        Raises:
            LookupError: If a field of a metric is missing.
            RunFolderError: If there is no `header`.
            TypeError: If a field has the wrong type.
            ValueError: If the chosen metric is not among the run's metrics.
        """
        task = self.header.get("task", {})
        if not isinstance(task, dict):
            raise TypeError(f"`task` is {task!r:.60}")
        described = task.get("metrics", [])
        if not isinstance(described, list):
            raise TypeError(f"`metrics` is {described!r:.60}")
        metrics = {each.name: each for each in map(_metric, described)}
        metrics = metrics or {ACCURACY.name: ACCURACY}
        chosen = task.get("target_metric") or next(iter(metrics))
        if chosen not in metrics:
            raise ValueError(f"`target_metric` is {chosen!r:.60}, none of {[*metrics]!r:.60}")
        return tuple({chosen: metrics[chosen], **metrics}.values())

    def each(self, use: Callable[[Event], object]) -> None:
        """Call `use` with each event that is new since the last call.

        An incomplete last line is left for the next call.

        Args:
            use: Uses an event. If it raises a LookupError, TypeError or ValueError, the line
                counts as damaged.

        Raises:
            RunFolderError: If the log cannot be read.
        """
        for line in self._lines(self.position, math.inf):
            self._num_lines += 1
            try:
                use(parse_event(line))
            except (LookupError, TypeError, ValueError) as error:
                self._warn(error)
            self.position += len(line)  # only now: `use` may ask where its line begins

    def between(self, start: int, end: float) -> Iterator[tuple[int, Event]]:
        """The events between two positions, without warnings, each with its line's position.

        Raises:
            RunFolderError: If the log cannot be read.
        """
        for line in self._lines(start, end):
            with suppress(ValueError):
                yield start, parse_event(line)
            start += len(line)

    def of_type(self, *types: str) -> list[Event]:
        """The new events of these types."""
        found: list[Event] = []
        self.each(lambda event: found.append(event) if event["type"] in types else None)
        return found

    def notes(self, kind: str) -> list[dict[str, float]]:
        """The numbers of all new notes of one kind (see `Note.kind`), with their `time`."""
        notes = (note for note in self.of_type("noted") if note["kind"] == kind)
        return [{"time": note["time"], **note["numbers"]} for note in notes]

    def evaluations(self) -> list[Evaluation]:
        """All new evaluations."""
        metrics, found = self.metrics, list[Evaluation]()

        def add(event: Event) -> None:
            if event["type"] == "evaluated":
                found.append(Evaluation.from_line(event, metrics))

        self.each(add)
        return found

    def _lines(self, start: int, end: float) -> Iterator[bytes]:
        try:
            yield from whole_lines(self._path, start, end)
        except OSError as error:
            raise RunFolderError(
                f"cannot read {self._path} ({error.strerror}); expected the events of a run - "
                "give the folder that a run wrote"
            ) from error

    def _warn(self, error: Exception) -> None:
        """Warn that the current line is skipped, unless there were many warnings before."""
        self._num_skipped += 1
        if self._num_skipped <= _MAX_WARNINGS:
            is_last = self._num_skipped == _MAX_WARNINGS
            _LOG.warning(
                "%s, line %d is damaged and skipped (%s: %s)%s",
                self._path,
                self._num_lines,
                type(error).__name__,
                error,
                "; further ones are skipped silently" if is_last else "",
            )


def _metric(described: object) -> MetricSpec:
    if not isinstance(described, Mapping):
        raise TypeError(f"a metric is {described!r:.60}")
    name, unit, higher = (described[key] for key in ("name", "unit", "higher_is_better"))
    if not (isinstance(name, str) and isinstance(unit, str) and isinstance(higher, bool)):
        raise TypeError(f"a metric is {described!r:.60}")
    return MetricSpec(name=name, unit=unit, higher_is_better=higher)


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
        found = path.stat().st_size if path.exists() else 0
        if found < offset:
            raise RunFolderError(
                f"{path} has {found} bytes, but its checkpoint continues after {offset}; "
                "delete the checkpoint, and --resume begins from the start"
            )
        with writing(path):
            self._file = path.open("r+b" if offset else "wb")
            self._file.truncate(offset)
            self._file.seek(offset)

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
        with writing(self._path):
            self._flush_sends()
            self._file.flush()

    def flush(self) -> int:
        """Sync all complete lines to the disk; return the file's size in bytes."""
        with writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._file.tell()

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
        with writing(self._path):
            self._file.write(to_line(line))


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
