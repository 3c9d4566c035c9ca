"""One worker of an experiment on a real machine, and its folder."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from edgegossip.contract.algorithm import Algorithm, opened
from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_counts, check_ranges, check_rank
from edgegossip.machine.counters import is_running
from edgegossip.net.host.host import Host
from edgegossip.net.host.settings import Forecaster, HostSettings
from edgegossip.net.transport import Transport
from edgegossip.real.best_model import with_best_of
from edgegossip.real.host_metrics import HostMetrics
from edgegossip.real.introduction import introduce, run_id, run_key
from edgegossip.real.metrics_server import MetricsServer, metrics_address, serving_metrics
from edgegossip.real.record import WorkerRecord
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import (
    locked,
)
from edgegossip.runs.final_average import (
    FinalAverage,
    ending_seconds,
    with_final_average,
)
from edgegossip.runs.process import intra_op_threads, on_leave_signal, on_stop_signal
from edgegossip.runs.tracking import Tracker
from edgegossip.training.executors.lead import Executors
from edgegossip.training.executors.learners import LeadingLearner
from edgegossip.training.task import Workload

_LOG = logging.getLogger("edgegossip.real")
_LOOK: Seconds = 1.0
"""Seconds between two looks at the process that started this one."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of one worker.

    Args:
        name: Name of the run, equal for all its workers; it keeps simultaneous runs of one
            recipe apart. Certificates may be limited to runs of this name.
        meet_seconds: Seconds to wait for all workers before beginning without the missing ones.
        min_workers: Minimum number of workers, including this one, to begin and to continue;
            with fewer, the run ends after `meet_seconds` and keeps a checkpoint. By default a
            run needs two workers to begin and may continue with any number.
        open: The number of workers is a limit: the run begins soon after `min_workers` (by
            default one) have met, others may come at any time, and sparse graphs follow those
            that are present. SIGUSR1 makes a worker leave, so that nobody waits for its return.
        ended: Ranks that have already finished; the run does not wait for them.
        max_seconds: Time limit, counted from the beginning; by default the recipe's.
        checkpoint_seconds: Seconds between checkpoints.
        snapshots: Keep snapshots, from which accuracy over time can be measured afterwards.
        parent: ID of a process whose end stops this worker.
        threads: Threads of one training step.
        max_waiting_bytes: Maximum size of the messages in memory waiting for one receiver, and
            of the received messages; by default an eighth of the memory, at most 1 GiB.
        trackers: Trackers that receive this worker's own numbers, such as `TensorBoard()`.
        final_average: At the end, give all workers in reach the mean of their models, or the
            server's model. Stages, and servers that share a model, keep their parts.
        metrics: PORT or HOST:PORT at which this machine (127.0.0.1) or HOST serves /metrics for
            Prometheus, /healthz and /readyz; by default none. 0.0.0.0:PORT is for everybody.

    Raises:
        ValueError: If `threads`, `min_workers` or `max_waiting_bytes` is below 1 or not a whole
            number, or `metrics` is no address.
    """

    name: str = ""
    meet_seconds: Seconds = 60.0
    min_workers: int | None = None
    open: bool = False
    ended: tuple[Rank, ...] = ()
    max_seconds: Seconds | None = None
    checkpoint_seconds: Seconds = 60.0
    snapshots: bool = True
    parent: int | None = None
    threads: int = 1
    max_waiting_bytes: int | None = None
    trackers: tuple[Tracker, ...] = ()
    final_average: bool = True
    metrics: str | None = None

    def __post_init__(self) -> None:
        check_counts(self, "threads", "min_workers", "max_waiting_bytes")
        check_ranges(
            self,
            threads="at least 1",
            min_workers="at least 1 or None",
            max_waiting_bytes="at least 1 or None",
        )
        if self.metrics is not None:
            metrics_address(self.metrics)


def take_part(
    experiment: Experiment,
    rank: Rank,
    transport: Transport,
    *,
    out: Path | str,
    settings: WorkerSettings = WorkerSettings(),
    forecaster: Forecaster | None = None,
    recipe: str | None = None,
    command: str | None = None,
    executors: Executors | None = None,
) -> str:
    """Run worker `rank` of `experiment`, until the end of the run.

    A worker restarted with the same `out` resumes from its checkpoint if all others resume too;
    otherwise it takes a neighbor's parameters.

    Args:
        experiment: The workers' common experiment; its platforms, links and faults describe
            simulated machines and are ignored.
        rank: Rank of this worker, in 0..num_workers - 1.
        transport: Transport of the messages.
        out: Folder of this worker, made if missing.
        settings: Settings of this worker.
        forecaster: Forecasts the speed of this machine, for `EdgeGossip`.
        recipe: Name of the recipe, for the record.
        command: Command of this worker, for the record.
        executors: Executors that train its batches together; None for one.

    Returns:
        Reason for the end: "finished", "time limit" or "interrupted".

    Raises:
        NetworkError: If this machine cannot take part, if too few other workers join, or if
            most of them run another experiment.
        RunFolderError: If `out` cannot be written, has other contents, or is in use.
        TrainingError: If a loss is not finite.
        ValueError: If `rank` is out of range, or `Experiment.keep` is set but no worker could
            measure the averaged model: its data is `Local`, or its model has parts.
    """
    check_rank(rank, experiment.num_workers)
    if settings.open:
        experiment = replace(experiment, algorithm=opened(experiment.algorithm))
    with_best_of(experiment)  # before a folder is made
    with (
        serving_metrics(settings.metrics) as metrics,  # first: a used port leaves no folder
        locked(Path(out)),
        intra_op_threads(settings.threads),
    ):
        worker = _Worker(experiment, rank, Path(out), settings, recipe, command, executors)
        return worker.run(transport, forecaster, metrics)


class _Worker:
    """Training of one worker, whose folder is a `WorkerRecord`."""

    def __init__(
        self,
        experiment: Experiment,
        rank: Rank,
        out: Path,
        settings: WorkerSettings,
        recipe: str | None,
        command: str | None,
        executors: Executors | None,
    ) -> None:
        self._experiment = experiment
        self._executors = executors
        self._rank = rank
        self._settings = settings
        self._recipe = recipe
        self._record = WorkerRecord(
            experiment,
            rank,
            out,
            recipe=recipe,
            command=command,
            trackers=settings.trackers,
        )

    def run(
        self, transport: Transport, forecaster: Forecaster | None, metrics: MetricsServer | None
    ) -> str:
        """Take part, and leave a complete folder in any case."""
        record = self._record
        try:
            host = self._host = self._make_host(transport, forecaster)
        except BaseException:
            record.abandon()
            raise
        reason = "failed"
        try:
            with (
                on_stop_signal(host.stop),
                on_leave_signal(host.leave),
                record.blaming_the_checkpoint(),
                nullcontext() if metrics is None else metrics.showing(HostMetrics(host)),
            ):
                reason = host.run()
        finally:
            reason = record.end(
                reason,
                torch_device=self._experiment.task.torch_device,
                ended=self._settings.ended,
                validate=self._validate,
            )
        if host.meeting.shortage is not None:
            raise NetworkError(host.meeting.shortage)
        return reason

    def _make_host(self, transport: Transport, forecaster: Forecaster | None) -> Host[Any]:
        experiment, record = self._experiment, self._record
        workload = self._workload = experiment.workload((self._rank,))
        validator = workload.validator(self._rank)
        services = replace(
            record.services((self._watch_parent,), snapshots=self._settings.snapshots),
            forecaster=forecaster,
            evaluate=validator.evaluate if validator else None,
        )
        shared = self._executors
        make = None if shared is None else partial(LeadingLearner, executors=shared)
        trainer = workload.make_trainer(self._rank, record.incarnation, make)
        record.has_data(trainer.num_samples)
        initial = workload.initial_params(self._rank)
        algorithm = self._algorithm = self._whole_algorithm(initial)
        with record.blaming_the_checkpoint():
            host: Host[Any] = Host(
                algorithm,
                self._rank,
                experiment.num_workers,
                initial,
                trainer,
                transport,
                settings=self._host_settings(workload),
                services=services,
                checkpoint=record.checkpoint,
            )
            record.follow(host, algorithm, initial, self._limit)
        return host

    @property
    def _limit(self) -> Seconds:
        return self._settings.max_seconds or self._experiment.max_seconds or math.inf

    def _whole_algorithm(self, params: Tensor) -> Algorithm[Any]:
        """The experiment's algorithm, with the best model and the final average if wanted."""
        algorithm, plain = with_best_of(self._experiment), self._experiment.algorithm
        average = partial(
            with_final_average,
            num_workers=self._experiment.num_workers,
            ends_at=self._limit,
            params=params,
        )
        # By the plain one: workers that send nothing else do not average at the end.
        is_averaged = self._settings.final_average and average(plain) is not plain
        return average(algorithm) if is_averaged else algorithm

    def _host_settings(self, workload: Workload) -> HostSettings:
        experiment, settings, limit = self._experiment, self._settings, self._limit
        is_averaged = isinstance(self._algorithm, FinalAverage)
        return HostSettings(
            run=run_id(run_key(experiment, self._recipe, settings.name)),
            introduction=introduce(
                experiment,
                workload,
                None if limit == math.inf else limit,
                final_average=settings.final_average,
            ),
            meet_seconds=settings.meet_seconds,
            min_to_begin=settings.min_workers or (1 if settings.open else 2),
            is_open=settings.open,
            min_workers=settings.min_workers or 1,
            ended=settings.ended,
            max_seconds=limit,
            ending_seconds=ending_seconds(limit) if is_averaged else 0.0,
            checkpoint_seconds=settings.checkpoint_seconds,
            max_waiting_bytes=settings.max_waiting_bytes,
        )

    def _watch_parent(self, now: Seconds) -> Seconds:
        """A chore: stop if the process that started this one has ended."""
        parent = self._settings.parent
        if parent is not None and not is_running(parent):
            self._host.stop()
        return now + _LOOK

    def _validate(self, params: Tensor) -> Mapping[str, float]:
        """Metrics of the final model, if it is whole and there is validation data."""
        validator = self._workload.validator(self._rank)
        if validator is None or not self._workload.is_whole([self._rank]):
            return {}
        return validator.evaluate(params)[1]
