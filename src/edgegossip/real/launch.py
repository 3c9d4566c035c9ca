"""Launching all workers of a run as processes on this machine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from edgegossip.contract.errors import Interrupted, NetworkError, RunFolderError, TrainingError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.data.local import Local
from edgegossip.machine.counters import is_running, kill_descendants
from edgegossip.machine.system import own_group, send_stop
from edgegossip.real.best_model import with_best_of
from edgegossip.real.gather import make_gathering
from edgegossip.real.gathering import WORKERS, Gathering
from edgegossip.real.overview import Overview
from edgegossip.real.worker_folder import final_summary, goes_on_at, has_ended, require_gathered
from edgegossip.runs.describe import header, with_article
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import lock_holder, locked, require_unlocked
from edgegossip.runs.folder import finished_results, holds_run
from edgegossip.runs.process import on_stop_signal
from edgegossip.runs.results import Results
from edgegossip.runs.tracking import (
    Follower,
    Progress,
    Silent,
    Status,
    TrackedRun,
    Tracker,
    followed,
)

_LOG = logging.getLogger("edgegossip.real")
LOG = "log.txt"
"""Name of the file with a worker's output, in its folder."""
_LOOK: Seconds = 0.25
"""Seconds between two looks at the workers' files."""
_PORTS = range(20_000, 30_000)
"""Ports that no system gives to outgoing connections."""
_MEASURING = 0.05
"""Maximum share of a core's time that evaluations may take."""

MakeCommand = Callable[[Rank, str, Sequence[str], Path, Sequence[Rank]], Sequence[str]]
"""Makes a worker's command from its rank, its endpoint, the other workers' endpoints, its
folder, and the workers that have finished."""
MakeMeasure = Callable[[Rank], Sequence[str]]
"""Makes, from a worker's rank, the command that measures averaged models on its data."""


class WorkerProcesses:
    """The processes of workers on this machine: started, stopped and ended together.

    Args:
        stop_signal: Signal that asks a worker to stop.

    Attributes:
        processes: The processes, by rank.
        is_stopping: Whether the workers were asked to stop.
    """

    def __init__(self, stop_signal: int = signal.SIGTERM) -> None:
        self.processes: dict[Rank, subprocess.Popen[bytes]] = {}
        self.is_stopping = False
        self._stop_signal = stop_signal

    def start(
        self,
        rank: Rank,
        arguments: Sequence[str],
        output: IO[bytes] | None,
        environment: Mapping[str, str] | None = None,
        program: str = sys.executable,
    ) -> None:
        """Start a worker: `program`, by default Python, with `arguments`."""
        process = self.processes[rank] = subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Workers run side by side: several intra-op threads each would get in their way.
            env={"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})},
            # Ctrl+C must reach it only once, and only through this process.
            **own_group(),
        )
        if self.is_stopping:  # the signal came while it was being started
            send_stop(process, self._stop_signal)

    def stop(self) -> None:
        """Ask all workers to stop."""
        self.is_stopping = True
        for process in [*self.processes.values()]:  # a signal may come during `start`
            if process.poll() is None:
                send_stop(process, self._stop_signal)

    def kill(self) -> None:
        """Kill all workers that still run, with the processes that they have started."""
        for process in [*self.processes.values()]:
            if process.poll() is None:
                kill_descendants(process.pid)
        for process in [*self.processes.values()]:
            process.kill()


@contextmanager
def worker_processes(stop_signal: int = signal.SIGTERM) -> Iterator[WorkerProcesses]:
    """Pass signals on to the workers, a second one as SIGKILL; no worker outlives the block."""
    workers = WorkerProcesses(stop_signal)
    try:
        with on_stop_signal(workers.stop, insist=workers.kill):
            yield workers
    finally:
        workers.kill()
        for process in workers.processes.values():
            process.wait()


def killed_by(process: subprocess.Popen[bytes]) -> str | None:
    """Say by which signal a process was killed; None if it ended by itself or still runs.

    A killed process could not say anything itself, so the end of its output is no reason.
    """
    code = process.poll()
    return None if code is None or code >= 0 else f"was killed (signal {-code})"


class LostWorkers:
    """Workers of a run whose process has failed; they may be started again by hand.

    A worker that was started again is a process of the user's, which shows only by the lock of
    its folder.

    Args:
        gathering: The run, with the workers' folders.
        started: The processes that were started.
    """

    def __init__(self, gathering: Gathering, started: WorkerProcesses) -> None:
        self._gathering = gathering
        self._started = started
        self._reported: set[Rank] = set()

    @property
    def _failed_processes(self) -> list[Rank]:
        return [rank for rank, each in self._started.processes.items() if each.poll()]

    @property
    def failed(self) -> list[Rank]:
        """Workers whose process has failed and that have not finished since."""
        return [rank for rank in self._failed_processes if not has_finished(self._path(rank))]

    @property
    def lost(self) -> list[Rank]:
        """Failed workers that have not been started again."""
        return [rank for rank in self.failed if not self._is_back(rank)]

    @property
    def is_anyone_back(self) -> bool:
        """Whether a failed worker was started again and trains, while none is to stop."""
        if self._started.is_stopping:
            return False
        return any(self._is_back(rank) for rank in self._failed_processes)

    def how(self, rank: Rank) -> str:
        """How a worker failed, in words."""
        path = self._path(rank)
        if (killed := killed_by(self._started.processes[rank])) is not None:
            return f"{killed} and did not come back (see {path / LOG})"
        return f"failed: {last_line(path)}"

    def report(self) -> None:
        """Print at once which worker has failed, and the command that starts it again."""
        processes = self._started.processes
        goes_on = any(each.poll() is None for each in processes.values())
        if self._started.is_stopping or not goes_on:
            return
        for rank in self.lost:
            if rank in self._reported:
                continue
            self._reported.add(rank)
            name = with_article(self._gathering.roles, rank)
            how = killed_by(processes[rank]) or f"failed: {last_line(self._path(rank))}"
            arguments = processes[rank].args
            assert isinstance(arguments, list)
            command = shlex.join(["edgegossip", *arguments[3:]])  # after python -m edgegossip
            text = f"{name} {how}; the others go on; start it again with: {command}"
            _LOG.warning("%s", text)

    def _path(self, rank: Rank) -> Path:
        return self._gathering.workers[rank].path

    def _is_back(self, rank: Rank) -> bool:
        holder = lock_holder(self._path(rank))
        return holder is not None and is_running(holder)


def has_finished(folder: Path) -> bool:
    """Whether the worker with this folder has ended by itself."""
    try:
        return final_summary(folder) is not None
    except RunFolderError:
        return False


def last_line(folder: Path) -> str:
    """The last line that a worker printed, and where the others are."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{_as_text(lines[-1]) if lines else 'nothing said'} (see {path})"


def _as_text(line: str) -> str:
    """A line as it would be without `--log-format json`."""
    try:
        found = json.loads(line)
        prefix = "edgegossip: " if found["logger"] == "edgegossip.cli" else ""
        return f"{prefix}{found['message']}"
    except (ValueError, KeyError, TypeError):
        return line


def launch(
    experiment: Experiment,
    make_command: MakeCommand,
    *,
    out: Path,
    resume: bool = False,
    recipe: str | None = None,
    command: str | None = None,
    progress: Progress | None = None,
    trackers: Sequence[Tracker] = (),
    make_measure: MakeMeasure | None = None,
    max_seconds: Seconds | None = None,
) -> Results:
    """Start and watch a process for each worker, and gather the workers' folders in `out`.

    If a worker dies, neither the run nor this function ends: it prints the command that starts
    the worker again, and waits for a worker that was started so. A worker whose folder shows
    that it has finished is not started again.

    Args:
        experiment: The workers' experiment.
        make_command: Makes the command of each worker.
        out: Run folder, made if missing; must not hold a run unless `resume`.
        resume: Continue the run in `out`. A finished run is only read.
        recipe: Name of the recipe, for the record.
        command: Command that repeats the run, for the record.
        progress: Live view, if any.
        trackers: Trackers that receive the averaged model's numbers.
        make_measure: Makes the commands that measure `Local` data; unused for other data.
        max_seconds: Time limit that the workers' commands have, for the remaining time in the
            live view; by default the experiment's.

    Raises:
        Interrupted: After Ctrl+C, SIGTERM or SIGHUP; the workers have checkpoints.
        TrainingError: If all workers have failed.
        LocalProtocolError: If the algorithm does not describe its messages.
        RunFolderError: If `out` cannot be written, is in use, or holds another experiment or,
            without `resume`, a run.
        ValueError: If the data is `Local` and `make_measure` is None, or the experiment has
            a `keep` that real workers cannot have; see `take_part`.
    """
    if isinstance(experiment.task.dataset, Local) and make_measure is None:
        raise ValueError("Local data is measured by its workers; give launch a make_measure")
    with_best_of(experiment)
    with locked(out):
        if not resume and (holds_run(out) or [*out.glob(f"{WORKERS}/*/experiment.json")]):
            raise RunFolderError(
                f"{out} already holds a run; choose another --out, or --resume it"
            )
        # Everything that can be wrong is checked before the first worker is started.
        require_gathered(out)
        gathering = make_gathering(experiment, out, recipe, command)
        gathering.require_schema()
        # Each worker locks its folder; workers of a killed launcher may still be ending.
        require_unlocked(*(each.path for each in gathering.workers))
        described = header(experiment, recipe)
        ended = [each.rank for each in gathering.workers if has_ended(each.path, described)]
        if resume and (results := finished_results(out)):
            return results
        # What was measured beyond this time is of a future that resumed workers do not have.
        gathering.go_on_at(max(goes_on_at(each.path) for each in gathering.workers))
        tracked = TrackedRun(name=experiment.run_name, folder=out, header=described)
        with followed(trackers, tracked) as follower:
            shown = _Followed(progress or Silent(), gathering, follower)
            limit = max_seconds or experiment.max_seconds
            limited = replace(experiment, max_seconds=limit)
            failures = _run_workers(limited, gathering, make_command, ended, shown)
            if failures is None:
                raise Interrupted(
                    f"interrupted; {out} holds the workers' checkpoints, and the same command "
                    "with --resume and this --out continues"
                )
            results = _gather(gathering, failures, make_measure)
            follower.tell(results.history)
            return results


def lost_workers(experiment: Experiment, out: Path) -> list[Rank]:
    """The workers of a launched run that failed or were killed, and did not finish since."""
    folders = [out / WORKERS / str(rank) for rank in range(experiment.num_workers)]
    return [rank for rank, folder in enumerate(folders) if not has_finished(folder)]


class _Followed:
    """A live view that also passes measurements to trackers."""

    def __init__(self, progress: Progress, gathering: Gathering, follower: Follower) -> None:
        self._progress = progress
        self._gathering = gathering
        self._follower = follower

    def update(self, status: Status) -> None:
        self._progress.update(status)
        self._follower.tell(self._gathering.history)


def _run_workers(
    experiment: Experiment,
    gathering: Gathering,
    make_command: MakeCommand,
    ended: Sequence[Rank],
    progress: Progress,
) -> dict[Rank, str] | None:
    """Run all unfinished workers; return how workers failed, or None if stopped."""
    endpoints = _endpoints(rank for rank in range(experiment.num_workers) if rank not in ended)
    with worker_processes() as workers:
        for rank, endpoint in endpoints.items():
            folder = gathering.workers[rank].path
            others = [each for each in endpoints.values() if each != endpoint]
            _start(workers, rank, make_command(rank, endpoint, others, folder, ended), folder)
        lost = LostWorkers(gathering, workers)
        _watch(experiment, gathering, workers.processes, progress, lost)
    failures = {rank: lost.how(rank) for rank in lost.failed}
    # Workers that finished although they were asked to stop leave nothing to continue.
    return None if workers.is_stopping and failures else failures


def _gather(
    gathering: Gathering,
    failures: Mapping[Rank, str],
    make_measure: MakeMeasure | None = None,
) -> Results:
    """Make one run folder from the workers' folders, and report failed workers."""
    if len(failures) == len(gathering.workers):
        # A killed worker did not say why.
        lines = [last_line(gathering.workers[rank].path) for rank in failures]
        said = [line for line in lines if line.startswith("edgegossip: ")] or lines
        raise TrainingError(f"all workers failed, the first with: {said[0]}")
    # Before the average, because without a server there may be no model to average.
    for rank, how in failures.items():
        name = with_article(gathering.roles, rank)
        _LOG.warning("%s %s", name, how)
    if waited_for := gathering.average():
        assert make_measure is not None  # checked before the workers were started
        failed = _measure(gathering, waited_for, make_measure)
        gathering.leave_out(failed)
        for rank in failed:
            name = with_article(gathering.roles, rank)
            why = last_line(gathering.workers[rank].path)
            _LOG.warning("%s could not measure: %s", name, why)
    return gathering.finish()


def _measure(
    gathering: Gathering, ranks: Sequence[Rank], make_measure: MakeMeasure
) -> list[Rank]:
    """Let one process per worker measure the averaged models; return failed workers."""
    with worker_processes() as workers:
        for rank in ranks:
            _start(workers, rank, make_measure(rank), gathering.workers[rank].path)
        failed = [rank for rank, process in workers.processes.items() if process.wait()]
    if workers.is_stopping:
        raise Interrupted(
            "interrupted while the workers measured the averaged models; the same command with "
            "--resume and this --out measures them again"
        )
    return failed


def free_ports(number: int) -> list[int]:
    """Find ports on this machine where nobody listens.

    They lie below those that the system gives to outgoing connections (from 32768 on Linux,
    from 49152 elsewhere), because such a connection, of any process, would take a port
    before its worker listens there.

    Raises:
        NetworkError: if too few are free.
    """
    free: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(free) == number:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free.append(port)
    if len(free) < number:
        raise NetworkError(
            f"only {len(free)} free ports of {number} from {_PORTS[0]:,} to {_PORTS[-1]:,}; "
            "stop other programs that listen there"
        )
    return free


def _endpoints(ranks: Iterable[Rank]) -> dict[Rank, str]:
    ranks = list(ranks)
    ports = free_ports(len(ranks))
    return {rank: f"tcp/127.0.0.1:{port}" for rank, port in zip(ranks, ports, strict=True)}


def _start(workers: WorkerProcesses, rank: Rank, command: Sequence[str], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOG).open("ab") as log:
            workers.start(rank, ["-m", "edgegossip", *command], log)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {folder}: {error.strerror}; choose another --out"
        ) from error


def _watch(
    experiment: Experiment,
    gathering: Gathering,
    processes: Mapping[Rank, subprocess.Popen[bytes]],
    progress: Progress,
    lost: LostWorkers,
) -> None:
    """Read the workers' files and evaluate the averaged model until all have ended."""
    overview, due = Overview(experiment, gathering), time.monotonic()
    while any(each.poll() is None for each in processes.values()) or lost.is_anyone_back:
        lost.report()
        for worker in gathering.workers:
            process = processes.get(worker.rank)
            worker.has_ended = process is None or process.poll() is not None
        failed, away = lost.failed, lost.lost
        ended = [each.rank for each in gathering.workers if each.has_ended]
        ended = [rank for rank in ended if rank not in failed]
        progress.update(overview.status(time.monotonic(), away, ended))
        now = time.monotonic()
        if now >= due and gathering.measure_next():
            # The workers need the cores of this machine, so what takes too long now is measured
            # when they have ended.
            due = time.monotonic() + (time.monotonic() - now) / _MEASURING
        time.sleep(_LOOK)
