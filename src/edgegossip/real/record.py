"""The folder of a worker while it runs: its log, snapshots, checkpoints and results."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.host.host import Host
from edgegossip.net.host.settings import HostServices
from edgegossip.real.agreement import agreement_of
from edgegossip.real.best_model import best_state
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
    save_checkpoint,
    write_json,
)
from edgegossip.runs.final_average import FinalState
from edgegossip.runs.folder import BEST
from edgegossip.runs.tracking import Tracker

_LOG = logging.getLogger("edgegossip.real")
_SHOW: Seconds = 1.0
_MARGIN = 2**16
"""Bytes reserved for a summary, and for the header of a model."""


class WorkerRecord:
    """Keeps the folder of one worker, whoever trains it.

    Args:
        experiment: The workers' common experiment.
        rank: Rank of this worker.
        out: Folder of this worker, made if missing; the caller has locked it.
        recipe: Name of the recipe, for the record.
        command: Command of this worker, for the record.
        trackers: Trackers that receive this worker's own numbers.
        as_kept: Makes a model as the folder has it from one as the worker exchanges it.

    Attributes:
        checkpoint: The checkpoint to resume from; None without a usable one.
        incarnation: Number of the worker's returns without its checkpoint.

    Raises:
        RunFolderError: If `out` cannot be written, holds another worker or one that has ended.
    """

    def __init__(
        self,
        experiment: Experiment,
        rank: Rank,
        out: Path,
        *,
        recipe: str | None = None,
        command: str | None = None,
        trackers: Sequence[Tracker] = (),
        as_kept: Callable[[Tensor], Tensor] = lambda params: params,
    ) -> None:
        self._experiment = experiment
        self._rank = rank
        self._out = out
        self._as_kept = as_kept
        self._path = out / "checkpoint.safetensors"
        self._disk_warning = DiskWarning("a new checkpoint")
        described = header(experiment, recipe)
        if has_ended(out, described):
            raise RunFolderError(f"{out} holds a worker that has ended; choose another --out")
        _make(out, described)
        self._log = WorkerEventLog(out / "events.jsonl")
        self._tracking = WorkerTracking(trackers, described, rank, out, self._log)
        self._log.write(
            "worker",
            **described,
            rank=rank,
            command=command,
            incarnation=self._log.incarnation,
            wall_started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if who := who_is_who(experiment.roles):
            role = role_words(experiment.roles[rank])
            _LOG.info("rank %d takes part as %s; %s", rank, role, who)
        self._started = time.monotonic()
        self.checkpoint = kept_checkpoint(self._path)
        # A resumed worker goes on with its random streams, another gets new ones.
        resumed = self.checkpoint
        self.incarnation: int = (
            self._log.incarnation if resumed is None else resumed["incarnation"]
        )
        self._is_untried = resumed is not None  # until the next one is kept
        self._snapshots = Snapshots(
            out / "snapshots",
            self._estimate,
            lambda: self._path.stat().st_size if self._path.exists() else 0,
        )
        self._host: Host[Any]
        self._lines: ProgressLines

    def services(self, chores: Sequence[Any] = (), *, snapshots: bool = True) -> HostServices:
        """Services through which the worker's host reports to this folder.

        Args:
            chores: Further chores of the host.
            snapshots: Keep snapshots, unless the worker's role is never evaluated.
        """
        role = self._experiment.algorithm.role(self._rank)
        is_watched = snapshots and role.is_evaluated
        return HostServices(
            observer=self._log,
            on_link=partial(self._log.link_changed, self._rank),
            chores=(
                self._show,
                lambda now: self._lines.due(now),
                *chores,
                *self._tracking.chores,
                *([self._snapshots.due] if is_watched else []),
            ),
            save=self._save,
        )

    def has_data(self, num_samples: int) -> None:
        """Log the number of this worker's samples."""
        self._log.write("data", time=0.0, rank=self._rank, num_samples=num_samples)

    def follow(
        self, host: Host[Any], algorithm: Algorithm[Any], initial: Tensor, limit: Seconds
    ) -> None:
        """Follow the worker's host, which was made with `services` and `checkpoint`.

        Args:
            host: The host.
            algorithm: The host's algorithm.
            initial: The worker's initial parameters, [num_params].
            limit: Time limit of the run; infinite without one.

        Raises:
            RunFolderError: If there is no room for the last files.
            TypeError: If the checkpoint holds a state of another kind.
        """
        # A loaded state must have the same structure as a new one.
        state, fresh = host.state, algorithm.init(self._rank, initial)
        if type(state) is not type(fresh) or state.estimate.shape != fresh.estimate.shape:
            raise TypeError(
                f"a state like {type(fresh).__name__} was expected, got {state!r:.60}"
            )
        self._host, self._algorithm = host, algorithm
        most = None if limit == math.inf else limit
        self._lines = ProgressLines(host, replace(self._experiment, max_seconds=most))
        self._reserve(state.estimate)

    def _estimate(self) -> Tensor:
        state = self._host.state
        return self._as_kept(state.estimate) if state.is_evaluated else torch.empty(0)

    def _reserve(self, params: Tensor) -> None:
        """Keep room for the last files, with models as large as `params`."""
        num_bytes = params.numel() * params.element_size() + _MARGIN
        has_best = self._experiment.kept is not None
        self._model = ReservedFile(self._out / "params.safetensors", num_bytes)
        self._best = ReservedFile(self._out / BEST, num_bytes) if has_best else None
        self._summary = ReservedFile(self._out / "summary.json", _MARGIN)

    @contextmanager
    def blaming_the_checkpoint(self) -> Iterator[None]:
        """Turn an error caused by the loaded checkpoint into one that names the checkpoint."""
        try:
            yield
        except LOADING_ERRORS as error:
            if not self._is_untried:
                raise
            raise RunFolderError(
                f"{self._path} does not fit this worker ({error!r:.300}); was the "
                "code changed? Delete it, and the worker begins without it"
            ) from error

    def _show(self, now: Seconds) -> Seconds:
        self._log.show()
        return now + _SHOW

    def _save(self, checkpoint: dict[str, Any]) -> bool:
        try:
            save_checkpoint(self._path, {**checkpoint, "incarnation": self.incarnation})
        except RunFolderError as error:
            self._disk_warning.begin(error)
            return False
        self._disk_warning.end()
        self._is_untried = False
        return True

    def abandon(self) -> None:
        """Close the log of a worker that could not be made."""
        self._snapshots.close()
        self._log.close()

    def end(
        self,
        reason: str,
        *,
        torch_device: str,
        ended: Sequence[Rank] = (),
        validate: Callable[[Tensor], Mapping[str, float]] | None = None,
    ) -> str:
        """Write the results, and delete the checkpoint of a finished worker.

        Args:
            reason: Why the host's run has ended, or "failed".
            torch_device: Device on which the worker trained.
            ended: Ranks that had finished before this start.
            validate: Measures the final model on validation data; None without such data.

        Returns:
            The reason: "time limit" instead of "finished" if time cut off the final average.
        """
        # In this order: once there is a summary, others may read the folder, or copy it.
        self._snapshots.close()
        host = self._host
        if reason == "finished" and isinstance(host.state, FinalState) and host.state.is_cut:
            reason = "time limit"
        wall_seconds = time.monotonic() - self._started
        agreement = None
        if reason in ENDS:
            agreement = agreement_of(self._algorithm, host, ended)
        if agreement is not None:
            agreement.log()
        self._keep(self._model, self._file(host.state.estimate), reason)
        best = self._keep_best(reason)
        last = {"rank": self._rank, "reason": reason, "wall_seconds": wall_seconds}
        self._log.end(time=host.now, **last, **cut_off(reason, host.in_training()))
        # Last, because it completes the folder.
        summary = {
            **last,
            "torch_device": torch_device,
            "agreement": None if agreement is None else agreement.summary(),
            **self._numbers(),
            **self._validated(validate if reason in ENDS else None),
            **best,
        }
        self._keep(self._summary, json_file(summary), reason)
        self._tracking.end(host.now)
        if reason in ENDS:
            # After the summary: a worker killed between the two resumes, and ends again.
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:  # a worker that has ended does not look at it
                _LOG.warning("cannot delete %s: %s", self._path, error.strerror)
        if not (host.peers.has_begun or self._path.exists()):
            # Nothing to resume, so the folder can be reused with other settings.
            (self._out / "experiment.json").unlink()
        return reason

    def _numbers(self) -> dict[str, Any]:
        """Fields of the summary that the host and the log have counted."""
        host, log = self._host, self._log
        # The average is evaluated everywhere, but only the model of the active server counts.
        inner = host.state.inner if isinstance(host.state, FinalState) else host.state
        return {
            "seconds": host.now,
            "rounds": host.state.round,
            "role": self._experiment.roles[self._rank],
            "commits": log.commits.total,
            "bytes_sent": log.bytes_sent,
            "samples_processed": log.samples_processed,
            "mean_staleness": log.mean_staleness,
            "is_evaluated": inner.is_evaluated,
            "refused": host.refusals,
        }

    def _file(self, params: Tensor) -> bytes:
        content: bytes = safetensors.torch.save({"params": self._as_kept(params).contiguous()})
        return content

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
                self._path.unlink(missing_ok=True)
            file.write(content)

    def _keep_best(self, reason: str) -> dict[str, Any]:
        """Write the best model; return the field `best` of the summary, if it is wanted."""
        if self._best is None or (state := best_state(self._host.state)) is None:
            return {}
        record, is_known = state.record, bool(len(state.best))
        if is_known:
            self._keep(self._best, self._file(state.best), reason)
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

    def _validated(
        self, validate: Callable[[Tensor], Mapping[str, float]] | None
    ) -> dict[str, float | None]:
        """Metrics of the worker's final model; None where they are not measured."""
        values = {} if validate is None else validate(self._host.state.estimate)
        metrics = self._experiment.task.chosen_first
        return {f"validation_{metric.key}": values.get(metric.name) for metric in metrics}


def _make(out: Path, described: dict[str, Any]) -> None:
    """Write the folder's header; delete results of an earlier end in an existing folder."""
    path = out / "experiment.json"
    for end in ("summary.json", "params.safetensors", BEST):
        (out / end).unlink(missing_ok=True)
    if not path.exists():
        write_json(path, described)
