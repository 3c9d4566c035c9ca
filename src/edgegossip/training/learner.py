"""A worker's batches, read ahead while its model trains on another batch."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from edgegossip.contract.errors import DataError, LocalProtocolError, TrainingError
from edgegossip.contract.protocol import Layout, Rank, Train
from edgegossip.contract.randomness import generator
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.data.dataset import PooledSplit, Split, TrainingData
from edgegossip.data.nested import Nested
from edgegossip.models.flat import FlatModel
from edgegossip.models.flops import training_flops
from edgegossip.models.normalization import reset_lost_statistics
from edgegossip.training.copies import ModelCopies, ModelCopy
from edgegossip.training.loss import Forward, Loss, forward_pair, mean_of_finite, prepare_batch
from edgegossip.training.optimizer import Constant, OptimizerFactory, Schedule
from edgegossip.training.sampling.accuracy_aware import PLAIN, AccuracyAware
from edgegossip.training.sampling.batches import BatchStream
from edgegossip.training.sampling.cancellation import asking
from edgegossip.training.sampling.sampler import Batch
from edgegossip.training.step import PLAIN_STEP, TrainingStep


class Reader:
    """Reads a worker's batches in order, some of them ahead.

    Args:
        split: Training samples; only a `PooledSplit` is read ahead.
        shard: [n] indices of the worker's samples in `split`.
    """

    def __init__(self, split: Split, shard: Tensor) -> None:
        self._split = split
        self._shard = shard
        self._ahead: deque[tuple[Batch, Future[Nested]]] = deque()

    def read(self, batch: Batch, upcoming: Callable[[int], Sequence[Batch]]) -> Nested:
        """Read `batch`, and begin to read the following batches.

        Args:
            batch: The next batch.
            upcoming: ``upcoming(n)``: at most n of the following batches; called only if
                batches are read ahead.

        Raises:
            DataError: If a reading process has been killed.
        """
        if not isinstance(self._split, PooledSplit):
            return self._split.batch(self._shard[batch.positions])
        try:
            return self._read_pooled(self._split, batch, upcoming)
        except BrokenExecutor as error:
            raise DataError(
                "a process that reads samples ahead has ended (killed for its memory?); choose "
                "a smaller num_workers, or 0 to read in the training process"
            ) from error

    def _read_pooled(
        self, split: PooledSplit, batch: Batch, upcoming: Callable[[int], Sequence[Batch]]
    ) -> Nested:
        found: Future[Nested] | None = None
        if self._ahead and self._ahead[0][0] is batch:
            _, found = self._ahead.popleft()
        else:  # another pass has begun, or batches were cut anew
            self.forget()
        for each in upcoming(split.most_ahead)[len(self._ahead) :]:
            self._ahead.append((each, split.start(self._shard[each.positions])))
        indices = self._shard[batch.positions]
        return split.batch(indices) if found is None else found.result()

    def forget(self) -> None:
        """Drop the batches that were read ahead."""
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()


# One worker's training: a model, an optimizer and a shard of the data.


Augmentation: TypeAlias = Callable[[Nested, torch.Generator], Nested]
"""Randomly changes the raw x of a batch (x, y), or an entire batch of another kind; draws only
from the generator."""


class Learner(Trainer):
    """Trains a model on one shard; a `core.Trainer` for PyTorch.

    All random numbers (order of the batches, dropout, augmentation) come from streams keyed by
    (seed, rank, incarnation). Runs therefore repeat bit for bit even if learners train in
    parallel threads.

    Args:
        model: Model to train; the learner copies it. Training may change only parameters and
            buffers.
        loss: Loss of outputs and targets.
        optimizer: Makes the optimizer.
        dataset: The training split and its preparation: `Dataset.training`.
        shard: [n] indices of this worker's samples in the training split; may be empty before
            an assignment.
        batch_size: Samples per step.
        schedule: Factor on the learning rate, as a function of progress.
        seed: Seed of the run.
        rank: Rank of the learner's worker.
        incarnation: Number of times that this worker has rejoined.
        accuracy_aware: Choice of the samples of each pass.
        shards: Shards of all workers whose data this worker can reach, by rank, for `assign`.
        augmentation: Applied to each training batch; None for none.
        has_buffers: Exchange normalization buffers too; see `FlatModel`.
        torch_device: Device for the computation.
        forward: Maps model and batch to outputs and targets; see `Task`.
        step: Precision, accumulation, clipping and compilation of each step.
        copies: Copies of `model` that several learners share; by default, the learner makes
            its own.

    Raises:
        ValueError: If the optimizer updates tensors that it was not given, or a group of it has
            no learning rate ``lr``.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: Loss,
        optimizer: OptimizerFactory,
        dataset: TrainingData,
        shard: Tensor,
        batch_size: int,
        schedule: Schedule = Constant(),
        seed: int = 0,
        rank: Rank = 0,
        incarnation: int = 0,
        accuracy_aware: AccuracyAware = PLAIN,
        shards: Mapping[Rank, Tensor] | None = None,
        augmentation: Augmentation | None = None,
        has_buffers: bool = True,
        torch_device: torch.device | str = "cpu",
        forward: Forward = forward_pair,
        step: TrainingStep = PLAIN_STEP,
        copies: ModelCopies | None = None,
    ) -> None:
        key = (seed, rank, incarnation)
        self.rank = rank
        self._key = key
        self._batch_size = batch_size
        self._accuracy_aware = accuracy_aware
        self._shards = shards or {}
        self._random = None if augmentation is None else generator(*key, "augmentation")
        self._is_sharing = copies is not None and copies.can_be_lent
        self._copies = copies or ModelCopies(
            model, optimizer, has_buffers=has_buffers, torch_device=torch_device
        )
        self._copy: ModelCopy | None = None
        self._at_rest = self._first_rest()
        self._schedule = schedule
        self._loss = loss
        self._forward = forward
        self._settings = step
        self._dataset = dataset
        self._augmentation = augmentation
        self._torch_device = torch.device(torch_device)
        self._num_steps = 0
        self._is_cancelled = False
        self._assigned: tuple[Rank, ...] | None = None
        self._num_assigned = 0
        self._take_shard(shard)
        accuracy_aware.import_libraries()  # a learner is made before the run begins

    # The borrowed copy of the model, and the state kept without a copy.

    @property
    def model(self) -> FlatModel:
        """The model, with the parameters after the last request.

        After `rest`, it has its initial parameters.
        """
        return self._at_work().model

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._at_work().optimizer

    @property
    def _dropout(self) -> torch.Generator:
        return self._at_work().dropout

    def _at_work(self) -> ModelCopy:
        if self._copy is None:
            self._copy = copy = self._copies.borrow()
            copy.model.load(self._copies.initial_params)
            self._restore(copy)
        return self._copy

    def rest(self) -> None:
        """Lend the model to others until the next request, which brings its parameters."""
        if self._copy is not None and self._is_sharing:
            self._at_rest = self._rest_state()
            self._copies.give_back(self._copy)
            self._copy = None

    def _first_rest(self) -> dict[str, Any]:
        return {"optimizer": None, "dropout": None, "buffers": self._copies.initial_buffers}

    def _rest_state(self) -> dict[str, Any]:
        """State, except parameters, that lets training continue on another copy."""
        if self._copy is None:
            return self._at_rest
        draws = self._copies.has_dropout
        return {
            "optimizer": self._copy.memory(),
            "dropout": self._copy.dropout.get_state() if draws else None,
            "buffers": self._copy.buffers(),
        }

    def _restore(self, copy: ModelCopy) -> None:
        kept = self._at_rest
        copy.remember(kept["optimizer"])
        copy.load_buffers(kept["buffers"])
        if kept["dropout"] is not None:
            copy.dropout.set_state(kept["dropout"])
        elif self._copies.has_dropout:
            seed = generator(*self._key, "dropout").initial_seed()
            copy.dropout.manual_seed(seed)

    @property
    def num_samples(self) -> int:
        """Number of samples in the shard."""
        return len(self.shard)

    @property
    def epoch_cost(self) -> float:
        """Cost of a pass over the shard and of the look at aggregated points, in samples."""
        return self._accuracy_aware.epoch_cost(self._dataset.train.labels[self.shard])

    @property
    def setup_cost(self) -> float:
        """Cost of aggregating the shard, in training samples."""
        if not self._accuracy_aware.selection.needs_losses:
            return 0.0
        sample = self._dataset.train.batch(self.shard[:1])
        x, _ = prepare_batch(self._dataset, sample, self._torch_device)
        num_flops = self._accuracy_aware.aggregator.num_flops(
            self.num_samples, self._dataset.input_shape, max(1, self._dataset.num_classes)
        )
        copy = self._copies.borrow()
        try:
            return num_flops / training_flops(copy.model.module, x)
        finally:
            self._copies.give_back(copy)

    def set_up(self) -> None:
        """Aggregate the shard if the selection needs it.

        Raises:
            TrainingError: After `cancel`.
        """
        _ = self.batches

    def assign(self, ranks: tuple[Rank, ...]) -> None:
        """Train on the shards of `ranks` from now on.

        Raises:
            LocalProtocolError: If the data of one of `ranks` cannot be reached.
        """
        if missing := sorted(set(ranks) - set(self._shards)):
            raise LocalProtocolError(
                f"worker {self.rank} cannot reach the data of worker {missing[0]}, only that "
                f"of {sorted(self._shards)}"
            )
        self._assigned = ranks
        self._num_assigned += 1
        self._take_shard(torch.cat([self._shards[rank] for rank in sorted(set(ranks))]))

    def _take_shard(self, shard: Tensor) -> None:
        self.shard = shard
        self._reader = Reader(self._dataset.train, shard)
        self._batches: BatchStream | None = None
        self._kept_batches: dict[str, Any] | None = None  # to go back to

    @property
    def batches(self) -> BatchStream:
        """Stream of batches; made on first use, because aggregating takes time.

        Raises:
            LocalProtocolError: If the worker has no data.
        """
        if len(self.shard) == 0:
            raise LocalProtocolError(f"worker {self.rank} asked to Train, but it has no data")
        if self._batches is None:
            with asking(self._leave_off_if_cancelled):
                batches = self._make_batches()
            if self._kept_batches is not None:
                batches.load_state_dict(self._kept_batches)
            self._batches = batches
        return self._batches

    def _make_batches(self) -> BatchStream:
        # If a shard is assigned again, the order of its first passes is new.
        key = (*self._key, self._num_assigned) if self._num_assigned else self._key
        whose = (
            lambda: self.model.module,
            self._loss,
            self._torch_device,
            self._forward,
        )
        return self._accuracy_aware.make_stream(
            self._dataset, self.shard, self._batch_size, key, *whose
        )

    @property
    def layout(self) -> Layout:
        """Trained parameters first, then the exchanged buffers."""
        return Layout(self._copies.num_trained)

    def cost(self, request: Train) -> float:
        """Processed samples, plus a third of a sample for each look at an aggregated point."""
        self.batches.resize(request.batch_ratio)
        return self.batches.cost(
            request.work, request.keep_ratio, begins_pass=request.begins_pass
        )

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        """Train from `request.params`, at the schedule's rate for `progress`.

        Raises:
            LocalProtocolError: If the request has inputs, because a learner draws its own
                batches; if there is no data; or if the optimizer has no momentum to set.
            TrainingError: If a loss is not finite, or after `cancel`.
        """
        self._require_no_inputs(request)
        self.model.load(request.params)
        self.model.module.train()
        self._tune(request, progress)
        num_samples = 0
        losses = []
        before = torch.get_rng_state()
        for batch in self._take(request):
            self._leave_off_if_cancelled()
            losses.append(self._step(batch))
            num_samples += len(batch)
        if not torch.equal(before, torch.get_rng_state()):
            warnings.warn(
                "training draws from PyTorch's global generator, so this run may not repeat to "
                "the last bit; use nn.Dropout modules instead of functions, and `augmentation` "
                "instead of random transforms",
                stacklevel=2,
            )
        return self._summed_up(self.model.params.to("cpu", copy=True), losses, num_samples)

    def _require_no_inputs(self, request: Train) -> None:
        if request.inputs:
            raise LocalProtocolError(
                f"worker {self.rank} was given {sorted(request.inputs)} to train on, but a "
                "Learner draws its own batches; give the role a trainer that takes inputs"
            )

    def _summed_up(
        self, params: Tensor, losses: list[Tensor], num_samples: int
    ) -> TrainingResult:
        loss = self._mean_loss(losses)
        self._num_steps += len(losses)
        metrics = {"focus": self.batches.focus}
        return TrainingResult(params, num_samples, len(losses), loss, metrics=metrics)

    def start_over(self) -> None:
        """Reset the optimizer's state, which may be non-finite after a non-finite loss.

        Non-finite running statistics of normalization layers are also reset.
        """
        self._at_work().start_over()
        reset_lost_statistics(self.model.module)

    def cancel(self) -> None:
        """Stop for good after the current step of training or aggregation."""
        self._is_cancelled = True

    def _leave_off_if_cancelled(self) -> None:
        if self._is_cancelled:
            raise TrainingError(f"worker {self.rank} was told to stop")

    def _take(self, request: Train) -> Iterator[Batch]:
        """Cut the requested work into batches."""
        self.batches.resize(request.batch_ratio)
        return self.batches.take(
            request.work, request.keep_ratio, begins_pass=request.begins_pass
        )

    def _samples(self, batch: Batch) -> Nested:
        """Read a batch, augment it, and prepare it for the model."""
        samples = self._reader.read(batch, self.batches.upcoming)
        if self._augmentation is not None:
            assert self._random is not None
            match samples:
                case (Tensor() as x, y):
                    samples = self._augmentation(x, self._random), y
                case _:
                    samples = self._augmentation(samples, self._random)
        return prepare_batch(self._dataset, samples, self._torch_device)

    def _step(self, batch: Batch) -> Tensor:
        samples = self._samples(batch)
        loss = self._settings.gradients(self.model, batch, samples, self._batch_loss)
        self._optimizer.step()
        return loss

    def _batch_loss(self, batch: Batch, samples: Nested) -> tuple[Tensor, int]:
        module = self._at_work().compiled if self._settings.compile else self.model.module
        with self._settings.precision(self._torch_device):
            outputs, targets = self._forward(module, samples)
            loss = self.batches.loss(batch, self._loss, outputs, targets)
        return loss, self._settings.num_terms(batch, self._loss, outputs, targets)

    def _tune(self, request: Train, progress: float) -> None:
        """Set the learning rate and momentum for this request only."""
        factor = request.rate_ratio * self._schedule.factor(progress)
        for group, (rate, momentum) in zip(
            self._optimizer.param_groups, self._copies.settings, strict=True
        ):
            group["lr"] = factor * rate
            if momentum is not None:
                group["momentum"] = momentum if request.momentum is None else request.momentum
            elif request.momentum is not None:
                raise LocalProtocolError(
                    f"worker {self.rank} was asked for momentum {request.momentum:g}, but "
                    f"{type(self._optimizer).__name__} has no such setting; use SGD, or "
                    "leave the algorithm's momentum at None"
                )

    def _mean_loss(self, losses: list[Tensor]) -> float:
        return mean_of_finite(losses, self.rank, self._num_steps)

    def state_dict(self) -> Mapping[str, Any]:
        batches = self._kept_batches if self._batches is None else self._batches.state_dict()
        return {
            "assigned": self._assigned,
            "num_assigned": self._num_assigned,
            "batches": batches,
            "augmentation": None if self._random is None else self._random.get_state(),
            "num_steps": self._num_steps,
            **self._rest_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["assigned"] is not None:
            assigned, number = tuple(state["assigned"]), state["num_assigned"]
            if (assigned, number) != (self._assigned, self._num_assigned):
                self.assign(assigned)
                self._num_assigned = number
        self._kept_batches = state["batches"]
        if self._batches is not None and self._kept_batches is not None:
            self._batches.load_state_dict(self._kept_batches)  # its data stays aggregated
        else:
            self._batches = None
        if self._random is not None:
            self._random.set_state(state["augmentation"])
        self._num_steps = state["num_steps"]
        self._at_rest = self._copies.restored(state)
        if self._copy is not None:
            self._restore(self._copy)
