"""Workers in threads of one process, with folders as those of a launched run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgegossip.contract.protocol import Rank
from edgegossip.net.host.settings import Forecaster
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.worker import WorkerSettings, take_part
from edgegossip.runs.experiment import Experiment

WITHIN = WorkerSettings(meet_seconds=20.0)


class Crew:
    """Workers that take part in threads; their folders are those of a run folder.

    Args:
        out: The run folder.
        forecasters: Of the workers that have one.
    """

    def __init__(self, out: Path, forecasters: Mapping[Rank, Forecaster] | None = None) -> None:
        self.out = out
        self._forecasters = forecasters or {}
        self.network = MemoryNetwork()
        self.ends: dict[Rank, str | Exception] = {}
        self._threads: dict[Rank, threading.Thread] = {}

    def folder(self, rank: Rank) -> Path:
        return self.out / "workers" / str(rank)

    def start(
        self, experiment: Experiment, *ranks: Rank, settings: WorkerSettings = WITHIN
    ) -> None:
        for rank in ranks:
            arguments = (experiment, rank, settings)
            thread = threading.Thread(target=self._take_part, args=arguments, daemon=True)
            self._threads[rank] = thread
            thread.start()

    def _take_part(self, experiment: Experiment, rank: Rank, settings: WorkerSettings) -> None:
        try:
            self.ends[rank] = take_part(
                experiment,
                rank,
                self.network.transport(rank),
                out=self.folder(rank),
                settings=settings,
                forecaster=self._forecasters.get(rank),
            )
        except Exception as error:
            self.ends[rank] = error

    def join(self, *ranks: Rank) -> list[str | Exception]:
        """Wait for workers; say how each has ended."""
        for rank in ranks:
            self._threads[rank].join(120)
            assert not self._threads[rank].is_alive(), f"worker {rank} hangs"
        return [self.ends.pop(rank) for rank in ranks]

    def all(self, experiment: Experiment, settings: WorkerSettings = WITHIN) -> list[Any]:
        """Let all workers of an experiment take part, to their ends."""
        self.start(experiment, *range(experiment.num_workers), settings=settings)
        return self.join(*range(experiment.num_workers))
