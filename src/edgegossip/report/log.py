"""Reading `events.jsonl`: the activity of every worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.contract.protocol import PARAMS, WORKER, Rank, Seconds, Span
from edgegossip.report.units import percent
from edgegossip.runs.describe import rank_name, stage_number
from edgegossip.runs.events import Commits, EventReader
from edgegossip.runs.files import is_number
from edgegossip.runs.results import Evaluation

_MAX_SECONDS: Seconds = 1e15
"""Thirty million years; later times are damage, and no axis can show them."""
_LARGEST = 1e30
"""Largest number in a note; no axis can show larger numbers."""
HEADER_TYPES = {
    "name": str,
    "num_workers": int,
    "num_train": int,
    "algorithm": dict,
    "platforms": list,
    "versions": dict,
}
AVERAGED = "the averaged model"
JOINED = "the model joined from its stages"
SERVER = "server"
"""The role of a server."""
_BY_RANK = {"roles": str, "evaluated": int, "shard_sizes": int}
"""The lists in a header and the types of their items."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The reason for the end of a run; see `Results.reason`.

    Attributes:
        reason: The reason.
        error: The failure, if any.
        wall_seconds: Wall-clock duration of the run.
        disagreements: Sentences about workers that ended with other models; see `Results`.
        cut_off: Start of the training that the end cut off, by rank; None if unknown.
    """

    reason: str
    error: str | None
    wall_seconds: Seconds
    disagreements: tuple[str, ...] = ()
    cut_off: Mapping[Rank, Seconds] | None = None


@dataclass(frozen=True, slots=True)
class Noted:
    """Finite numbers that worker `rank` noted at `time`."""

    time: Seconds
    rank: Rank
    kind: str
    numbers: Mapping[str, float]


@dataclass(slots=True)
class WorkerLog:
    """Activity of one worker, in order of virtual time.

    Attributes:
        training: Spans of training.
        sending: Spans of a busy uplink.
        crashes: Times of crashes.
        recoveries: Times of returns after a crash.
        rests: Spans from a finish to a later crash.
        finished: Time at which the worker finished; None if it has not finished, or not since a
            crash.
        commits: Times of commits to a server.
        num_samples: Total samples processed.
        num_steps: Total steps taken.
        num_rounds: Number of rounds in which the worker sent parameters; 0 for algorithms
            without rounds.
        round_samples: Samples processed in these rounds.
    """

    training: list[Span] = field(default_factory=list)
    sending: list[Span] = field(default_factory=list)
    crashes: list[Seconds] = field(default_factory=list)
    recoveries: list[Seconds] = field(default_factory=list)
    rests: list[Span] = field(default_factory=list)
    finished: Seconds | None = None
    commits: list[Seconds] = field(default_factory=list)
    num_samples: int = 0
    num_steps: int = 0
    num_rounds: int = 0
    round_samples: int = 0

    def crash(self, now: Seconds) -> None:
        """Record a crash, which also ends transmissions; the worker may come back."""
        self.crashes.append(now)
        self.sending = [(start, min(end, now)) for start, end in self.sending if start < now]
        if self.finished is not None:
            self.rests.append((self.finished, now))
            self.finished = None


@dataclass(slots=True)
class RunLog:
    """Everything that a report needs from one run's events.

    Attributes:
        header: The first line: the experiment, including platforms and versions.
        workers: One log for each rank.
        evaluations: Evaluations in order of virtual time.
        lost: Number of lost messages, by reason.
        notes: The algorithm's notes, in order of virtual time.
        metrics: Metrics of the task, the chosen one first.
        ended: End of the run; None if the process was killed or is still running.
        duration: Virtual time of the last event.
    """

    header: Mapping[str, Any]
    workers: list[WorkerLog]
    evaluations: list[Evaluation] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    notes: list[Noted] = field(default_factory=list)
    metrics: tuple[MetricSpec, ...] = (ACCURACY,)
    ended: Ended | None = None
    duration: Seconds = 0.0
    _commits: Commits = field(default_factory=Commits)

    @property
    def roles(self) -> list[str]:
        """The name of each rank's role."""
        return self.header.get("roles") or [WORKER.name] * len(self.workers)

    @property
    def is_balanced(self) -> bool:
        """Whether workers trained on shares of their data that fit their speeds."""
        return self.header.get("is_balanced") is True

    @property
    def stages(self) -> dict[int, list[Rank]]:
        """The ranks of each stage of the model; empty for a whole model."""
        found: dict[int, list[Rank]] = {}
        for rank, role in enumerate(self.roles):
            if (number := stage_number(role)) is not None:
                found.setdefault(number, []).append(rank)
        return dict(sorted(found.items()))

    @property
    def trainers(self) -> list[Rank]:
        """The ranks that have data or have trained; all ranks if this is unknown."""
        ranks = range(len(self.workers))
        sizes = self.header.get("shard_sizes")
        if not sizes or "roles" not in self.header:
            return [*ranks]
        found = [rank for rank in ranks if sizes[rank] or self.workers[rank].num_steps]
        return found or [*ranks]

    @property
    def model(self) -> str:
        """The measured model, as text."""
        evaluated = [self.roles[rank] for rank in self.header.get("evaluated", [])]
        if len(evaluated) == 1 and evaluated[0] != WORKER.name:
            return f"the {evaluated[0]}\u2019s model"
        if {*evaluated} == {SERVER}:
            return "the servers\u2019 model"  # each has a slice
        is_joined = len(evaluated) > 1 and len({*evaluated}) == len(evaluated)
        return JOINED if is_joined else AVERAGED

    def name(self, rank: Rank) -> str:
        """Name a rank by its role."""
        return rank_name(self.roles, rank)

    def record(self, event: Mapping[str, Any]) -> None:
        """Record one event; event types that the report does not show are skipped.

        Raises:
            LookupError: If a field is missing; the log is then unchanged.
            TypeError: If a field has the wrong type.
            ValueError: If a number is out of range.
        """
        if event["type"] == "experiment":
            return
        now, ended = _seconds(event, "time"), None
        match event["type"]:
            case "trained":
                start, num_samples = _seconds(event, "start"), _count(event, "num_samples")
                num_steps = _count(event, "num_steps")
                worker = self._worker(event)
                worker.training.append((start, now))
                worker.num_samples += num_samples
                worker.num_steps += num_steps
            case "sent":
                span = (_seconds(event, "start"), _seconds(event, "end"))
                worker = self._worker(event)
                kind, round = event["kind"], _count(event, "round")
                if kind == PARAMS:
                    worker.num_rounds = round + 1
                    worker.round_samples = worker.num_samples
                elif self._commits.add(event["rank"], kind, round):
                    worker.commits.append(now)
                worker.sending.append(span)
            case "lost":
                self.lost[str(event["reason"])] += 1
            case "noted":
                self._worker(event)
                self.notes.append(_noted(event, now))
            case "evaluated":
                self.evaluations.append(Evaluation.from_line(event, self.metrics))
            case "crashed":
                self._worker(event).crash(now)
            case "recovered":
                self._worker(event).recoveries.append(now)
            case "finished":
                self._worker(event).finished = now
            case "ended":
                ended = self._ended(event)
        self.duration = max(self.duration, now)
        # Only the last line says how the run ended: an interrupted run may have been resumed.
        self.ended = ended

    @property
    def metric(self) -> MetricSpec:
        """The task's chosen metric."""
        return self.metrics[0]

    def first_at(self, target: float | None) -> Evaluation | None:
        """The first evaluation at `target` or better; None without one or without a target."""
        if target is None:
            return None
        is_reached = self.metric.is_reached
        return next((e for e in self.evaluations if is_reached(e.value, target)), None)

    def _ended(self, event: Mapping[str, Any]) -> Ended:
        cut_off = None
        if "cut_off" in event:
            found = [{"rank": rank, "start": start} for rank, start in event["cut_off"]]
            for each in found:
                self._worker(each)  # raises an error if there is no such rank
            cut_off = {each["rank"]: _seconds(each, "start") for each in found}
        return Ended(
            event["reason"],
            event["error"],
            _seconds(event, "wall_seconds"),
            disagreements=tuple(map(str, event.get("disagreements", ()))),
            cut_off=cut_off,
        )

    def _worker(self, event: Mapping[str, Any]) -> WorkerLog:
        rank: Rank = _count(event, "rank")
        if rank >= len(self.workers):
            raise ValueError(f"rank {rank} of {len(self.workers)} workers")
        return self.workers[rank]


def _noted(event: Mapping[str, Any], now: Seconds) -> Noted:
    kind, numbers = event["kind"], event["numbers"]
    if not isinstance(kind, str) or not isinstance(numbers, dict):
        raise TypeError(f"expected a kind and numbers, got {kind!r:.60} and {numbers!r:.60}")
    known = {name: value for name, value in numbers.items() if value is not None}
    if not all(map(is_number, known.values())):
        raise TypeError(f"numbers are {numbers!r:.60}")
    if not all(abs(value) <= _LARGEST for value in known.values()):
        raise ValueError(f"numbers are {numbers!r:.60}, beyond {_LARGEST:g}")
    return Noted(now, event["rank"], kind, known)


def _seconds(event: Mapping[str, Any], name: str) -> Seconds:
    value = event[name]
    if not is_number(value):
        raise TypeError(f"{name} is {value!r:.60}, not a number")
    if not -_MAX_SECONDS <= value <= _MAX_SECONDS:
        raise ValueError(f"{name} is {value!r:.60}, longer than {_MAX_SECONDS:g} s")
    return float(value)


def _count(event: Mapping[str, Any], name: str) -> int:
    value = event[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r:.60}, not a whole number")
    if not 0 <= value < 2**63:
        raise ValueError(f"{name} is {value!r:.60}, not in 0 .. 2**63 - 1")
    return value


def read_log(path: Path) -> RunLog:
    """Read the events of one run; damaged lines are skipped with a warning.

    `experiment.json` replaces a damaged first line.

    Raises:
        RunFolderError: If the file cannot be read, is of one worker of a run on real machines,
            or does not contain the experiment.
    """
    reader = EventReader(path)
    if reader.first["type"] == "worker":
        folder, recipe = path.parent, reader.first.get("recipe") or "RECIPE"
        run = folder.parent.parent if folder.parent.name == "workers" else "RUN"
        raise RunFolderError(
            f"{folder} is the folder of one worker; gather all workers' folders, and report "
            f"the result: edgegossip gather {recipe} [the workers' options] --out {run}"
        )
    try:
        header = reader.header
        _check_header(header)
        workers = [WorkerLog() for _ in header["platforms"]]
        log = RunLog(header=header, workers=workers, metrics=reader.metrics)
    except (LookupError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{path}, line 1: expected the experiment, with a platform per worker "
            f"({type(error).__name__}: {error}); the file is damaged - run it again"
        ) from error
    reader.each(log.record)
    return log


def _check_header(header: Mapping[str, Any]) -> None:
    """Validate everything on which the report relies."""
    for key, kind in HEADER_TYPES.items():
        if not isinstance(header[key], kind):
            raise TypeError(f"`{key}` is {header[key]!r}")
    if not 0 < header["num_workers"] == len(header["platforms"]):
        raise ValueError(
            f"{header['num_workers']} workers, {len(header['platforms'])} platforms"
        )
    for key, kind in _BY_RANK.items():
        if not all(isinstance(each, kind) for each in header.get(key, ())):
            raise TypeError(f"`{key}` is {header[key]!r:.60}")
    if len(header.get("roles", header["platforms"])) != header["num_workers"]:
        raise ValueError(f"{header['num_workers']} workers, roles {header['roles']!r:.60}")
    if "type" not in header["algorithm"]:
        raise ValueError("the algorithm has no type")
    for platform in header["platforms"]:
        if not (platform["name"] and platform["throughput"] * platform["executors"] > 0):
            raise ValueError(f"platform {platform['name']!r} has no name or throughput")


# Workers' activity: time spent training, sending, waiting and crashed.


Spans: TypeAlias = NDArray[np.float64]
"""Starts and ends, [num_spans, 2]; spans may overlap unless merged."""
MAX_UNKNOWN = 0.1
"""Maximum unknown share of time beside which the share of waiting is stated."""


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """The spans of one worker, clipped to the run.

    Attributes:
        training: Spans of training, including training that the end of the run cut off.
        sending: Spans of a busy uplink, often during training.
        crashed: Spans from crashes to recoveries, or to the end of the run.
        unfinished: Spans from the last log entry to a crash, and to the end of a log that does
            not say who was training. Work that was cut off there is not in the log, so training
            cannot be distinguished from waiting.
        present: All time, outages included, except from a finish to a later crash or the end of
            the run.
        shares: Share of the run's virtual time for each kind. Each moment counts as the first
            of these that applies: crashed, training, sending, unfinished, waiting, finished.
    """

    training: Spans
    sending: Spans
    crashed: Spans
    unfinished: Spans
    present: Spans
    shares: dict[str, float]


def described(shares: Mapping[str, float]) -> str:
    r"""The shares as text; kinds other than training appear only from half a percent on.

    >>> described({"crashed": 0.0, "training": 0.25, "sending": 0.05, "waiting": 0.7})
    'training 25\xa0%, sending only 5\xa0%, waiting 70\xa0%'
    """
    words = {
        "training": "training",
        "sending": "sending only",
        "waiting": "waiting",
        "unfinished": "waiting or cut off",
        "crashed": "crashed",
        "finished": "finished",
    }
    return ", ".join(
        f"{word} {percent(shares[kind], 0)}"
        for kind, word in words.items()
        if kind == "training" or shares.get(kind, 0) >= 0.005
    )


def mean_shares(workers: Sequence[Activity]) -> dict[str, float]:
    """Each kind's share of time, averaged over one or more workers."""
    kinds = workers[0].shares
    return {
        kind: sum(worker.shares[kind] for worker in workers) / len(workers) for kind in kinds
    }


def mean_waiting(workers: Sequence[Activity]) -> float | None:
    """Mean share of time that the workers waited; None without workers or if it is unknown.

    A worker waits while it is present and has not finished, and neither trains nor sends. A
    wait that is open at the end of the run lasts until then.
    """
    if not workers:
        return None
    shares = mean_shares(workers)
    return None if shares["unfinished"] > MAX_UNKNOWN else shares["waiting"]


def activities(log: RunLog) -> list[Activity]:
    """Divide each worker's time in a run by activity; empty if no virtual time passed."""
    if log.duration <= 0:
        return []
    cut_off = log.ended.cut_off if log.ended else None
    return [
        _activity(worker, log.duration, cut_off is not None, (cut_off or {}).get(rank))
        for rank, worker in enumerate(log.workers)
    ]


def merged(spans: Spans) -> Spans:
    """Join overlapping or adjacent spans.

    >>> merged(np.array([[4.0, 5.0], [0.0, 2.0], [1.0, 3.0]])).tolist()
    [[0.0, 3.0], [4.0, 5.0]]
    """
    if not len(spans):
        return spans
    ordered = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    is_first = np.append(True, ordered[1:, 0] > reach[:-1])
    is_last = np.append(is_first[1:], True)
    return np.column_stack([ordered[is_first, 0], reach[is_last]])


def total(spans: Spans) -> Seconds:
    """Time covered by `spans`, each moment counted once.

    >>> total(np.array([[0.0, 2.0], [1.0, 3.0]]))
    3.0
    """
    joined = merged(spans)
    return float((joined[:, 1] - joined[:, 0]).sum())


def clipped(spans: Iterable[Span] | Spans, end: Seconds) -> Spans:
    """Clip `spans` at `end` and drop empty spans.

    >>> clipped([(0.0, 2.0), (3.0, 4.0)], end=1.0).tolist()
    [[0.0, 1.0]]
    """
    array = np.asarray(spans, dtype=np.float64).reshape(-1, 2).clip(max=end)
    return array[array[:, 1] > array[:, 0]]


def _activity(
    worker: WorkerLog, duration: Seconds, knows_end: bool, cut_off: Seconds | None
) -> Activity:
    """Divide a worker's time.

    Args:
        worker: The worker's log.
        duration: Duration of the run.
        knows_end: Whether it is known what the worker did at the end.
        cut_off: Start of the training that the end cut off, if it is known and there was any.
    """
    training = worker.training if cut_off is None else [*worker.training, (cut_off, duration)]
    # The last outage has no recovery if the worker stayed away.
    recoveries = [*worker.recoveries, duration][: len(worker.crashes)]
    layers = {
        "crashed": clipped(list(zip(worker.crashes, recoveries, strict=True)), duration),
        "training": clipped(training, duration),
        "sending": clipped(worker.sending, duration),
        "unfinished": clipped(_unknown(worker, duration, knows_end), duration),
        "waiting": clipped(_present(worker, duration), duration),
    }
    shares: dict[str, float] = {}
    covered = np.empty((0, 2))
    for kind, spans in layers.items():
        before = total(covered)
        covered = merged(np.concatenate([covered, spans]))
        shares[kind] = (total(covered) - before) / duration
    shares["finished"] = max(0.0, 1 - total(covered) / duration)
    return Activity(
        training=layers["training"],
        sending=layers["sending"],
        crashed=layers["crashed"],
        unfinished=layers["unfinished"],
        present=layers["waiting"],
        shares=shares,
    )


def _present(worker: WorkerLog, duration: Seconds) -> list[Span]:
    """All time, except from a finish to a crash, and after the final finish."""
    until = duration if worker.finished is None else worker.finished
    starts = [0.0, *(end for _, end in worker.rests)]
    return list(zip(starts, [*(start for start, _ in worker.rests), until], strict=True))


def _unknown(worker: WorkerLog, duration: Seconds, knows_end: bool) -> list[Span]:
    """Spans from the last log entry to each crash, and to an end that is unknown."""
    at_rest = {end for _, end in worker.rests}
    stops = [stop for stop in worker.crashes if stop not in at_rest]
    is_away = len(worker.crashes) > len(worker.recoveries)
    stops += [duration] if worker.finished is None and not is_away and not knows_end else []
    ends = np.array(
        [0.0, *(end for _, end in (*worker.training, *worker.sending)), *worker.recoveries]
    )
    return [(float(ends[ends <= stop].max()), stop) for stop in stops]
