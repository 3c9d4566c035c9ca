"""The folders of a run's workers -> one run folder, in the form that the simulator writes."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgegossip.core.errors import RunFolderError
from edgegossip.core.metrics import consensus_distance
from edgegossip.core.protocol import Rank, Seconds
from edgegossip.experiments.describe import header
from edgegossip.experiments.experiment import Experiment
from edgegossip.experiments.files import to_json, write_atomically
from edgegossip.experiments.results import Evaluation, Results
from edgegossip.experiments.run_folder import RunFolder, read_json
from edgegossip.experiments.snapshots import indices, read_params, schedule, snapshot_path
from edgegossip.experiments.worker import require_worker_of
from edgegossip.learning.task import Workload
from edgegossip.sim.fault import Faults
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform

WORKERS = "workers"
"""The subfolder of a run folder that holds a folder for each worker, named by its rank."""


@dataclass(slots=True)
class RunningTotal:
    """A sum that grows with time, and that can be asked for at any time in it.

    >>> total = RunningTotal()
    >>> total.add(1.0, 5)
    >>> total.add(2.0, 7)
    >>> total.until(1.9), total.until(2.0)
    (5, 12)
    """

    _times: list[Seconds] = field(default_factory=list)
    _sums: list[int] = field(default_factory=lambda: [0])

    def add(self, time: Seconds, amount: int) -> None:
        """Add what happened at `time`."""
        # A worker that goes on from a checkpoint may be a little earlier than it was before.
        self._times.append(max([time, *self._times[-1:]]))
        self._sums.append(self._sums[-1] + amount)

    def until(self, time: Seconds) -> int:
        """The sum of what happened up to `time`."""
        return self._sums[bisect_right(self._times, time)]


@dataclass(slots=True)
class WorkerFolder:
    """Reads what a worker writes, as it grows.

    Attributes:
        path: Of the folder.
        rank: Whose it is.
        lines: Events so far; where it has "recovered", it has "crashed" before.
        samples: That it has trained on.
        bytes_sent: By it.
        num_rounds: After which it sent its parameters.
        has_ended: There will be no more, whoever says so.
    """

    path: Path
    rank: Rank
    lines: list[dict[str, Any]] = field(default_factory=list)
    samples: RunningTotal = field(default_factory=RunningTotal)
    bytes_sent: RunningTotal = field(default_factory=RunningTotal)
    num_rounds: int = 0
    has_ended: bool = False
    _offset: int = 0
    _last_seen: Seconds = 0.0

    @property
    def snapshots(self) -> list[int]:
        """Numbers of the snapshots there are."""
        return indices(self.path / "snapshots")

    def snapshot(self, index: int) -> Path:
        return snapshot_path(self.path / "snapshots", index)

    @property
    def summary(self) -> dict[str, Any] | None:
        """What the worker wrote at its end; None if it never did."""
        path = self.path / "summary.json"
        return read_json(path) if path.exists() else None

    def read(self) -> None:
        """Read the lines that have been written since."""
        path = self.path / "events.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._add(json.loads(line))

    def _add(self, line: dict[str, Any]) -> None:
        match line["type"]:
            case "worker":
                self._last_seen = max((each["time"] for each in self.lines), default=0.0)
            case "recovered":
                # That it was away it could not say itself.
                crash = {"type": "crashed", "time": self._last_seen, "rank": self.rank}
                self.lines += [crash, line]
            case "ended":
                pass
            case kind:
                self.lines.append(line)
                if kind == "trained":
                    self.samples.add(line["time"], line["num_samples"])
                elif kind == "sent":
                    self.bytes_sent.add(line["time"], line["num_bytes"])
                    self.num_rounds = max(self.num_rounds, line["round"] + 1)

    @property
    def throughput(self) -> float:
        """Samples per second while it trained; 0 if it never did."""
        trained = [line for line in self.lines if line["type"] == "trained"]
        seconds = sum(line["time"] - line["start"] for line in trained)
        return sum(line["cost"] for line in trained) / seconds if seconds > 0 else 0.0


class Gathering:
    """Measures the averaged model of a run on real machines, and writes the run folder.

    Args:
        experiment: What the workers did.
        out: Run folder; its subfolder `workers` holds the workers' own.
        recipe: Name of the recipe, for the record.
        command: That would run it again, for the record.
    """

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        recipe: str | None = None,
        command: str | None = None,
    ) -> None:
        self.history: list[Evaluation] = []
        self.workers = [
            WorkerFolder(out / WORKERS / str(rank), rank)
            for rank in range(experiment.num_workers)
        ]
        self._experiment = experiment
        self._out = out
        self._recipe = recipe
        self._command = command
        self._workload = Workload(experiment.task, experiment.data_ranks, experiment.seed)

    # While the run goes on.

    def read(self) -> None:
        """Read what the workers have written since."""
        for worker in self.workers:
            worker.read()

    def measure_next(self) -> bool:
        """Evaluate the next moment for which all snapshots are there; False if none is."""
        ranks = self._evaluated_ranks()
        there = {rank: self.workers[rank].snapshots for rank in ranks}
        waiting = [index for found in there.values() for index in found]
        if not waiting:
            return False
        index = min(waiting)
        for rank in ranks:
            if not self.workers[rank].has_ended and (
                not there[rank] or there[rank][-1] < index
            ):
                return False  # its snapshot may still come
        paths = [self.workers[rank].snapshot(index) for rank in ranks if index in there[rank]]
        time = next(islice(schedule(), index, None))
        self.history.append(self._evaluate([read_params(path) for path in paths], time))
        for path in paths:
            path.unlink()
        return True

    def _evaluated_ranks(self) -> list[Rank]:
        experiment = self._experiment
        ranks = range(experiment.num_workers)
        return [rank for rank in ranks if experiment.algorithm.role(rank).is_evaluated]

    def _evaluate(self, estimates: list[Tensor], time: Seconds) -> Evaluation:
        stacked = torch.stack(estimates)
        loss, accuracy = self._workload.evaluate(stacked.mean(0))
        samples = sum(worker.samples.until(time) for worker in self.workers)
        return Evaluation(
            time=time,
            epochs=samples / len(self._experiment.task.dataset.train),
            accuracy=accuracy,
            loss=loss,
            consensus_distance=consensus_distance(stacked),
            bytes_sent=sum(worker.bytes_sent.until(time) for worker in self.workers),
            samples_processed=samples,
        )

    # When it is over.

    def finish(self) -> Results:
        """Measure what is left, and write the run folder.

        Raises:
            RunFolderError: If no worker left a model, one was in another experiment, or the
                folder cannot be written.
        """
        for worker in self.workers:
            require_worker_of(self._experiment, worker.path)
        self.read()
        for worker in self.workers:
            worker.has_ended = True
        while self.measure_next():
            pass
        summaries = {w.rank: s for w in self.workers if (s := w.summary) is not None}
        # What is left of one that failed may be no model.
        ends = [
            rank
            for rank in self._evaluated_ranks()
            if rank in summaries and summaries[rank]["reason"] != "failed"
        ]
        if not ends:
            raise RunFolderError(
                f"no worker in {self._out / WORKERS} has come to its end, so there is no model"
            )
        estimates = [
            read_params(self.workers[rank].path / "params.safetensors") for rank in ends
        ]
        time = max(summary["seconds"] for summary in summaries.values())
        self.history.append(self._evaluate(estimates, time))
        reason = _worst(summary["reason"] for summary in summaries.values())
        received = [summary["mean_staleness"] for summary in summaries.values()]
        results = Results(
            name=self._experiment.run_name,
            reason=reason,
            history=self.history,
            worker_accuracies=[self._workload.evaluate(each)[1] for each in estimates],
            params=self._workload.named_parameters(torch.stack(estimates).mean(0)),
            virtual_seconds=time,
            wall_seconds=max(summary["wall_seconds"] for summary in summaries.values()),
            mean_staleness=sum(received) / len(received),
            folder=self._out,
        )
        self._write(results)
        return results

    def _write(self, results: Results) -> None:
        """The files of a run folder, as `docs/run-folder.md` has them."""
        shards = self._workload.shards
        content = {**header(self._measured(), self._recipe), "driver": "network"}
        folder = RunFolder(self._out, content, resume=False)
        first = {
            "type": "experiment",
            **content,
            "command": self._command,
            "shard_sizes": [len(shards.get(worker.rank, ())) for worker in self.workers],
            "wall_started": folder.started,
        }
        last = {
            "type": "ended",
            "time": results.virtual_seconds,
            "reason": results.reason,
            "error": None,
            "wall_seconds": results.wall_seconds,
        }
        lines = [first, *self._events(), last]
        text = "\n".join(to_json(line, separators=(",", ":")) for line in lines)
        write_atomically(folder.events, text.encode() + b"\n")
        folder.write_params(results.params)
        folder.write_json(
            "summary.json",
            {
                "name": results.name,
                "reason": results.reason,
                "error": None,
                **results.summary(),
                "worker_accuracies": results.worker_accuracies,
            },
        )

    def _measured(self) -> Experiment:
        """The experiment on platforms as fast as they were found to be."""
        platforms = tuple(
            Platform(name=f"worker {worker.rank}", throughput=worker.throughput or 1.0)
            for worker in self.workers
        )
        return replace(self._experiment, platforms=platforms, links=Links(), faults=Faults())

    def _events(self) -> list[dict[str, Any]]:
        """What all workers did, and the evaluations, in order of time."""
        evaluated = [{"type": "evaluated", **asdict(each)} for each in self.history]
        lines = [line for worker in self.workers for line in worker.lines]
        return sorted([*lines, *evaluated], key=lambda line: float(line["time"]))


def _worst(reasons: Iterable[str]) -> str:
    """One word for how all of them ended."""
    order = ("finished", "time limit", "interrupted", "failed")
    return max(reasons, key=order.index)
