"""Workers of a launched run whose process has failed or was killed."""

from __future__ import annotations

import sys
from pathlib import Path

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.protocol import Rank
from edgegossip.machine.counters import is_running
from edgegossip.real.gathering import Gathering
from edgegossip.real.supervision import Supervised, command_line, killed_by
from edgegossip.real.worker_folder import final_summary
from edgegossip.runs.describe import with_article
from edgegossip.runs.files import lock_holder

LOG = "log.txt"
"""Name of the file with a worker's output, in its folder."""


class Absentees:
    """Workers whose process has failed; they may be started again by hand.

    Args:
        gathering: The run, with the workers' folders.
        started: The processes that were started.
    """

    def __init__(self, gathering: Gathering, started: Supervised) -> None:
        self._gathering = gathering
        self._started = started
        self._told: set[Rank] = set()

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

    def tell(self) -> None:
        """Print at once which worker has failed, and the command that starts it again."""
        processes = self._started.processes
        goes_on = any(each.poll() is None for each in processes.values())
        if self._started.is_stopping or not goes_on:
            return
        for rank in self.lost:
            if rank in self._told:
                continue
            self._told.add(rank)
            process = processes[rank]
            name = with_article(self._gathering.roles, rank)
            how = killed_by(process) or f"failed: {last_line(self._path(rank))}"
            told = f"{name} {how}; the others go on; start it again with: "
            print(told + command_line(process), file=sys.stderr, flush=True)

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
    lines = path.read_text(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'nothing said'} (see {path})"
