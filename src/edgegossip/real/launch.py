"""Launching all workers of a run as processes on this machine."""

from __future__ import annotations

import contextlib
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edgegossip.contract.errors import Interrupted, RunFolderError, TrainingError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.data.local import Local
from edgegossip.real.absentees import LOG, Absentees, has_finished, last_line
from edgegossip.real.gather import make_gathering
from edgegossip.real.gathering import WORKERS, Gathering
from edgegossip.real.supervision import Supervised, supervised
from edgegossip.real.worker_folder import goes_on_at, has_ended, require_gathered
from edgegossip.runs.describe import header, who_is_who, with_article
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import locked, require_unlocked
from edgegossip.runs.folder import finished_results, holds_run
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

_LOOK: Seconds = 0.25
_MEASURING = 0.05
"""Maximum share of a core's time that evaluations may take."""

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
    with supervised() as workers:
        for rank, endpoint in endpoints.items():
            folder = gathering.workers[rank].path
            others = [each for each in endpoints.values() if each != endpoint]
            _start(workers, rank, make_command(rank, endpoint, others, folder, ended), folder)
        absentees = Absentees(gathering, workers)
        _watch(experiment, gathering, workers.processes, progress, absentees)
    failures = {rank: absentees.how(rank) for rank in absentees.failed}
    return None if workers.is_stopping and failures else failures


def _gather(
    gathering: Gathering,
    out: Path,
    failures: Mapping[Rank, str],
    make_measure: MakeMeasure | None = None,
) -> Results:
    """Make one run folder from the workers' folders, and report failed workers."""
    if len(failures) == len(gathering.workers):
        # A killed worker did not say why.
        lines = [last_line(gathering.workers[rank].path) for rank in failures]
        said = [line for line in lines if line.startswith("edgegossip: ")] or lines
        raise TrainingError(f"all workers failed, the first with: {said[0]}")
    for rank, how in failures.items():  # first, as without a server there may be no model
        name = with_article(gathering.roles, rank)
        print(f"{name} {how}", file=sys.stderr)
    if waited_for := gathering.average():
        assert make_measure is not None  # checked before the workers were started
        failed = _measure(gathering, waited_for, make_measure)
        gathering.leave_out(failed)
        for rank in failed:
            name = with_article(gathering.roles, rank)
            why = last_line(gathering.workers[rank].path)
            print(f"{name} could not measure: {why}", file=sys.stderr)
    return gathering.finish()


def _measure(
    gathering: Gathering, ranks: Sequence[Rank], make_measure: MakeMeasure
) -> list[Rank]:
    """Let one process per worker measure the averaged models; return failed workers."""
    workers = Supervised()
    try:
        for rank in ranks:
            _start(workers, rank, make_measure(rank), gathering.workers[rank].path)
        return [rank for rank, process in workers.processes.items() if process.wait()]
    finally:
        workers.kill()


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


def _start(workers: Supervised, rank: Rank, command: Sequence[str], folder: Path) -> None:
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
    absentees: Absentees | None = None,
) -> None:
    """Read the workers' files and evaluate the averaged model until all have ended."""
    started = due = time.monotonic()
    while any(process.poll() is None for process in processes.values()) or (
        absentees is not None and absentees.is_anyone_back
    ):
        gathering.read()
        if absentees is not None:
            absentees.tell()
        for worker in gathering.workers:
            process = processes.get(worker.rank)
            worker.has_ended = process is None or process.poll() is not None
        now = time.monotonic()
        if now >= due and gathering.measure_next():
            # Workers are on the same machine; the rest is measured when they have ended.
            due = time.monotonic() + (time.monotonic() - now) / _MEASURING
        status = _status(experiment, gathering, time.monotonic() - started)
        if absentees is not None:
            status = replace(status, num_lost=len(absentees.lost))
        progress.update(status)
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
        num_workers=len(gathering.workers),
        roles=who_is_who(experiment.roles),
    )
