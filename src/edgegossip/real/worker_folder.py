"""The folder of a worker on a real machine: its progress, read incrementally.

Fields of the `summary.json` of a worker, among others:
    validation_accuracy: Accuracy of the worker's model (another metric: `validation_METRIC`);
        null without validation data, or for a part of a model.
    torch_device: Device on which the worker trained, e.g. "cuda".
    best: The best averaged model by validation (its `time`, `round` and `value`; `is_known` if
        the worker has its parameters, in `best.safetensors`), and whether the run ended early
        because nothing was better (`has_stopped_run`); absent without `keep`.
    is_evaluated: Whether its model counts in the results. If several workers may serve, only
        the active server's model counts.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.protocol import Rank, Seconds, Span
from edgegossip.machine.goodput import UsefulSamples
from edgegossip.real.introduction import shared_settings, without_machine
from edgegossip.real.worker_files import indices, read_params, schedule, snapshot_path
from edgegossip.runs.describe import header
from edgegossip.runs.events import Commits, EventReader, to_line
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import is_number, load_checkpoint, read_json
from edgegossip.runs.folder import BEST, difference, holds_run
from edgegossip.sim.link import Links

_LOG = logging.getLogger("edgegossip.real")
ENDS = ("finished", "time limit")
"""Reasons after which a worker has ended for good."""


def require_gathered(out: Path) -> None:
    """Check that the run in `out`, if any, is of workers, and not simulated.

    Raises:
        RunFolderError: If the run is simulated.
    """
    if holds_run(out) and read_json(out / "experiment.json").get("driver") != "network":
        raise RunFolderError(
            f"{out} holds a simulated run; choose another --out, and move the folder workers "
            "there if there is one"
        )


def require_worker_of(experiment: Experiment, out: Path) -> None:
    """Check that the worker whose folder is `out`, if any, took part in this experiment.

    Raises:
        RunFolderError: If the worker took part in another experiment.
    """
    path = out / "experiment.json"
    if path.exists():
        described = (read_json(path), header(experiment, None))
        if changed := difference(*map(shared_settings, described)):
            raise RunFolderError(
                f"{out} holds a worker of another experiment: {changed}; gather with the "
                "recipe and the options that all workers had"
            )


def has_ended(out: Path, header: dict[str, Any]) -> bool:
    """Whether the worker whose folder is `out` has finished for good.

    Args:
        out: Folder, which may be missing.
        header: Header of the experiment that the worker must belong to.

    Raises:
        RunFolderError: If the worker belongs to another experiment.
    """
    path = out / "experiment.json"
    if not path.exists():
        return False
    # A worker may continue on another device of its machine.
    described = (
        without_machine({**each, "versions": None, "commit": None})
        for each in (read_json(path), header)
    )
    if changed := difference(*described):
        raise RunFolderError(
            f"{out} holds a worker of another experiment: {changed}; choose another --out, or "
            "give the options that it had"
        )
    return final_summary(out) is not None


def final_summary(out: Path) -> dict[str, Any] | None:
    """The summary of a worker that has finished for good; None for any other worker.

    Raises:
        RunFolderError: If the summary is damaged.
    """
    path = out / "summary.json"
    summary = read_summary(path) if path.exists() else None
    return summary if summary is not None and summary["reason"] in ENDS else None


def goes_on_at(out: Path) -> Seconds:
    """Time in the run at which the worker with the folder `out` continues, or ended."""
    if (summary := final_summary(out)) is not None:
        return float(summary["seconds"])
    checkpoint = kept_checkpoint(out / "checkpoint.safetensors")
    return 0.0 if checkpoint is None else float(checkpoint["now"])


def kept_checkpoint(path: Path) -> dict[str, Any] | None:
    """The checkpoint of a worker; None if it is missing or unusable."""
    if not path.exists():
        return None
    try:
        checkpoint = load_checkpoint(path)
        if not isinstance(checkpoint, dict):
            raise ValueError(f"it holds {checkpoint!r:.60}")
        require_numbers(checkpoint, ("now", "incarnation"))
        return checkpoint
    except ValueError as error:
        _LOG.warning("%s is not a worker's checkpoint (%s) - starting without it", path, error)
        return None
    except RunFolderError as error:
        _LOG.warning("%s - beginning without it", error)
        return None


_MOST_RECENT = 64
RECENT: Seconds = 30.0
"""Seconds over which a worker's speed and waiting are told while it runs."""
_BLOCK = 2**18
"""Bytes of a log that are read at once for sorting."""
_NUMBERS = {
    "worker": (),
    "ended": (),
    "data": ("num_samples",),
    "trained": ("time", "start", "num_samples", "cost"),
    "sent": ("time", "num_bytes", "round"),
}
"""Fields to read from an event, by type; for other types, only the time is read."""
_COUNTS = ("num_samples", "cost", "num_bytes", "round")
_LARGEST = 2.0**63
REASONS = ("finished", "time limit", "interrupted", "failed")
"""Reasons for a worker's end, from the best to the worst."""
_SUMMARY = ("seconds", "wall_seconds", "mean_staleness")


class RunningTotal:
    """A sum that grows over time, with its value at each snapshot.

    Attributes:
        total: The sum so far.

    >>> total = RunningTotal()
    >>> total.add(0.5, 5)
    >>> total.add(0.6, 7)
    >>> total.at(0), total.at(1), total.at(2)  # at 0, 0.5 and 1 s
    (0, 5, 12)
    """

    def __init__(self) -> None:
        self.total: Any = 0  # whole for counts
        self._sums: list[Any] = []  # at the moments that are over
        self._times = schedule()
        self._next = next(self._times)

    def add(self, time: Seconds, amount: float) -> None:
        """Add `amount` at `time`."""
        # A worker that resumes from a checkpoint may be at an earlier time than it had reached:
        # moments that are over stay as they are.
        while self._next < time:
            self._sums.append(self.total)
            self._next = next(self._times)
        self.total += amount

    def at(self, index: int) -> Any:  # noqa: ANN401 - whole for counts
        """The sum up to the snapshot with this index."""
        return self._sums[index] if index < len(self._sums) else self.total


@dataclass(slots=True)
class WorkerFolder:
    """Reads a worker's growing files and keeps only totals.

    Damaged contents raise no error: they are skipped with a warning.

    Attributes:
        path: Path of the folder.
        rank: Rank of the worker.
        num_samples: Training samples that the worker has.
        samples: Samples that the worker has trained on.
        bytes_sent: Bytes that the worker has sent.
        link_joules: Energy of these bytes.
        busy: Seconds of training that has ended.
        cost: Cost of this training, in samples.
        useful: Those of the `samples` whose results no crash has lost.
        links: Energy per byte to each receiver; nothing else of them counts here.
        num_rounds: Number of rounds in which parameters were sent.
        num_commits: Number of commits to a server.
        time: Time of the worker's last event.
        has_ended: Whether no more events will follow.
        cut_off: Rank and start of the training that the end of the run cut off, if any; None if
            the worker's log does not tell.
    """

    path: Path
    rank: Rank
    num_samples: int = 0
    samples: RunningTotal = field(default_factory=RunningTotal)
    bytes_sent: RunningTotal = field(default_factory=RunningTotal)
    link_joules: RunningTotal = field(default_factory=RunningTotal)
    busy: RunningTotal = field(default_factory=RunningTotal)
    cost: RunningTotal = field(default_factory=RunningTotal)
    useful: RunningTotal = field(default_factory=RunningTotal)
    links: Links = field(default_factory=Links)
    num_rounds: int = 0
    num_commits: int = 0
    time: Seconds = 0.0
    has_ended: bool = False
    cut_off: list[tuple[Rank, Seconds]] | None = None
    _first: tuple[float, Seconds] | None = None
    _cost: float = 0.0
    _training: Seconds = 0.0
    _latest: Seconds = 0.0
    _last_seen: Seconds = 0.0
    _complaints: set[str] = field(default_factory=set)
    _unreadable: set[int] = field(default_factory=set)  # snapshots
    _recent: deque[tuple[Seconds, Seconds, int]] = field(
        default_factory=partial(deque, maxlen=_MOST_RECENT)
    )
    _reader: EventReader = field(init=False)
    _blocks: list[tuple[int, Seconds]] = field(default_factory=list)  # begins at, earliest time
    _crashes: dict[int, dict[str, Any]] = field(default_factory=dict)  # by what they precede
    _commits: Commits = field(default_factory=Commits)
    _outages: list[Span] = field(default_factory=list)
    _useful: UsefulSamples = field(default_factory=UsefulSamples)

    def __post_init__(self) -> None:
        self._reader = EventReader(self.path / "events.jsonl")

    @property
    def position(self) -> int:
        """Bytes of the log that have been read; they grow with each piece of news."""
        return self._reader.position

    @property
    def recent_use(self) -> tuple[float, float] | None:
        """Samples per second, and the share of time without training, of the last trainings.

        These are the trainings of the last `RECENT` seconds before the newest, 1 to 63 of them,
        from the end of the one before them. None if there are too few.
        """
        if len(self._recent) < 2:
            return None
        (_, since, _), *later = self._recent
        if (span := later[-1][1] - since) <= 0:
            return None
        busy = sum(end - start for start, end, _ in later)
        return sum(each for *_, each in later) / span, min(1.0, max(0.0, 1 - busy / span))

    @property
    def snapshots(self) -> list[int]:
        """Indices of the existing snapshots, except damaged ones."""
        found = indices(self.path / "snapshots")
        return [index for index in found if index not in self._unreadable]

    def snapshot(self, index: int) -> Path:
        return snapshot_path(self.path / "snapshots", index)

    def read_snapshot(self, index: int, num_params: int) -> Tensor | None:
        """The parameters of a snapshot, [num_params]; None if it is damaged or empty."""
        params = self._read_params(self.snapshot(index), num_params, may_be_empty=True)
        if params is None or not len(params):
            self._unreadable.add(index)
            return None
        return params

    def last_params(self, num_params: int) -> Tensor | None:
        """The final parameters, [num_params]; None if they are missing or damaged."""
        return self._read_params(self.path / "params.safetensors", num_params)

    def best(self, num_params: int) -> tuple[dict[str, Any], Tensor] | None:
        """The field `best` of the summary, and its model; None if the worker has none."""
        found = (self.summary or {}).get("best")
        try:
            if not isinstance(found, dict) or found.get("is_known") is not True:
                return None
            require_numbers(found, ("time", "round", "value"))
        except ValueError as error:
            self._complain(error)
            return None
        params = self._read_params(self.path / BEST, num_params)
        return None if params is None else (found, params)

    @property
    def torch_device(self) -> str | None:
        """Device on which an ended worker trained; None if it is unknown."""
        found = (self.summary or {}).get("torch_device")
        return f"{found:.20}" if isinstance(found, str) else None

    @property
    def summary(self) -> dict[str, Any] | None:
        """Final summary of the worker; None if it is missing or damaged."""
        path = self.path / "summary.json"
        try:
            return read_summary(path) if path.exists() else None
        except RunFolderError as error:
            self._complain(error)
            return None

    @property
    def throughput(self) -> float:
        """Samples per second during training; 0 without training.

        The first training of a process includes its preparation, so it counts only if there
        is no other training.
        """
        cost, seconds = (
            (self._cost, self._training) if self._training else self._first or (0, 0)
        )
        throughput = cost / seconds if seconds else 0.0
        return throughput if throughput < math.inf else 0.0

    def read(self) -> None:
        """Read the new lines."""
        try:
            if (self.path / "events.jsonl").exists():
                self._reader.each(self._add)
        except (OSError, RunFolderError) as error:
            self._complain(error)

    def timeline(self, *, is_lost: bool = False) -> Iterator[tuple[Seconds, bytes]]:
        """Time and line of each event, in order of time; ties keep the order of the log.

        If the worker was lost for good, a "crashed" event comes last.

        A "crashed" event is added before each "recovered". A message is logged when it has
        left, with the time at which it was handed over; events that may still get a predecessor
        are therefore held back.
        """
        starts = [start for start, _ in self._blocks]
        earliest = [time for _, time in self._blocks]
        # For each block, the earliest event behind it.
        limits = [*accumulate([math.inf, *reversed(earliest[1:])], min)][::-1]
        held: list[tuple[Seconds, int, bytes]] = []
        number = count()
        stretches = pairwise([*starts, self._reader.position])
        for (start, end), limit in zip(stretches, limits, strict=False):
            for event in self._events(start, end):
                heappush(held, (event["time"], next(number), to_line(event)))
            while held and held[0][0] < limit:
                time, _, line = heappop(held)
                yield time, line
        if is_lost and starts:
            crash = {"type": "crashed", "time": self._latest, "rank": self.rank}
            yield self._latest, to_line(crash)

    def _add(self, line: dict[str, Any]) -> None:
        _check(line)
        match line["type"]:
            case "worker":
                self._last_seen = self._latest
                self._first = None
                self._recent.clear()
                self.cut_off = None
                return
            case "ended":
                self.cut_off = _cut_off(line, self.rank)
                return
            case "data":
                self.num_samples = int(line["num_samples"])
                return
            case "recovered":
                # The worker was down and could not log its own absence.
                crash = {"type": "crashed", "time": self._last_seen, "rank": self.rank}
                self._crashes[self._reader.position] = crash
                self._outages.append((self._last_seen, line["time"]))
                self._useful.crash(self._last_seen)
                self.useful.add(line["time"], self._useful.total - self.useful.total)
                self._note(self._last_seen)
            case "trained":
                self._count_training(line)
            case "sent":
                joules = line["num_bytes"] * self._joules_per_byte(line)
                self.bytes_sent.add(line["time"], line["num_bytes"])
                self.link_joules.add(line["time"], joules)
                self._useful.send(line["time"], line["time"])  # logged when it has left
                self.num_rounds = max(self.num_rounds, line["round"] + 1)
                self.num_commits += self._commits.add(
                    self.rank, line.get("kind", ""), line["round"]
                )
        self._note(line["time"])

    def _count_training(self, line: Mapping[str, Any]) -> None:
        now, seconds = line["time"], line["time"] - line["start"]
        self._recent.append((line["start"], now, line["num_samples"]))
        while len(self._recent) > 2 and self._recent[1][1] < now - RECENT:
            self._recent.popleft()
        self.samples.add(now, line["num_samples"])
        self.useful.add(now, line["num_samples"])
        self._useful.train(line["num_samples"])
        self.busy.add(now, seconds)
        self.cost.add(now, line["cost"])
        # The first training of a process includes its preparation; see `throughput`.
        if self._first is None:
            self._first = (line["cost"], seconds)
        else:
            self._cost += line["cost"]
            self._training += seconds

    def _joules_per_byte(self, sent: Mapping[str, Any]) -> float:
        """Mean over the receivers of a "sent" line, which get equally many bytes."""
        receivers = sent.get("receivers")
        known = receivers if isinstance(receivers, list) and receivers else [self.rank]
        each = [self.links.link(self.rank, rank).joules_per_byte for rank in known]
        return sum(each) / len(each)

    def off_until(self, time: Seconds) -> Seconds:
        """Seconds up to `time` in which the worker was down, between a crash and its return."""
        return sum(max(0.0, min(time, back) - crash) for crash, back in self._outages)

    def _note(self, time: Seconds) -> None:
        """Record that the current line has an event at this time."""
        self.time = time
        self._latest = max(self._latest, time)
        position = self._reader.position
        if not self._blocks or position - self._blocks[-1][0] >= _BLOCK:
            self._blocks.append((position, time))
        else:
            start, earliest = self._blocks[-1]
            self._blocks[-1] = (start, min(earliest, time))

    def _events(self, start: int, end: int) -> Iterator[dict[str, Any]]:
        """The events between two positions of the log."""
        for position, event in self._reader.between(start, end):
            if position in self._crashes:
                yield self._crashes[position]
            try:
                _check(event)
            except ValueError:  # said when it was first read
                continue
            if event["type"] not in ("worker", "ended", "data"):
                yield event

    def _read_params(
        self, path: Path, num_params: int, *, may_be_empty: bool = False
    ) -> Tensor | None:
        try:
            return read_params(path, num_params, may_be_empty=may_be_empty)
        except RunFolderError as error:
            self._complain(error)
            return None

    def _complain(self, error: Exception) -> None:
        if str(error) not in self._complaints:
            self._complaints.add(str(error))
            _LOG.warning("worker %d: %s - continuing without it", self.rank, error)


def _cut_off(last: Mapping[str, Any], rank: Rank) -> list[tuple[Rank, Seconds]] | None:
    """Rank and start of the training that the end cut off; None if this is not known.

    An interrupted worker left while the others went on.

    Raises:
        ValueError: If the line is damaged.
    """
    if last.get("reason") == "finished":
        return []
    found = last.get("cut_off")
    if last.get("reason") != "time limit" or not isinstance(found, list):
        return None
    starts = [each[-1] for each in found if isinstance(each, list) and each]
    for start in starts:
        require_numbers({"start": start}, ["start"])
    return [(rank, start) for start in starts]


def _check(event: dict[str, Any]) -> None:
    """Check all numbers that are used.

    Raises:
        ValueError: If one is missing or out of range.
    """
    names = _NUMBERS.get(event["type"], ("time",))
    require_numbers(event, names)
    if event["type"] == "trained" and event["start"] > event["time"]:
        raise ValueError(f"start is {event['start']!r}, after its time")
    if negative := [name for name in _COUNTS if name in names and event[name] < 0]:
        raise ValueError(f"{negative[0]} is {event[negative[0]]!r}, below 0")


def require_numbers(content: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check that `content` has finite numbers under these names.

    Raises:
        ValueError: If a number is missing or not finite.
    """
    for name in names:
        value = content.get(name)
        if not is_number(value) or not -_LARGEST <= value <= _LARGEST:
            raise ValueError(f"{name} is {value!r:.60}, not a finite number")


def read_summary(path: Path) -> dict[str, Any]:
    """Read the `summary.json` of a worker.

    Raises:
        RunFolderError: If `path` is missing or damaged.
    """
    summary = read_json(path)
    try:
        require_numbers(summary, _SUMMARY)
        if summary.get("reason") not in REASONS:
            raise ValueError(f"reason is {summary.get('reason')!r:.60}, none of {REASONS}")
    except ValueError as error:
        raise RunFolderError(
            f"{path} is damaged ({error}); delete it, and the worker counts as killed"
        ) from None
    return summary
