"""Whole runs on a Ray cluster: each cell of a study on one core of any machine."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from edgegossip.cluster.ray_session import (
    LostError,
    RaySession,
    TorchSettings,
    require_versions,
)
from edgegossip.core.atomic import write_whole
from edgegossip.core.errors import NetworkError, TrainingError
from edgegossip.core.ranges import check_range
from edgegossip.experiments.at_once import MovableWork
from edgegossip.experiments.describe import versions
from edgegossip.experiments.progress import Progress, Status
from edgegossip.experiments.signals import interrupt, on_stop_signal

T = TypeVar("T")
_log = logging.getLogger(__name__)
_STATUS_SECONDS = 0.5
_SLOW_START_SECONDS = 60.0


class RayRuns:
    """Carries out the cells of a study on the cores of a Ray cluster, with the same rows.

    Each cell has one core; its folder is copied here when it ends. A cell that is lost, for
    example with its machine, is restarted elsewhere. After Ctrl+C, cells that have not ended
    are lost. From Python::

        run_study(study, out="out", at_once=RayRuns("HEAD:6379"))

    All machines need the same versions of Python and packages, which is checked. Data sets and
    recipe files must be in the same places as on this machine. See `RayPool` for security and
    the kind of processor.

    Args:
        address: As in `RayPool`.
        num_runs: Maximum number of parallel cells; None for one per core.
        open_session: Connects to Ray.

    Raises:
        ValueError: If `num_runs` is out of range.
    """

    def __init__(
        self,
        address: str | None = None,
        num_runs: int | None = None,
        *,
        open_session: Callable[[str | None, int | None], RaySession] = RaySession,
    ) -> None:
        check_range("num_runs", num_runs, "at least 1 or None")
        self._address, self._num_runs = address, num_runs
        self._open_session = open_session

    def __call__(
        self,
        jobs: Mapping[str, Callable[[], MovableWork[T]]],
        after: Mapping[str, Collection[str]],
        *,
        progress: Progress,
    ) -> Generator[tuple[str, Future[T]]]:
        """Carry out all jobs; yield each finished job. See `do_at_once`.

        Raises:
            KeyboardInterrupt: After Ctrl+C, SIGTERM or SIGHUP.
            NetworkError: If the cluster cannot be reached, or has other versions.
            UsageError: If ray is not installed.
        """
        remaining, running = dict(jobs), dict[Any, tuple[str, Path]]()
        session = self._open_session(self._address, self._num_runs)
        with closing(session), on_stop_signal(interrupt):
            statuses = session.queue()
            place = _Home(statuses, TorchSettings.here(), versions(), os.getcwd())
            watch = _StatusesOfNodes(statuses, progress)
            while remaining or running:
                waiting = {*remaining, *(name for name, _ in running.values())}
                for name in [*remaining]:
                    is_free = self._num_runs is None or len(running) < self._num_runs
                    if is_free and waiting.isdisjoint(after[name]):
                        work = remaining.pop(name)()
                        reference = session.start(_carry_out, place, session.put(work))
                        running[reference] = name, work.folder
                for reference in session.wait([*running], _STATUS_SECONDS):
                    name, folder = running.pop(reference)
                    yield name, _arrived(session, reference, name, folder)
                watch.show()


@dataclass(frozen=True, slots=True)
class _Finished(Generic[T]):
    """The result of a job, or its error, and the files that it left in its folder."""

    files: Mapping[str, bytes]
    result: T | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Home:
    """Facts about the process that started the study, for the nodes.

    Args:
        statuses: The queue for the live view.
        settings: PyTorch's settings.
        versions: Versions of Python and packages.
        folder: Current folder, for relative names.
    """

    statuses: Any
    settings: TorchSettings
    versions: Mapping[str, str]
    folder: str


def _carry_out(place: _Home, work: MovableWork[T]) -> _Finished[T]:
    """Carry out work on a node."""
    try:
        require_versions(socket.gethostname(), versions(), place.versions)
    except NetworkError as error:
        return _Finished({}, error=error)
    with suppress(OSError):
        os.chdir(place.folder)
    place.settings.apply()
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    with tempfile.TemporaryDirectory(prefix="eg-run-") as parent:
        folder = Path(parent, "run")
        try:
            result = work.moved(folder)(_ViewOnNode(place.statuses))
        except Exception as error:
            return _Finished(_files(folder), error=error)
        return _Finished(_files(folder), result)


class _ViewOnNode:
    """A live view on a node; it passes some of the reports on."""

    def __init__(self, statuses: Any) -> None:  # noqa: ANN401
        self._statuses = statuses
        self._told: float | None = None

    def update(self, status: Status) -> None:
        now = time.monotonic()
        if self._told is None or status.share >= 1 or now - self._told > _STATUS_SECONDS:
            self._told = now
            with suppress(Exception):  # a view that is gone must not end a run
                self._statuses.put(status)


class _StatusesOfNodes:
    """Shows the reports of all nodes, and warns if there are none."""

    def __init__(self, statuses: Any, progress: Progress) -> None:  # noqa: ANN401
        self._statuses, self._progress = statuses, progress
        self._silent_since: float | None = time.monotonic()

    def show(self) -> None:
        found = self._statuses.get_nowait_batch(self._statuses.qsize())
        for status in found:
            self._progress.update(status)
        if found:
            self._silent_since = None
        start = self._silent_since
        if start is not None and time.monotonic() - start > _SLOW_START_SECONDS:
            self._silent_since = None
            _log.warning("no core of the Ray cluster is free yet; waiting for one")


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def _arrived(session: RaySession, reference: object, name: str, folder: Path) -> Future[Any]:
    """Store the files of a finished job here; return its result."""
    future: Future[Any] = Future()
    try:
        finished = session.get(reference)
    except LostError as error:
        future.set_exception(
            TrainingError(
                f"{name} was lost again and again, perhaps for lack of memory; use fewer "
                f"--processes, and --resume. The last error: {error}"
            )
        )
        return future
    if isinstance(finished.error, NetworkError):
        raise finished.error
    _replace(folder, finished.files)
    if finished.error is not None:
        future.set_exception(finished.error)
    else:
        future.set_result(finished.result)
    return future


def _replace(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder, then replace the old one, which an interrupted run may have left."""
    if not files:
        return
    new = folder.with_name(f".{folder.name}.new")
    try:
        for name, content in files.items():
            file = new / name
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, content)
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
