"""One run folder, in the simulator's format, from the folders of a run's workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from heapq import merge
from itertools import chain, islice, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.metrics import MetricSpec
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.machine.energy import Energy, machine_energy
from edgegossip.machine.goodput import MachineUse, NodeUse, node_use
from edgegossip.real.agreement import disagreements, is_apart
from edgegossip.real.worker_files import schedule
from edgegossip.real.worker_folder import (
    ENDS,
    REASONS,
    RunningTotal,
    WorkerFolder,
    require_worker_of,
)
from edgegossip.runs.best import BestModel
from edgegossip.runs.describe import described_roles, header, rank_name, with_article
from edgegossip.runs.events import cut_off, to_line
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import EVALUATIONS, read_json, write_atomically, write_json
from edgegossip.runs.folder import RunFolder
from edgegossip.runs.results import EARLY_STOP, Evaluation, FiniteMetrics, Results
from edgegossip.sim.fault import Faults
from edgegossip.sim.link import without_durations
from edgegossip.sim.platform import Platform

_LOG = logging.getLogger("edgegossip.runs")


def _has_stopped_run(summary: Mapping[str, Any]) -> bool:
    best = summary.get("best")
    return isinstance(best, Mapping) and best.get("has_stopped_run") is True


class Evaluations:
    """Evaluations by the indices of their snapshots.

    Args:
        path: File of the evaluations; if it exists, it is read.
        metrics: Metrics of the run, the chosen one first.

    Attributes:
        kept: Indices of the snapshots that are no longer needed, because their evaluations are
            stored.
    """

    def __init__(self, path: Path, metrics: Sequence[MetricSpec]) -> None:
        self._path = path
        self._by_index, self._ranks = _read(path, metrics)
        self._has_warned = False
        self.kept = set(self._by_index)

    def covers(self, index: int, ranks: Sequence[Rank]) -> bool:
        """Whether this snapshot was evaluated with exactly these workers in the run folder."""
        # A folder that was copied here since then may hold one more model of that moment.
        return index in self._by_index and self._ranks[index] == ranks

    @property
    def history(self) -> list[Evaluation]:
        """All evaluations, in order of time."""
        return [self._by_index[index] for index in sorted(self._by_index)]

    def add(self, index: int, evaluation: Evaluation, ranks: Sequence[Rank]) -> None:
        """Store the evaluation of a snapshot; a full disk does not end the run."""
        self._by_index[index] = evaluation
        self._ranks[index] = ranks
        self._keep()

    def drop_from(self, index: int) -> None:
        """Forget the evaluations of snapshots from this index on."""
        later = [each for each in self._by_index if each >= index]
        for each in later:
            del self._by_index[each]
        if later:
            self._keep()

    def _keep(self) -> None:
        content = {
            str(index): {**each.line(), "ranks": self._ranks[index]}
            for index, each in self._by_index.items()
        }
        try:
            write_json(self._path, content)
            self.kept = set(self._by_index)
        except RunFolderError as error:
            if not self._has_warned:
                _LOG.warning("%s - until then, snapshots are kept", error)
            self._has_warned = True


def _read(
    path: Path, metrics: Sequence[MetricSpec]
) -> tuple[dict[int, Evaluation], dict[int, Any]]:
    """The evaluations, and the workers in each."""
    if not path.exists():
        return {}, {}
    try:
        found = {int(index): each for index, each in read_json(path).items()}
        read = {index: Evaluation.from_line(each, metrics) for index, each in found.items()}
        return read, {index: each["ranks"] for index, each in found.items()}
    except (RunFolderError, LookupError, TypeError, ValueError) as error:
        _LOG.warning("%s is damaged (%s) - continuing without it", path, error)
        return {}, {}


WORKERS = "workers"
"""The subfolder of a run folder that holds a folder for each worker, named by its rank."""


class Gathering:
    """Measures the averaged model of a run on real machines, and writes the run folder.

    Args:
        experiment: The workers' experiment.
        out: Run folder; its subfolder `workers` holds the workers' folders.
        recipe: Name of the recipe, for the record.
        command: Command that repeats the run, for the record.
    """

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        recipe: str | None = None,
        command: str | None = None,
    ) -> None:
        self.workers = [
            WorkerFolder(out / WORKERS / str(rank), rank, links=experiment.links)
            for rank in range(experiment.num_workers)
        ]
        self.is_open = False
        self._experiment = experiment
        self._out = out
        self._recipe = recipe
        self._command = command
        self._workload = experiment.workload(())
        self._metrics = experiment.task.chosen_first
        self._evaluations = Evaluations(out / EVALUATIONS, self._metrics)
        self._finite = FiniteMetrics()
        self._unmeasured: set[int] = set()  # moments that cannot be evaluated yet

    @property
    def roles(self) -> list[str]:
        """The name of each rank's role."""
        return self._experiment.roles

    @property
    def history(self) -> list[Evaluation]:
        """Evaluations so far, including those from before a resume."""
        return self._evaluations.history

    def require_schema(self) -> None:
        """Check that the algorithm describes its messages, before any worker is started.

        Raises:
            LocalProtocolError: If it does not, so that it cannot run on a network.
        """
        self._experiment.algorithm.schema(self._workload.initial_params(0))

    # While the run goes on.

    def go_on_at(self, time: Seconds) -> None:
        """Discard evaluations and snapshots after `time`, at which the run continues."""
        later = sum(1 for _ in takewhile(lambda each: each <= time, schedule()))
        self._evaluations.drop_from(later)
        for worker in self.workers:
            for index in worker.snapshots:
                if index >= later:
                    worker.snapshot(index).unlink()

    def read(self) -> None:
        """Read the new lines of the workers' logs."""
        for worker in self.workers:
            worker.read()

    def measure_next(self) -> bool:
        """Evaluate the newest moment with complete snapshots; return False if none is left."""
        ranks = self._evaluated_ranks()
        present = [worker.rank for worker in self.workers if worker.path.is_dir()]
        there = {rank: self.workers[rank].snapshots for rank in ranks}
        self._drop_measured(there, present)
        # Later moments may still get more snapshots.
        running = [rank for rank in ranks if not self.workers[rank].has_ended]
        complete = min((max(there[rank], default=-1) for rank in running), default=math.inf)
        moments = {index for found in there.values() for index in found if index <= complete}
        waiting = self._chosen(
            {
                index
                for index in moments
                if not self._evaluations.covers(index, present)
                and self._workload.is_whole(rank for rank in ranks if index in there[rank])
            }
        )
        if not waiting:
            return False
        index = max(waiting)
        found = {
            rank: self.workers[rank].read_snapshot(index, self._workload.num_params(rank))
            for rank in ranks
            if index in there[rank]
        }
        snapshots = {rank: params for rank, params in found.items() if params is not None}
        if len(snapshots) == len(found) or self._workload.is_whole(snapshots):
            if (evaluation := self._evaluate_snapshots(index, snapshots)) is not None:
                self._evaluations.add(index, evaluation, present)
            else:
                self._unmeasured.add(index)
        return True  # damaged snapshots are not read again

    def _chosen(self, moments: set[int]) -> set[int]:
        """Choose the moments to evaluate from all possible `moments`."""
        return moments - self._unmeasured

    def _drop_measured(
        self, there: Mapping[Rank, Sequence[int]], present: Sequence[Rank]
    ) -> None:
        """Delete the snapshots with stored evaluations, unless a worker's folder is missing."""
        # With a folder that is copied later, snapshots are evaluated again.
        if len(present) < len(self.workers):
            return
        for rank, found in there.items():
            for index in self._evaluations.kept.intersection(found):
                if self._evaluations.covers(index, present):
                    with suppress(OSError):  # it only takes space
                        self.workers[rank].snapshot(index).unlink()

    def _evaluated_ranks(self) -> list[Rank]:
        experiment = self._experiment
        ranks = range(experiment.num_workers)
        return [rank for rank in ranks if experiment.algorithm.role(rank).is_evaluated]

    def _evaluate_snapshots(
        self, index: int, snapshots: Mapping[Rank, Tensor]
    ) -> Evaluation | None:
        time = next(islice(schedule(), index, None))
        return self._evaluate(
            snapshots,
            time,
            samples=sum(worker.samples.at(index) for worker in self.workers),
            num_bytes=sum(worker.bytes_sent.at(index) for worker in self.workers),
            energy=self._energy(time, lambda total: total.at(index)),
            use=self._use(time, lambda total: total.at(index)),
        )

    def _evaluate_end(self, estimates: Mapping[Rank, Tensor], time: Seconds) -> Evaluation:
        evaluation = self._evaluate(
            estimates,
            time,
            samples=sum(worker.samples.total for worker in self.workers),
            num_bytes=sum(worker.bytes_sent.total for worker in self.workers),
            energy=self._energy(time, lambda total: total.total),
            use=self._use(time, lambda total: total.total),
        )
        if evaluation is None:
            raise RunFolderError(
                f"no worker has measured the averaged model in {self._out}; see the log.txt in "
                "the folders of the workers"
            )
        return evaluation

    def _evaluate(
        self,
        estimates: Mapping[Rank, Tensor],
        time: Seconds,
        *,
        samples: int,
        num_bytes: int,
        energy: Energy | None,
        use: NodeUse | None,
    ) -> Evaluation | None:
        mean, distance = self._average(estimates)
        if (score := self._score(mean)) is None:
            return None
        loss, metrics = score
        self._finite.check(loss, metrics)
        return Evaluation(
            time=time,
            epochs=samples / self.num_train,
            metrics=metrics,
            loss=loss,
            consensus_distance=distance,
            bytes_sent=num_bytes,
            samples_processed=samples,
            energy=energy,
            use=use,
        )

    def _energy(self, time: Seconds, so_far: Callable[[RunningTotal], float]) -> Energy | None:
        """Energy of all workers up to `time`, as the recipe's platforms and links state it.

        Only training that has ended counts as work. None if a worker's log is missing.

        Args:
            time: Time in the run.
            so_far: Reads a worker's total at that time.
        """
        if not all(worker.path.is_dir() for worker in self.workers):
            return None
        found = Energy(links=sum(so_far(worker.link_joules) for worker in self.workers))
        for worker, platform in zip(self.workers, self._experiment.platforms, strict=True):
            found += machine_energy(
                platform.idle_watts,
                platform.busy_watts,
                on=time - worker.off_until(time),
                busy=so_far(worker.busy),
            )
        return found

    def _use(self, time: Seconds, so_far: Callable[[RunningTotal], float]) -> NodeUse | None:
        """Use of all machines up to `time`, at the speeds that the workers have reached so far.

        Only training that has ended counts. None if a worker's log is missing.

        Args:
            time: Time in the run.
            so_far: Reads a worker's total at that time.
        """
        if not all(worker.path.is_dir() for worker in self.workers):
            return None
        machines = []
        for worker in self.workers:
            on, busy, cost = (
                time - worker.off_until(time),
                so_far(worker.busy),
                so_far(worker.cost),
            )
            speed = cost / busy if busy else 0.0
            machines.append(
                MachineUse(
                    on=on,
                    possible=speed * time,
                    available=speed * on,
                    worked=cost,
                    useful=so_far(worker.useful),
                )
            )
        return node_use(machines)

    def _average(self, estimates: Mapping[Rank, Tensor]) -> tuple[Tensor, float]:
        """The mean and the consensus distance; equal models are not averaged."""
        (first, params), *others = estimates.items()
        are_equal = all(torch.equal(params, each) for _, each in others)
        if are_equal and self._workload.is_whole([first]):  # a mean might round differently
            estimates = {first: params}
        return self._workload.average(estimates)

    def _score(self, params: Tensor) -> tuple[float, dict[str, float]] | None:
        """Loss and metrics of a model; None if workers have to measure it first."""
        return self._workload.evaluate(params)

    @property
    def _shards(self) -> Mapping[Rank, Sized]:
        """The samples of each worker with data."""
        return self._workload.shards

    @property
    def num_train(self) -> int:
        """Number of training samples of all workers."""
        return self._workload.num_train

    # When it is over.

    def average(self) -> list[Rank]:
        """Write averaged models for workers with `Local` data; return workers yet to measure.

        Raises:
            RunFolderError: See `finish`.
        """
        return []

    def leave_out(self, ranks: Collection[Rank]) -> None:
        """Omit the measurements of these workers; only `Local` data has such measurements."""

    def _come_to_the_end(self) -> None:
        """Read all files of the workers, and evaluate the remaining snapshots."""
        for worker in self.workers:
            require_worker_of(self._experiment, worker.path)
        self.read()
        for worker in self.workers:
            worker.has_ended = True
        while self.measure_next():
            pass

    @property
    def _summaries(self) -> dict[Rank, dict[str, Any]]:
        return {w.rank: s for w in self.workers if (s := w.summary) is not None}

    def _own_models(self, mean: Tensor, estimates: Mapping[Rank, Tensor]) -> Iterator[Tensor]:
        """Each worker's model, with the mean of the parts that it does not hold."""
        for rank, estimate in estimates.items():
            yield self._workload.with_own(mean, rank, estimate)

    def finish(self) -> Results:
        """Evaluate the remaining snapshots, and write the run folder.

        Raises:
            RunFolderError: If no worker left a model, a worker belonged to another experiment,
                or the folder cannot be written.
        """
        self._come_to_the_end()
        summaries = self._summaries
        estimates = self._last_estimates(summaries)
        mean, _ = self._average(estimates)
        time = max(summary["seconds"] for summary in summaries.values())
        # A killed run that resumed from checkpoints may end before times that it had reached.
        before = [each for each in self.history if each.time <= time]
        gone = self._gone_early
        reasons = (each["reason"] for rank, each in summaries.items() if rank not in gone)
        reason = max(reasons, key=REASONS.index)
        if reason == "finished" and any(map(_has_stopped_run, summaries.values())):
            reason = EARLY_STOP
        received = [summary["mean_staleness"] for summary in summaries.values()]
        results = Results(
            name=self._experiment.run_name,
            reason=reason,
            history=[*before, self._evaluate_end(estimates, time)],
            metric=self._experiment.task.metric,
            worker_values=[*map(self._value, self._own_models(mean, estimates))],
            params=self._workload.named_parameters(mean),
            virtual_seconds=time,
            wall_seconds=max(summary["wall_seconds"] for summary in summaries.values()),
            mean_staleness=sum(received) / len(received),
            folder=self._out,
            disagreements=tuple(self._disagreements(summaries, estimates, mean)),
            best=self._best(),
        )
        self._write(results)
        return results

    def _best(self) -> BestModel | None:
        """The best model by validation that any worker knows; None without `keep`."""
        if (kept := self._experiment.kept) is None:
            return None
        metric = kept.find(self._experiment.task.specs)
        num_params = self._workload.num_params(self._evaluated_ranks()[0])
        known = [own for each in self.workers if (own := each.best(num_params)) is not None]
        if not known:
            return None
        value = metric.best(each["value"] for each, _ in known)
        # Workers that were cut off from each other have records of their own.
        alike = (own for own in known if own[0]["value"] == value)
        found, params = min(alike, key=lambda own: float(own[0]["time"]))
        if (score := self._score(params)) is None:
            return None
        return BestModel(
            params=self._workload.named_parameters(params),
            time=found["time"],
            round=int(found["round"]),
            metric=metric,
            validation_value=value,
            metrics=score[1],
        )

    def _disagreements(
        self,
        summaries: Mapping[Rank, Mapping[str, Any]],
        estimates: Mapping[Rank, Tensor],
        mean: Tensor,
    ) -> list[str]:
        """Sentences about the workers whose final models differ although they should not."""
        models = {}
        for rank, summary in summaries.items():
            if summary.get("agreement"):
                if (params := estimates.get(rank)) is None:
                    params = self.workers[rank].last_params(len(mean))
                if params is not None:
                    models[rank] = params
        return disagreements(summaries, models, mean)

    def _value(self, params: Tensor) -> float:
        """The chosen metric of a model."""
        score = self._score(params)
        return math.nan if score is None else score[1][self._metrics[0].name]

    @property
    def lost(self) -> list[Rank]:
        """Workers that failed or were killed, and did not come back."""
        return [
            worker.rank
            for worker in self.workers
            if worker.path.is_dir() and (worker.summary or {}).get("reason") in (None, "failed")
        ]

    @property
    def _gone_early(self) -> set[Rank]:
        """Workers that left an open run before its end, if others have come to the end."""
        if not self.is_open:
            return set()
        reasons = {rank: each["reason"] for rank, each in self._summaries.items()}
        has_ended = any(why in ENDS for why in reasons.values())
        return {rank for rank, why in reasons.items() if has_ended and why == "interrupted"}

    @property
    def left_out(self) -> list[str]:
        """Lines about workers with missing models or numbers, and about unknown folders."""
        lines, gone = [], self._gone_early
        for worker in self.workers:
            summary = worker.summary
            is_early = worker.rank in gone
            if summary is not None and summary["reason"] != "failed" and not is_early:
                continue
            if self.is_open and not worker.path.is_dir():
                continue  # it was never there
            name = with_article(self.roles, worker.rank)
            if not worker.path.is_dir():
                why = f"{worker.path} is missing: copy the folder of {name} there"
            elif is_early:
                why = f"{name} left before the end"
            elif summary is None:
                why = f"{name} left no summary in {worker.path}, so it was killed"
            else:
                why = f"{name} failed; see {worker.path}"
            without = "model" if worker.rank in self._evaluated_ranks() else "end"
            lines.append(f"{why}. The results do not include its {without}")
        known = {worker.path.name for worker in self.workers}
        there = (self._out / WORKERS).iterdir()
        return lines + [
            f"{path} is not of a worker of this run, which has {len(known)}; see --num-workers"
            for path in sorted(there)
            if path.is_dir() and path.name not in known
        ]

    def _last_estimates(
        self, summaries: Mapping[Rank, Mapping[str, Any]]
    ) -> dict[Rank, Tensor]:
        """The final estimates of the workers that did not fail."""
        # The last parameters of a failed worker may be no model.
        ends = [
            rank
            for rank in self._evaluated_ranks()
            if rank in summaries and summaries[rank]["reason"] != "failed"
        ]
        gone = self._gone_early  # their models are old
        ends = [rank for rank in ends if rank not in gone] or ends
        # With a server and workers on standby: the one that serves at the end.
        ends = [rank for rank in ends if summaries[rank].get("is_evaluated", True)] or ends
        # The model of a deposed server, or of workers cut off from most others, is no result.
        ends = [rank for rank in ends if not is_apart(summaries[rank])] or ends
        found = {
            rank: self.workers[rank].last_params(self._workload.num_params(rank))
            for rank in ends
        }
        estimates = {rank: params for rank, params in found.items() if params is not None}
        if not self._workload.is_whole(estimates):
            needed = self.roles[self._evaluated_ranks()[0]]
            which = f"no worker except {[*estimates]}" if estimates else f"no {needed}"
            raise RunFolderError(
                f"{which} in {self._out / WORKERS} has finished, so there is no model"
            )
        return estimates

    def _write(self, results: Results) -> None:
        """Write the files of a run folder over those of an earlier gathering."""
        # The old summary goes first and the new one comes last, so that a folder with a summary
        # is never half of each.
        content = {**header(self._measured(), self._recipe), "driver": "network"}
        folder = RunFolder(self._out, content, resume=False, replace=True)
        first = {
            "type": "experiment",
            **content,
            "command": self._command,
            **described_roles(self._experiment, self._shards),
            "wall_started": folder.started,
        }
        last = {
            "type": "ended",
            "time": results.virtual_seconds,
            "reason": results.reason,
            "error": None,
            "wall_seconds": results.wall_seconds,
            **({"disagreements": found} if (found := results.disagreements) else {}),
        }
        lost = self.lost
        ends = [worker.cut_off for worker in self.workers if worker.rank not in lost]
        if all(end is not None for end in ends):
            last |= cut_off(results.reason, chain.from_iterable(end or [] for end in ends))
        lines = chain([to_line(first)], self._timeline(results.history), [to_line(last)])
        write_atomically(folder.events, lines)
        folder.write_results(results)

    def _measured(self) -> Experiment:
        """The experiment, on platforms with the measured speeds."""
        devices = [worker.torch_device for worker in self.workers]
        # Devices are worth a word only if there is one besides the CPUs.
        words = [
            f" ({each})" if each and {*devices} - {None, "cpu"} else "" for each in devices
        ]
        platforms = tuple(
            Platform(
                name=rank_name(self.roles, worker.rank) + word,
                throughput=worker.throughput or 1.0,
                idle_watts=stated.idle_watts,
                busy_watts=stated.busy_watts,
            )
            for worker, word, stated in zip(
                self.workers, words, self._experiment.platforms, strict=True
            )
        )
        links = without_durations(self._experiment.links)
        return replace(self._experiment, platforms=platforms, links=links, faults=Faults())

    def _timeline(self, history: Sequence[Evaluation]) -> Iterator[bytes]:
        """All workers' events, and the evaluations, in order of time."""
        lines = (to_line({"type": "evaluated", **each.line()}) for each in history)
        evaluated = zip((each.time for each in history), lines, strict=True)
        lost = self.lost
        timelines = [worker.timeline(is_lost=worker.rank in lost) for worker in self.workers]
        for _, line in merge(*timelines, evaluated, key=itemgetter(0)):
            yield line
