"""Whole runs on a Ray cluster: each cell of a study, or run of a comparison, on one core."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil

from edgegossip.contract.errors import EdgeGossipError, Interrupted, NetworkError, TrainingError
from edgegossip.contract.ranges import check_range
from edgegossip.integrations.ray_session import (
    LostError,
    NodeError,
    RaySession,
    TorchSettings,
    require_versions,
)
from edgegossip.machine.files import write_whole
from edgegossip.runs.describe import versions
from edgegossip.runs.parallel import MovableWork, ready
from edgegossip.runs.process import interrupt, on_stop_signal
from edgegossip.runs.tracking import Progress, Status

T = TypeVar("T")
_log = logging.getLogger(__name__)
_STATUS_SECONDS = 0.5
_SLOW_START_SECONDS = 60.0
_SPARE = 2  # cells that wait at the nodes, so that no core does
_PREFIX = "eg-run-"


class RayRuns:
    """Carries out whole runs on the cores of a Ray cluster, with the same results as here.

    Each run of a comparison, or cell of a study, has one core; its folder is copied here when
    it ends. A run that is lost, for example with its machine, is restarted elsewhere. After
    Ctrl+C, runs that have not ended are lost, and so are checkpoints of runs that were
    interrupted here. From Python::

        compare(comparison, out="out", at_once=RayRuns("HEAD:6379"))
        run_study(study, out="out", at_once=RayRuns("HEAD:6379"))

    This machine must belong to the cluster (no ``ray://``). All machines need the same versions
    of Python and packages, which is checked, and the same kind of processor, which is not. Data
    sets and recipe files must be in the same places as on this machine. GPUs are not used.

    Code and data are pickled. Anyone who can reach the ports of a cluster, including one that
    is started here, can run any code on its machines and on this one. On one machine Ray asks
    for the token in ``~/.ray/auth_token``, unless RAY_AUTH_MODE is "disabled". Its usage
    reports are off unless RAY_USAGE_STATS_ENABLED is set.

    Args:
        address: Running cluster to which this machine belongs, "HOST:PORT" or "auto"; None
            starts Ray on this machine alone, until the last run has ended.
        num_runs: Maximum number of parallel runs; None for one per core.
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
        try:
            with (
                on_stop_signal(interrupt),
                closing(self._open_session(self._address, self._num_runs)) as session,
            ):
                yield from self._do(session, jobs, after, progress)
        except NodeError as error:
            raise TrainingError(f"a node of the Ray cluster failed: {error}") from error
        except LostError as error:
            raise NetworkError(
                f"the Ray cluster is gone ({error}); use --resume to continue"
            ) from error

    def _do(
        self,
        session: RaySession,
        jobs: Mapping[str, Callable[[], MovableWork[T]]],
        after: Mapping[str, Collection[str]],
        progress: Progress,
    ) -> Generator[tuple[str, Future[T]]]:
        remaining, running = dict(jobs), dict[Any, tuple[str, Path]]()
        statuses = session.queue()
        home = _Home(statuses, TorchSettings.here(), versions(), os.getcwd(), session.folder)
        watch = _StatusesOfNodes(statuses, progress)
        try:
            while remaining or running:
                limit = self._num_runs or _SPARE + session.num_cores()
                names = [name for name, _ in running.values()]
                for name in ready(remaining, names, after, limit):
                    work = remaining.pop(name)()
                    running[session.start(_carry_out, home, work)] = name, work.folder
                for reference in session.wait([*running], _STATUS_SECONDS):
                    name, folder = running.pop(reference)
                    yield name, _arrived(session, reference, name, folder)
                watch.show()
        finally:
            session.cancel(running)


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
        scratch: Folder for runs; None for that of the system.
    """

    statuses: Any
    settings: TorchSettings
    versions: Mapping[str, str]
    folder: str
    scratch: str | None


def _carry_out(home: _Home, work: MovableWork[T]) -> _Finished[T]:
    """Carry out work on a node."""
    host = socket.gethostname()
    try:
        require_versions(host, versions(), home.versions)
        os.chdir(home.folder)
    except NetworkError as error:
        return _Finished({}, error=error)
    except OSError as error:
        return _Finished({}, error=NetworkError(f"{host} lacks the current folder: {error}"))
    home.settings.apply()
    _remove_leftovers(home.scratch)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", dir=home.scratch) as it:
        folder = Path(it, "run")
        try:
            result = work.moved(folder)(_ViewOnNode(home.statuses))
        except (Interrupted, KeyboardInterrupt):
            shutil.rmtree(it, ignore_errors=True)
            os._exit(1)  # as if it had crashed, so that Ray begins the work again elsewhere
        except EdgeGossipError as error:
            return _Finished(_files(folder), error=error)
        except Exception as error:  # perhaps of a class that others do not know
            text = f"the run failed on {host} with {error!r:.300}\n{traceback.format_exc()}"
            return _Finished(_files(folder), error=TrainingError(text))
        return _Finished(_files(folder), result)


def _remove_leftovers(scratch: str | None) -> None:
    """Remove the folders of processes on this machine that were killed."""
    for folder in Path(scratch or tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


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
        found = []
        with suppress(Exception):  # as above
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
    except NodeError:
        raise
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
    new, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("new", "old"))
    for each in (new, old):
        shutil.rmtree(each, ignore_errors=True)
    try:
        for name, content in files.items():
            file = new / name
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, content)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        for each in (new, old):
            shutil.rmtree(each, ignore_errors=True)
