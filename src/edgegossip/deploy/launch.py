"""Launching all workers of a run as processes on this machine."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from edgegossip.core.errors import Interrupted, RunFolderError, TrainingError
from edgegossip.core.protocol import Rank, Seconds
from edgegossip.deploy.gather import make_gathering
from edgegossip.deploy.gathering import WORKERS, Gathering
from edgegossip.deploy.worker_past import goes_on_at, has_ended, require_gathered
from edgegossip.experiments.describe import header
from edgegossip.experiments.experiment import Experiment
from edgegossip.experiments.folder_lock import locked, require_unlocked
from edgegossip.experiments.progress import Progress, Silent, Status
from edgegossip.experiments.results import Results
from edgegossip.experiments.roles import who_is_who, with_article
from edgegossip.experiments.run_folder import finished_results, holds_run
from edgegossip.experiments.signals import on_stop_signal
from edgegossip.experiments.tracking import Follower, TrackedRun, Tracker, followed
from edgegossip.learning.local import Local

_LOOK: Seconds = 0.25
_MEASURING = 0.05
"""Maximum share of a core's time that evaluations may take."""
# Workers run side by side; several intra-op threads each would get in their way.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

MakeCommand = Callable[[Rank, str, Sequence[str], Path, Sequence[Rank]], Sequence[str]]
"""Makes a worker's command from its rank, its endpoint, the other workers' endpoints, its
folder, and the workers that have finished."""
MakeMeasure = Callable[[Rank], Sequence[str]]
"""Makes, from a worker's rank, the command that measures averaged models on its data."""


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
) -> Results:
    """Start and watch a process for each worker, and gather the workers' folders in `out`.

    If a worker dies, neither the run nor this function ends. A worker whose folder shows that
    it has finished is not started again.

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

    Raises:
        Interrupted: After Ctrl+C, SIGTERM or SIGHUP; the workers have checkpoints.
        TrainingError: If all workers have failed.
        LocalProtocolError: If the algorithm does not describe its messages.
        RunFolderError: If `out` cannot be written, is in use, or holds another experiment or,
            without `resume`, a run.
        ValueError: If the data is `Local` and `make_measure` is None.
    """
    if isinstance(experiment.task.dataset, Local) and make_measure is None:
        raise ValueError("Local data is measured by its workers; give launch a make_measure")
    with locked(out):
        if not resume and (holds_run(out) or [*out.glob(f"{WORKERS}/*/experiment.json")]):
            raise RunFolderError(
                f"{out} already holds a run; choose another --out, or --resume it"
            )
        require_gathered(out)
        gathering = make_gathering(experiment, out, recipe, command)
        gathering.require_schema()
        # Each worker locks its folder; workers of a killed launcher may still be ending.
        require_unlocked(*(each.path for each in gathering.workers))
        described = header(experiment, recipe)
        ended = [each.rank for each in gathering.workers if has_ended(each.path, described)]
        if resume and (results := finished_results(out)):
            return results
        gathering.go_on_at(max(goes_on_at(each.path) for each in gathering.workers))
        tracked = TrackedRun(name=experiment.run_name, folder=out, header=described)
        with followed(trackers, tracked) as follower:
            shown = _Followed(progress or Silent(), gathering, follower)
            failures = _run_workers(experiment, gathering, make_command, ended, shown)
            if failures is None:
                raise Interrupted(
                    f"interrupted; {out} holds the workers' checkpoints, and the same command "
                    "with --resume and this --out continues"
                )
            results = _gather(gathering, out, failures, make_measure)
            follower.tell(results.history)
            return results


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
) -> list[Rank] | None:
    """Run all unfinished workers; return failed workers, or None if stopped."""
    endpoints = _endpoints(rank for rank in range(experiment.num_workers) if rank not in ended)
    processes: dict[Rank, subprocess.Popen[bytes]] = {}
    asked: list[int] = []

    def stop() -> None:
        asked.append(signal.SIGTERM)
        _send(processes.values(), signal.SIGTERM)

    try:
        with on_stop_signal(stop, insist=lambda: _send(processes.values(), signal.SIGKILL)):
            for rank, endpoint in endpoints.items():
                folder = gathering.workers[rank].path
                others = [each for each in endpoints.values() if each != endpoint]
                arguments = make_command(rank, endpoint, others, folder, ended)
                processes[rank] = _start(arguments, folder)
            if asked:
                stop()  # again, for those that were started since
            _watch(experiment, gathering, processes, progress)
    finally:
        _send(processes.values(), signal.SIGKILL)  # however this ends, no worker outlives it
        for process in processes.values():
            process.wait()
    failures = [rank for rank, process in processes.items() if process.returncode]
    return None if asked and failures else failures


def _gather(
    gathering: Gathering,
    out: Path,
    failures: Sequence[Rank],
    make_measure: MakeMeasure | None = None,
) -> Results:
    """Make one run folder from the workers' folders, and report failed workers."""
    if len(failures) == len(gathering.workers):
        # A killed worker did not say why.
        lines = [_last_line(out, rank) for rank in failures]
        said = [line for line in lines if line.startswith("edgegossip: ")] or lines
        raise TrainingError(f"all workers failed, the first with: {said[0]}")
    for rank in failures:  # first, as without a server there may be no model
        name = with_article(gathering.roles, rank)
        print(f"{name} failed: {_last_line(out, rank)}", file=sys.stderr)
    if waited_for := gathering.average():
        assert make_measure is not None  # checked before the workers were started
        failed = _measure(gathering, waited_for, make_measure)
        gathering.leave_out(failed)
        for rank in failed:
            name = with_article(gathering.roles, rank)
            print(f"{name} could not measure: {_last_line(out, rank)}", file=sys.stderr)
    return gathering.finish()


def _measure(
    gathering: Gathering, ranks: Sequence[Rank], make_measure: MakeMeasure
) -> list[Rank]:
    """Let one process per worker measure the averaged models; return failed workers."""
    processes: dict[Rank, subprocess.Popen[bytes]] = {}
    try:
        for rank in ranks:
            processes[rank] = _start(make_measure(rank), gathering.workers[rank].path)
        return [rank for rank, process in processes.items() if process.wait()]
    finally:
        _send(processes.values(), signal.SIGKILL)


def free_ports(number: int) -> list[int]:
    """Find free ports on this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _endpoints(ranks: Iterable[Rank]) -> dict[Rank, str]:
    ranks = list(ranks)
    ports = free_ports(len(ranks))
    return {rank: f"tcp/127.0.0.1:{port}" for rank, port in zip(ranks, ports, strict=True)}


def _start(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "edgegossip", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_ENVIRONMENT, **os.environ},
                # Ctrl+C reaches them only through this process.
                start_new_session=True,
            )
    except OSError as error:
        raise RunFolderError(
            f"cannot write {folder}: {error.strerror}; choose another --out"
        ) from error


def _send(processes: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    for process in list(processes):  # a signal may come while workers are being started
        if process.poll() is None:
            process.send_signal(number)


def _watch(
    experiment: Experiment,
    gathering: Gathering,
    processes: Mapping[Rank, subprocess.Popen[bytes]],
    progress: Progress,
) -> None:
    """Read the workers' files and evaluate the averaged model until all have ended."""
    started = due = time.monotonic()
    while any(process.poll() is None for process in processes.values()):
        gathering.read()
        for worker in gathering.workers:
            process = processes.get(worker.rank)
            worker.has_ended = process is None or process.poll() is not None
        now = time.monotonic()
        if now >= due and gathering.measure_next():
            # Workers are on the same machine; the rest is measured when they have ended.
            due = time.monotonic() + (time.monotonic() - now) / _MEASURING
        progress.update(_status(experiment, gathering, time.monotonic() - started))
        time.sleep(_LOOK)


def _status(experiment: Experiment, gathering: Gathering, seconds: Seconds) -> Status:
    samples = sum(worker.samples.total for worker in gathering.workers)
    now = max(worker.time for worker in gathering.workers)
    rounds = [worker.num_rounds for worker in gathering.workers]
    history = gathering.history
    limit = experiment.max_seconds or math.inf
    last_round = experiment.algorithm.traits.num_rounds or math.inf
    share = max(now / limit, sum(rounds) / len(rounds) / last_round)
    return Status(
        name=experiment.run_name,
        time=now,
        share=min(0.99, share),  # ending and gathering remain
        evaluation=history[-1] if history else None,
        metric=experiment.task.metric,
        wall_seconds=seconds,
        samples_per_second=samples / seconds if seconds > 0 else 0.0,
        commits=sum(worker.num_commits for worker in gathering.workers) or None,
        roles=who_is_who(experiment.roles),
    )


def _last_line(out: Path, rank: Rank) -> str:
    path = out / WORKERS / str(rank) / "log.txt"
    lines = path.read_text(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'nothing said'} (see {path})"
