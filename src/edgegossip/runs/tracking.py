"""Followers of a run: trackers, such as TensorBoard, and the live view."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from edgegossip.contract.errors import EdgeGossipError, RunFolderError
from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.contract.protocol import Seconds
from edgegossip.runs.describe import flatten
from edgegossip.runs.files import is_number, read_json
from edgegossip.runs.results import Evaluation, Results

_LOG = logging.getLogger("edgegossip.runs")
_MAX_SETTINGS, _MAX_TEXT = 200, 250
"""Maximum number of settings and length of a text; the databases of trackers have limits."""

Setting: TypeAlias = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run at its beginning, as trackers see it.

    Attributes:
        name: Name of the run.
        folder: Its folder.
        header: The resolved experiment, as in `experiment.json`.
    """

    name: str
    folder: Path
    header: Mapping[str, Any]

    @property
    def group(self) -> str:
        """Name shared with related runs: the recipe's name, or else the run's own."""
        return str(self.header.get("recipe") or self.name)

    @property
    def settings(self) -> dict[str, Setting]:
        """All settings by path, such as `task.optimizer.lr`, limited in number and length."""
        flat = flatten({key: value for key, value in self.header.items() if key != "schema"})
        known = ((name, value) for name, value in flat.items() if value is not None)
        return {name: _short(value) for name, value in islice(known, _MAX_SETTINGS)}


def _short(value: object) -> Setting:
    if isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


class Tracking(Protocol):
    """Receives the numbers of one run."""

    def log(self, numbers: Mapping[str, float], *, step: int, seconds: Seconds) -> None:
        """Receive the numbers of one moment of the run.

        Args:
            numbers: Numbers by name.
            step: Samples processed so far by all workers, or by the only tracked one.
            seconds: Time in the run: virtual seconds, or real ones on real machines.
        """

    def end(self, reason: str, summary: Mapping[str, float]) -> None:
        """Receive the end of the run.

        Args:
            reason: Reason for the end, as in `summary.json`.
            summary: All numbers of `summary.json` by name.
        """


class Tracker(Protocol):
    """Follows runs; with several processes, it is pickled."""

    def begin(self, run: TrackedRun) -> Tracking:
        """Begin to track a run.

        Raises:
            EdgeGossipError: If the tracker cannot begin; this ends the run. All other errors
                cause a warning, and the run continues without this tracker.
        """


class Follower:
    """Passes the numbers of a run to its trackers; a tracker that fails is dropped.

    Args:
        trackers: The trackers.
        run: The run.
    """

    def __init__(self, trackers: Sequence[Tracker], run: TrackedRun) -> None:
        self._run = run
        self._latest: Seconds = -math.inf
        self._trackings: dict[int, Tracking] = {}
        self._names = [type(tracker).__name__ for tracker in trackers]
        for index, tracker in enumerate(trackers):
            with self._tolerating(index):
                self._trackings[index] = tracker.begin(run)

    def tell(self, history: Sequence[Evaluation], **more: float | None) -> None:
        """Pass on the evaluations that are later than all those passed on before.

        On real machines, evaluations may be measured out of order. Trackers draw numbers in the
        order of arrival, so late ones are omitted; the report has them.

        Args:
            history: Evaluations in order of time.
            more: Further numbers of the last evaluation; None for unknown ones.
        """
        if not self._trackings:
            return
        for evaluation in history:
            if evaluation.time <= self._latest:
                continue
            self._latest = evaluation.time
            numbers = evaluation.line()
            if evaluation is history[-1]:
                numbers |= {name: value for name, value in more.items() if value is not None}
            seconds, step = numbers.pop("time"), evaluation.samples_processed
            self.log(numbers, step=step, seconds=seconds)

    def log(self, numbers: Mapping[str, float], *, step: int, seconds: Seconds) -> None:
        """Pass numbers on; see `Tracking.log`."""
        self._each(lambda tracking: tracking.log(numbers, step=step, seconds=seconds))

    def end(self) -> None:
        """Pass on the folder's `summary.json`; without one, report a failed run."""
        try:
            summary = read_json(self._run.folder / "summary.json")
        except RunFolderError:
            summary = {"reason": "failed"}
        numbers = {name: value for name, value in summary.items() if is_number(value)}
        self._each(lambda tracking: tracking.end(str(summary.get("reason")), numbers))
        self._trackings.clear()

    def _each(self, act: Callable[[Tracking], None]) -> None:
        for index in [*self._trackings]:
            with self._tolerating(index):
                act(self._trackings[index])

    @contextmanager
    def _tolerating(self, index: int) -> Iterator[None]:
        """Drop a tracker that fails: training matters more than its curves."""
        try:
            yield
        except EdgeGossipError:
            raise
        except Exception as error:
            self._trackings.pop(index, None)
            _LOG.warning(
                "%s failed (%s: %s) - %s continues without it",
                self._names[index],
                type(error).__name__,
                error,
                self._run.name,
            )


@contextmanager
def followed(trackers: Sequence[Tracker], run: TrackedRun) -> Iterator[Follower]:
    """Track a run until it ends, for whatever reason."""
    follower = Follower(trackers, run)
    try:
        yield follower
    finally:
        follower.end()


def track_results(results: Results, trackers: Sequence[Tracker]) -> None:
    """Pass on the numbers of a finished run.

    Args:
        results: Results of the run; ignored without a folder.
        trackers: The trackers.
    """
    if results.folder is None or not trackers:
        return
    header = read_json(results.folder / "experiment.json")
    run = TrackedRun(name=results.name, folder=results.folder, header=header)
    with followed(trackers, run) as follower:
        follower.tell(results.history)


# The live view.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """Status of one worker on a real machine, as of its last news.

    Attributes:
        name: Name by its role, such as "worker 2".
        state: "starts", "runs", "ended" (without a failure) or "lost".
        round: Rounds so far.
        samples_per_second: Samples per second lately, waits included; None if unknown.
        waiting: Share of the same time in which it did not train; None if unknown.
        age: Seconds since the last news; None without any since this start.
        seconds_left: Estimated seconds until its end; None if unknown, or if it does not run.
    """

    name: str
    state: str
    round: int
    samples_per_second: float | None
    waiting: float | None
    age: Seconds | None
    seconds_left: Seconds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Status of a run.

    Attributes:
        name: Name of the run.
        time: Virtual seconds.
        share: Completed share of the run, in [0, 1].
        evaluation: Newest evaluation; None before the first.
        metric: The task's chosen metric.
        wall_seconds: Duration of the run so far, in wall seconds, since `first_share`.
        samples_per_second: Samples processed per wall second since the last start or resume;
            on real machines, lately.
        epochs: Samples processed so far / training samples; None for those at `evaluation`.
        bytes_sent: Bytes sent so far; None for those at `evaluation`.
        commits: Commits of all workers to a server so far; None without a server.
        num_workers: Number of workers, if they are processes of their own.
        num_lost: Number of these that have failed or were killed, and did not come back.
        roles: The ranks of each role, in words; empty if all are workers.
        first_share: Completed share when `wall_seconds` began; above 0 in a resumed run.
        workers: The workers, if they are processes of their own.
    """

    name: str
    time: Seconds
    share: float
    evaluation: Evaluation | None
    wall_seconds: float
    samples_per_second: float
    metric: MetricSpec = ACCURACY
    commits: int | None = None
    num_workers: int | None = None
    num_lost: int = 0
    roles: str = ""
    first_share: float = 0.0
    epochs: float | None = None
    bytes_sent: int | None = None
    workers: tuple[WorkerRow, ...] = ()

    @property
    def seconds_left(self) -> float | None:
        """Estimated wall seconds until the end."""
        done = self.share - self.first_share
        return self.wall_seconds * (1 - self.share) / done if done > 0 else None


class Progress(Protocol):
    """A live view."""

    def update(self, status: Status) -> None:
        """Show `status`."""


class Silent:
    """Shows nothing."""

    def update(self, status: Status) -> None:
        pass
