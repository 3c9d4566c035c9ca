"""One worker of an experiment on a real machine, and its folder."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm, opened
from edgegossip.contract.errors import NetworkError, RunFolderError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_counts, check_ranges, check_rank
from edgegossip.machine.counters import is_running
from edgegossip.net.host.host import Host
from edgegossip.net.host.settings import Forecaster, HostServices, HostSettings
from edgegossip.net.transport import Transport
from edgegossip.real.agreement import agreement_of
from edgegossip.real.best_model import best_state, with_best_of
from edgegossip.real.host_metrics import HostMetrics
from edgegossip.real.introduction import introduce, run_id, run_key
from edgegossip.real.metrics_server import MetricsServer, metrics_address, serving_metrics
from edgegossip.real.progress_lines import ProgressLines
from edgegossip.real.worker_files import DiskWarning, Snapshots, WorkerEventLog, WorkerTracking
from edgegossip.real.worker_folder import ENDS, has_ended, kept_checkpoint
from edgegossip.runs.describe import header, role_words, who_is_who
from edgegossip.runs.events import cut_off
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import (
    LOADING_ERRORS,
    ReservedFile,
    is_for_lack_of_room,
    json_file,
    locked,
    save_checkpoint,
    write_json,
)
from edgegossip.runs.final_average import (
    FinalAverage,
    FinalState,
    ending_seconds,
    with_final_average,
)
from edgegossip.runs.folder import BEST
from edgegossip.runs.process import intra_op_threads, on_leave_signal, on_stop_signal
from edgegossip.runs.tracking import Tracker
from edgegossip.training.executors.lead import Executors
from edgegossip.training.executors.learners import LeadingLearner
from edgegossip.training.task import Workload

_LOG = logging.getLogger("edgegossip.real")
_SHOW: Seconds = 1.0
_MARGIN = 2**16
"""Bytes reserved for a summary, and for the header of a model."""


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
    """Training, checkpoints, snapshots and log of one worker."""

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
        self._out = out
        self._settings = settings
        self._recipe = recipe
        self._header = header(experiment, recipe)
        self._checkpoint = out / "checkpoint.safetensors"
        self._disk_warning = DiskWarning("a new checkpoint")
        if has_ended(out, self._header):
            raise RunFolderError(f"{out} holds a worker that has ended; choose another --out")
        _make(out, self._header)
        self._log = WorkerEventLog(out / "events.jsonl")
        self._tracking = WorkerTracking(settings.trackers, self._header, rank, out, self._log)
        self._log.write(
            "worker",
            **self._header,
            rank=rank,
            command=command,
            incarnation=self._log.incarnation,
            wall_started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if who := who_is_who(experiment.roles):
            role = role_words(experiment.roles[rank])
            _LOG.info("rank %d takes part as %s; %s", rank, role, who)
        self._started = time.monotonic()

    def run(
        self, transport: Transport, forecaster: Forecaster | None, metrics: MetricsServer | None
    ) -> str:
        """Take part, and leave a complete folder in any case."""
        try:
            host = self._host = self._make_host(transport, forecaster)
        except BaseException:
            self._log.close()
            raise
        reason = "failed"
        try:
            with (
                on_stop_signal(host.stop),
                on_leave_signal(host.leave),
                self._blaming_the_checkpoint(),
                nullcontext() if metrics is None else metrics.showing(HostMetrics(host)),
            ):
                reason = host.run()
                is_cut = isinstance(host.state, FinalState) and host.state.is_cut
                if reason == "finished" and is_cut:
                    reason = "time limit"
        finally:
            # In this order: once there is a summary, others may read the folder, or copy it.
            self._snapshots.close()
            self._end(host, reason)
            if not (host.peers.has_begun or self._checkpoint.exists()):
                # Nothing to resume, so the folder can be reused with other settings.
                (self._out / "experiment.json").unlink()
        if host.meeting.shortage is not None:
            raise NetworkError(host.meeting.shortage)
        return reason

    def _make_host(self, transport: Transport, forecaster: Forecaster | None) -> Host[Any]:
        experiment = self._experiment
        workload = self._workload = experiment.workload((self._rank,))
        checkpoint = kept_checkpoint(self._checkpoint)
        # A resumed worker goes on with its random streams, another gets new ones.
        kept = self._log.incarnation if checkpoint is None else checkpoint["incarnation"]
        self._incarnation: int = kept
        nothing = torch.empty(0)
        self._snapshots = Snapshots(
            self._out / "snapshots",
            lambda: host.state.estimate if host.state.is_evaluated else nothing,
            lambda: self._checkpoint.stat().st_size if self._checkpoint.exists() else 0,
        )
        services = self._services(workload, forecaster)
        shared = self._executors
        make = None if shared is None else partial(LeadingLearner, executors=shared)
        trainer = workload.make_trainer(self._rank, self._incarnation, make)
        self._log.write("data", time=0.0, rank=self._rank, num_samples=trainer.num_samples)
        initial = workload.initial_params(self._rank)
        algorithm = self._algorithm = self._whole_algorithm(initial)
        self._is_untried = checkpoint is not None  # until the next one is kept
        with self._blaming_the_checkpoint():
            host: Host[Any] = Host(
                algorithm,
                self._rank,
                experiment.num_workers,
                initial,
                trainer,
                transport,
                settings=self._host_settings(workload),
                services=services,
                checkpoint=checkpoint,
            )
            # A loaded state must have the same structure as a new one.
            state, fresh = host.state, algorithm.init(self._rank, initial)
            if type(state) is not type(fresh) or state.estimate.shape != fresh.estimate.shape:
                raise TypeError(
                    f"a state like {type(fresh).__name__} was expected, got {state!r:.60}"
                )
        self._reserve(host.state.estimate)
        limit = None if self._limit == math.inf else self._limit
        self._lines = ProgressLines(host, replace(experiment, max_seconds=limit))
        return host

    def _reserve(self, params: Tensor) -> None:
        """Keep room for the last files, with models as large as `params`."""
        num_bytes = params.numel() * params.element_size() + _MARGIN
        has_best = self._experiment.kept is not None
        self._model = ReservedFile(self._out / "params.safetensors", num_bytes)
        self._best = ReservedFile(self._out / BEST, num_bytes) if has_best else None
        self._summary = ReservedFile(self._out / "summary.json", _MARGIN)

    def _services(self, workload: Workload, forecaster: Forecaster | None) -> HostServices:
        role = self._experiment.algorithm.role(self._rank)
        validator = workload.validator(self._rank)
        is_watched = self._settings.snapshots and role.is_evaluated
        chores = [self._show, self._tell, *self._tracking.chores]
        return HostServices(
            forecaster=forecaster,
            evaluate=validator.evaluate if validator else None,
            observer=self._log,
            on_link=partial(self._log.link_changed, self._rank),
            chores=(*chores, *([self._snapshots.due] if is_watched else [])),
            save=self._save,
        )

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

    @contextmanager
    def _blaming_the_checkpoint(self) -> Iterator[None]:
        """Turn an error caused by the loaded checkpoint into one that names the checkpoint."""
        try:
            yield
        except LOADING_ERRORS as error:
            if not self._is_untried:
                raise
            raise RunFolderError(
                f"{self._checkpoint} does not fit this worker ({error!r:.300}); was the "
                "code changed? Delete it, and the worker begins without it"
            ) from error

    def _show(self, now: Seconds) -> Seconds:
        self._log.show()
        parent = self._settings.parent
        if parent is not None and not is_running(parent):
            self._host.stop()
        return now + _SHOW

    def _tell(self, now: Seconds) -> Seconds:
        return self._lines.due(now)

    def _save(self, checkpoint: dict[str, Any]) -> bool:
        try:
            save_checkpoint(self._checkpoint, {**checkpoint, "incarnation": self._incarnation})
        except RunFolderError as error:
            self._disk_warning.begin(error)
            return False
        self._disk_warning.end()
        self._is_untried = False
        return True

    def _end(self, host: Host[Any], reason: str) -> None:
        """Write the results, and delete the checkpoint of a finished worker."""
        wall_seconds = time.monotonic() - self._started
        agreement = None
        if reason in ENDS:
            agreement = agreement_of(self._algorithm, host, self._settings.ended)
        if agreement is not None:
            agreement.log()
        # The average is evaluated everywhere, but only the model of the active server counts.
        inner = host.state.inner if isinstance(host.state, FinalState) else host.state
        content = safetensors.torch.save({"params": host.state.estimate.contiguous()})
        self._keep(self._model, content, reason)
        best = self._keep_best(host, reason)
        last = {"rank": self._rank, "reason": reason, "wall_seconds": wall_seconds}
        self._log.end(time=host.now, **last, **cut_off(reason, host.in_training()))
        # Last, because it completes the folder.
        summary = json_file(
            {
                **last,
                "seconds": host.now,
                "rounds": host.state.round,
                "role": self._experiment.roles[self._rank],
                "torch_device": self._experiment.task.torch_device,
                "commits": self._log.commits.total,
                "bytes_sent": self._log.bytes_sent,
                "samples_processed": self._log.samples_processed,
                "mean_staleness": self._log.mean_staleness,
                "is_evaluated": inner.is_evaluated,
                "agreement": None if agreement is None else agreement.summary(),
                **self._validated(host, reason),
                **best,
                "refused": host.refusals,
            }
        )
        self._keep(self._summary, summary, reason)
        self._tracking.end(host.now)
        if reason in ENDS:
            # After the summary: a worker killed between the two resumes, and ends again.
            try:
                self._checkpoint.unlink(missing_ok=True)
            except OSError as error:  # a worker that has ended does not look at it
                _LOG.warning("cannot delete %s: %s", self._checkpoint, error.strerror)

    def _keep(self, file: ReservedFile, content: bytes, reason: str) -> None:
        """Write a result, which on a full disk is worth more than snapshots."""
        try:
            file.write(content)
        except RunFolderError as error:
            if not is_for_lack_of_room(error):
                raise
            _LOG.warning("%s - deleting this worker's snapshots, and trying again", error)
            self._snapshots.delete()
            if reason in ENDS:  # else it must go on from its checkpoint
                self._checkpoint.unlink(missing_ok=True)
            file.write(content)

    def _keep_best(self, host: Host[Any], reason: str) -> dict[str, Any]:
        """Write the best model; return the field `best` of the summary, if it is wanted."""
        if self._best is None or (state := best_state(host.state)) is None:
            return {}
        record, is_known = state.record, bool(len(state.best))
        if is_known:
            content = safetensors.torch.save({"params": state.best.contiguous()})
            self._keep(self._best, content, reason)
            _LOG.info(
                "the best of %d averaged models by validation (%.4g) was that of round %d%s",
                record.check,
                record.value,
                record.best_round,
                "; the run ended because none was better for so long" if state.is_over else "",
            )
        else:
            self._best.release()
        found = {"time": record.best_time, "round": record.best_round, "value": record.value}
        return {"best": {**found, "is_known": is_known, "has_stopped_run": state.is_over}}

    def _validated(self, host: Host[Any], reason: str) -> dict[str, float | None]:
        """Metrics of the worker's final, whole model; None without this or validation data."""
        validator = self._workload.validator(self._rank)
        metrics = self._experiment.task.chosen_first
        values: Mapping[str, float | None] = {metric.name: None for metric in metrics}
        if reason in ENDS and validator is not None and self._workload.is_whole([self._rank]):
            _, values = validator.evaluate(host.state.estimate)
        return {f"validation_{metric.key}": values[metric.name] for metric in metrics}


def _make(out: Path, header: dict[str, Any]) -> None:
    """Write the folder's header; delete results of an earlier end in an existing folder."""
    path = out / "experiment.json"
    for end in ("summary.json", "params.safetensors", BEST):
        (out / end).unlink(missing_ok=True)
    if not path.exists():
        write_json(path, header)
