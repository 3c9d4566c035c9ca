"""How a launched run and each of its workers get on, from the workers' logs."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.real.gathering import Gathering
from edgegossip.real.worker_folder import RECENT, WorkerFolder
from edgegossip.runs.describe import rank_name, who_is_who
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.tracking import Status, WorkerRow


class Overview:
    """Reads the workers' new log lines, and says how the run and each worker get on.

    The time in which the processes start, and what a resumed run had done before, count neither
    as speed nor for the remaining time.

    Args:
        experiment: The workers' experiment.
        gathering: The run, with the workers' folders; what they hold already is read.
    """

    def __init__(self, experiment: Experiment, gathering: Gathering) -> None:
        self._experiment = experiment
        self._gathering = gathering
        self._heard: dict[Rank, Seconds] = {}
        self._began: dict[Rank, tuple[Seconds, float]] = {}
        self._run_began: Seconds | None = None
        self._samples: deque[tuple[Seconds, int]] = deque()
        gathering.read()
        self._positions = [worker.position for worker in gathering.workers]
        self._first_share = self._share

    def status(
        self, now: Seconds, lost: Collection[Rank] = (), ended: Collection[Rank] = ()
    ) -> Status:
        """Read what is new, and make the status.

        Args:
            now: Seconds on a steady clock.
            lost: Workers that have failed or were killed, and did not come back.
            ended: Workers whose processes have ended without a failure.
        """
        gathering = self._gathering
        gathering.read()
        workers, history = gathering.workers, gathering.history
        rows = [self._row(worker, now, lost, ended) for worker in workers]
        samples = sum(worker.samples.total for worker in workers)
        if not self._heard:  # the processes are starting
            self._samples.clear()
            self._run_began = now
        self._samples.append((now, samples))
        while self._samples[0][0] < now - RECENT:
            self._samples.popleft()
        since, before = self._samples[0]
        return Status(
            name=self._experiment.run_name,
            time=max(worker.time for worker in workers),
            # Ending and gathering remain.
            share=min(0.99, self._share),
            first_share=self._first_share,
            evaluation=history[-1] if history else None,
            metric=self._experiment.task.metric,
            wall_seconds=now - (self._run_began or now),
            samples_per_second=(samples - before) / (now - since) if now > since else 0.0,
            epochs=samples / gathering.num_train,
            bytes_sent=sum(worker.bytes_sent.total for worker in workers),
            commits=sum(worker.num_commits for worker in workers) or None,
            num_workers=len(workers),
            roles=who_is_who(self._experiment.roles),
            num_lost=len(lost),
            workers=tuple(rows),
        )

    @property
    def _share(self) -> float:
        """Completed share of the run."""
        workers = self._gathering.workers
        rounds = [worker.num_rounds for worker in workers]
        return self._experiment.completed_share(max(each.time for each in workers), rounds)

    def _row(
        self,
        worker: WorkerFolder,
        now: Seconds,
        lost: Collection[Rank],
        ended: Collection[Rank],
    ) -> WorkerRow:
        rank, share = worker.rank, 0.0
        if worker.position != self._positions[rank]:
            self._positions[rank] = worker.position
            self._heard[rank] = now
        if rank in self._heard:
            share = self._experiment.completed_share(worker.time, [worker.num_rounds])
            self._began.setdefault(rank, (now, share))
        state = "runs" if rank in self._heard else "starts"
        state = "lost" if rank in lost else "ended" if rank in ended else state
        since, first = self._began.get(rank, (now, share))
        left = (
            (self._heard[rank] - since) * (1 - share) / (share - first)
            if share > first
            else None
        )
        if left is not None and state == "runs":
            quiet = now - self._heard[rank]
            # A training that takes longer than all that was expected tells nothing about it.
            left = left - quiet if quiet <= left else None
        speed, waiting = worker.recent_use or (None, None)
        return WorkerRow(
            name=rank_name(self._gathering.roles, rank),
            state=state,
            round=worker.num_rounds,
            samples_per_second=speed,
            waiting=waiting,
            age=now - self._heard[rank] if rank in self._heard else None,
            seconds_left=left if state == "runs" else None,
        )
