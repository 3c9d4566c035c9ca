"""The run folder of a worker whose training loop is the caller's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import Interrupted, UsageError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_ranges
from edgegossip.contract.snapshot import dismantle
from edgegossip.models.blocks import drawn_from
from edgegossip.models.flat import laid_out
from edgegossip.models.shared import num_shards
from edgegossip.net.host.host import Host
from edgegossip.real.own_work import LoopLeftError, Stateful
from edgegossip.real.record import WorkerRecord
from edgegossip.runs.best import KeepBest
from edgegossip.runs.describe import describe, flatten
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import locked
from edgegossip.runs.process import on_stop_signal
from edgegossip.runs.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class LoopFolder:
    """A run folder for a `TrainingLoop`, like that of ``edgegossip worker``.

    The loop then keeps a log, snapshots, checkpoints and results in `out`. Started again with
    the same `out`, it resumes; Ctrl+C or SIGTERM makes `step` write a checkpoint after the
    current piece of work and raise `Interrupted`. Copied to ``RUN/workers/R``, the folders of
    all workers become one run with a report, by ``edgegossip gather FILE.py:FUNCTION --out
    RUN``, where the function returns `experiment`.

    Args:
        out: Folder of this worker, made if missing.
        experiment: Describes the run, equally for all workers: the loop's algorithm, as many
            platforms as workers, and a task that names the model and has the test samples and
            metrics for the report. The task's optimizer, schedule and batch size are recorded
            but not used, and nothing is simulated.
        stateful: Objects that a checkpoint holds by name, besides the model: the optimizer, a
            learning rate schedule, or anything else with `state_dict` and `load_state_dict`.
        checkpoint_seconds: Seconds between checkpoints, above 0.
        snapshots: Keep snapshots, from which the metrics over time are measured afterwards.
        trackers: Trackers that receive this worker's numbers every two seconds.
        recipe: Name of the recipe, for the record.
        command: Command of this worker, for the record.

    Raises:
        ValueError: If `checkpoint_seconds` is out of range.
        TypeError: If a state has something that a checkpoint cannot hold.
    """

    out: Path | str
    experiment: Experiment
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    checkpoint_seconds: Seconds = 60.0
    snapshots: bool = True
    trackers: tuple[Tracker, ...] = ()
    recipe: str | None = None
    command: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self, checkpoint_seconds="above 0")
        for name, each in self.stateful.items():
            try:
                dismantle(each.state_dict())
            except TypeError as error:
                raise TypeError(
                    f"stateful[{name!r}]: {error}; a state may have dicts, lists, tuples, "
                    "numbers, strings and tensors"
                ) from None

    def require(
        self,
        algorithm: Algorithm[Any],
        num_workers: int,
        model: nn.Module,
        keep: KeepBest | None,
        *,
        has_buffers: bool,
    ) -> None:
        """Check that a loop is what the experiment describes.

        Raises:
            ValueError: If it differs, or has parts of a model.
            UsageError: If `fully_shard` has divided the model.
        """
        told = self.experiment
        if num_shards(model):
            raise UsageError(
                "a folder holds whole models, and fully_shard has divided this one; leave "
                "`folder` out, or use DistributedDataParallel"
            )
        if isinstance(told.task.model, Mapping) or any(
            told.algorithm.role(rank).num_slices > 1 for rank in range(told.num_workers)
        ):
            raise ValueError("a loop's folder holds whole models; leave `folder` out for parts")
        with drawn_from(0):  # the caller's random numbers stay as they are
            made = told.task.model()
        own = {
            "num_workers": num_workers,
            "algorithm": describe(algorithm),
            "keep": describe(keep),
            "has_buffers": has_buffers,
            "tensors": _shapes(model, has_buffers=has_buffers),
        }
        described = {
            "num_workers": told.num_workers,
            "algorithm": describe(told.algorithm),
            "keep": describe(told.kept),
            "has_buffers": told.task.has_buffers,
            "tensors": _shapes(made, has_buffers=has_buffers),
        }
        flat, expected = flatten(own), flatten(described)
        for name in expected | flat:
            if flat.get(name) != expected.get(name):
                raise ValueError(
                    f"the loop has {name} {flat.get(name)!r}, but the experiment of its folder "
                    f"has {expected.get(name)!r}; give both the same"
                )


class OpenLoopFolder:
    """The folder of a loop from its making to its end.

    Args:
        folder: Settings of the folder.
        rank: Rank of the worker.
        model: The caller's model, whose tensors are laid out in the loop's vector.
        limit: Time limit of the run; infinite without one.
        has_buffers: Whether the vector has the model's buffers.

    Raises:
        RunFolderError: If the folder cannot be written, holds another worker or one that has
            ended, or is in use.
    """

    def __init__(
        self,
        folder: LoopFolder,
        rank: Rank,
        model: nn.Module,
        limit: Seconds,
        *,
        has_buffers: bool,
    ) -> None:
        self._settings = folder
        self._limit = limit
        self._torch_device = str(next(model.parameters()).device)
        self._is_stopped = False
        order = _channels_last(laid_out(model, has_buffers))

        def as_kept(params: Tensor) -> Tensor:
            whole = params.to("cpu", torch.float32)
            return whole if order is None else whole[order]

        self._stack = ExitStack()
        with ExitStack() as stack:
            stack.enter_context(locked(Path(folder.out)))
            self._record = WorkerRecord(
                folder.experiment,
                rank,
                Path(folder.out),
                recipe=folder.recipe,
                command=folder.command,
                trackers=folder.trackers,
                as_kept=as_kept,
            )
            self._stack = stack.pop_all()

    def host(self, make: partial[Host[Any]]) -> Host[Any]:
        """Make the loop's host, from its checkpoint if there is one.

        Args:
            make: Makes the host; its first arguments are the algorithm, the rank, the number of
                workers, the initial parameters and the trainer, and its services lack the
                folder's.

        Raises:
            RunFolderError: If the checkpoint does not fit.
        """
        record, theirs = self._record, make.keywords["services"]
        algorithm, _, _, initial, trainer, *_ = make.args
        record.has_data(trainer.num_samples)
        ours = replace(
            record.services(snapshots=self._settings.snapshots),
            forecaster=theirs.forecaster,
            evaluate=theirs.evaluate,
        )
        try:
            with record.blaming_the_checkpoint():
                self._host = make(services=ours, checkpoint=record.checkpoint)
                record.follow(self._host, algorithm, initial, self._limit)
        except BaseException:
            record.abandon()
            self.close()
            raise
        return self._host

    def listen_to_signals(self) -> None:
        """Until `close`, stop after the current work at Ctrl+C or SIGTERM."""
        self._stack.enter_context(on_stop_signal(self._stop))

    def _stop(self) -> None:
        self._is_stopped = True
        self._host.stop()

    def run(self) -> str:
        """Run the host, and write the results in any case; return why it ended."""
        reason = "failed"
        try:
            with self._record.blaming_the_checkpoint():
                reason = self._host.run()
        except LoopLeftError:
            reason = "interrupted"  # by its caller, who may begin again at the checkpoint
            raise
        finally:
            reason = self._record.end(reason, torch_device=self._torch_device)
        return reason

    def require_end(self, reason: str) -> None:
        """Raise `Interrupted` if a signal stopped the run, for the caller's loop."""
        if self._is_stopped and reason == "interrupted":
            raise Interrupted(
                f"interrupted; {self._settings.out} holds a checkpoint, and a loop that is "
                "made again with this folder continues"
            )

    def close(self) -> None:
        """Unlock the folder, and restore the handling of signals."""
        self._stack.close()


def _shapes(model: nn.Module, *, has_buffers: bool) -> list[str]:
    return [str(list(each.shape)) for each in laid_out(model, has_buffers)]


def _channels_last(tensors: Sequence[Tensor]) -> Tensor | None:
    """Where the entries of a task's vector are in a loop's, [num_params]; None if they agree.

    A task's models have the channels-last layout, and a loop's keep that of the caller.
    """
    if all(each.ndim != 4 for each in tensors):
        return None
    orders, start = [], 0
    for each in tensors:
        order = torch.arange(start, start + each.numel()).as_strided(each.shape, each.stride())
        if each.ndim == 4:
            kept = torch.empty_like(order, memory_format=torch.channels_last).copy_(order)
        else:
            kept = order
        orders.append(kept.as_strided((each.numel(),), (1,)))
        start += each.numel()
    return torch.cat(orders)
