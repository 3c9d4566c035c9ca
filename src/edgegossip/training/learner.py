"""One worker's training: a model, an optimizer and a shard of the data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from edgegossip.contract.errors import LocalProtocolError, TrainingError
from edgegossip.contract.protocol import Layout, Rank, Train
from edgegossip.contract.randomness import generator
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.data.dataset import WorkerData
from edgegossip.data.nested import Nested
from edgegossip.models.flat import FlatModel
from edgegossip.models.flops import training_flops
from edgegossip.models.normalization import reset_lost_statistics
from edgegossip.training.copies import ModelCopies, ModelCopy, OptimizerState
from edgegossip.training.feed import Feed
from edgegossip.training.graphs import StepGraphs
from edgegossip.training.loss import Forward, Loss, forward_pair, mean_of_finite, prepare_batch
from edgegossip.training.moments import moments_of, with_moments
from edgegossip.training.optimizer import Constant, OptimizerFactory, Schedule
from edgegossip.training.sampling.accuracy_aware import PLAIN, AccuracyAware, PointLosses
from edgegossip.training.sampling.batches import BatchStream, UnitTable
from edgegossip.training.sampling.cancellation import cancellable
from edgegossip.training.sampling.sampler import Batch
from edgegossip.training.step import PLAIN_STEP, Step, TrainingStep

Augmentation: TypeAlias = Callable[[Nested, torch.Generator], Nested]
"""Randomly changes the raw x of a batch (x, y), or an entire batch of another kind; draws only
from the generator."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnerSettings:
    """How workers train a model; equal for all workers that hold the same part of it.

    Args:
        model: Model to train; the learner copies it. Training may change only parameters and
            buffers.
        loss: Loss of outputs and targets.
        optimizer: Makes the optimizer.
        batch_size: Samples per step.
        schedule: Factor on the learning rate, as a function of progress.
        accuracy_aware: Choice of the samples of each pass.
        augmentation: Applied to each training batch; None for none.
        has_buffers: Exchange normalization buffers too; see `FlatModel`.
        torch_device: Device for the computation.
        forward: Maps model and batch to outputs and targets; see `Task`.
        step: Precision, accumulation, clipping and compilation of each step.
    """

    model: nn.Module
    loss: Loss
    optimizer: OptimizerFactory
    batch_size: int
    schedule: Schedule = Constant()
    accuracy_aware: AccuracyAware = PLAIN
    augmentation: Augmentation | None = None
    has_buffers: bool = True
    torch_device: torch.device | str = "cpu"
    forward: Forward = forward_pair
    step: TrainingStep = PLAIN_STEP

    def copies(self) -> ModelCopies:
        """Make copies of the model, which several learners may share."""
        return ModelCopies(
            self.model,
            self.optimizer,
            has_buffers=self.has_buffers,
            torch_device=self.torch_device,
            cuda_graph=self.step.cuda_graph,
        )


class Learner(Trainer):
    """Trains a model on one shard; a `contract.Trainer` for PyTorch.

    All random numbers (order of the batches, dropout, augmentation) come from streams keyed by
    (seed, rank, incarnation). Runs therefore repeat bit for bit even if learners train in
    parallel threads.

    Args:
        settings: What all workers with the same part of a model have in common.
        data: The worker's training data.
        seed: Seed of the run.
        rank: Rank of the learner's worker.
        incarnation: Number of times that this worker has rejoined.
        copies: Copies of the model that several learners share, from `LearnerSettings.copies`;
            by default, the learner makes its own.

    Raises:
        ValueError: If the optimizer updates tensors that it was not given, or a group of it has
            no learning rate ``lr``.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        data: WorkerData,
        *,
        seed: int = 0,
        rank: Rank = 0,
        incarnation: int = 0,
        copies: ModelCopies | None = None,
    ) -> None:
        self.settings = settings
        self.rank = rank
        self._key = key = (seed, rank, incarnation)
        self._dataset = data.dataset
        self._shards = data.shards
        # Of shared data, each worker aggregates an equal part, as it does without sharing.
        self._part: Tensor | None = None
        self._units: UnitTable | None = None
        if data.unit_size:
            self._units = UnitTable(len(data.shard), data.unit_size, seed)
            order = torch.randperm(len(data.shard), generator=generator(seed, "aggregated"))
            self._part = (
                order[sorted(data.shards).index(rank) :: len(data.shards)].sort().values
            )
        is_augmented = settings.augmentation is not None
        self._random = generator(*key, "augmentation") if is_augmented else None
        self._is_sharing = copies is not None and copies.can_be_lent
        self._copies = copies or settings.copies()
        self._copy: ModelCopy | None = None
        self._at_rest: dict[str, Any] = {
            "optimizer": None,
            "dropout": None,
            "buffers": self._copies.initial_buffers,
        }
        self._torch_device = torch.device(settings.torch_device)
        self._step = Step(settings.step, settings.loss, settings.forward, self._torch_device)
        self._num_steps = 0
        self._is_cancelled = False
        self._assigned: tuple[Rank, ...] | None = None
        self._num_assigned = 0
        self._take_shard(data.shard)
        # Now, because a learner is made before the run begins.
        settings.accuracy_aware.import_libraries()

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
            # Before the copy is given back: another thread may borrow it at once.
            self._at_rest = self._rest_state()
            self._copies.give_back(self._copy)
            self._copy = None

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
        drawn = kept["dropout"]
        if drawn is not None and len(drawn) == len(copy.dropout.get_state()):
            copy.dropout.set_state(drawn)
        elif drawn is not None:
            # Of another kind of device, whose streams cannot go on here: begin one of its own.
            seed = generator(*self._key, "dropout", self._num_steps).initial_seed()
            copy.dropout.manual_seed(seed)
        elif self._copies.has_dropout:
            # Before its first step: not the draws of the learner that had the copy before.
            copy.dropout.manual_seed(self._dropout_seed)

    @property
    def _dropout_seed(self) -> int:
        return generator(*self._key, "dropout").initial_seed()

    @property
    def num_samples(self) -> int:
        """Number of samples in the shard."""
        return len(self.shard)

    @property
    def num_units(self) -> int:
        """Number of units in an epoch of shared data; 0 without."""
        return 0 if self._units is None else len(self._units)

    @property
    def epoch_cost(self) -> float:
        """Cost of a pass over the shard and of the probe before it, in samples."""
        labels = self._dataset.train.labels
        aware = self.settings.accuracy_aware
        return aware.epoch_cost(labels[self.shard], labels[self._aggregated_samples])

    @property
    def _aggregated_samples(self) -> Tensor:
        """Indices of the samples that are aggregated, if the selection needs it."""
        return self.shard if self._part is None else self.shard[self._part]

    @property
    def setup_cost(self) -> float:
        """Cost of aggregating the shard, in training samples."""
        accuracy_aware = self.settings.accuracy_aware
        if not accuracy_aware.selection.needs_losses:
            return 0.0
        sample = self._dataset.train.batch(self.shard[:1])
        x, _ = prepare_batch(self._dataset, sample, self._torch_device)
        num_flops = accuracy_aware.aggregator.num_flops(
            len(self._aggregated_samples),
            self._dataset.input_shape,
            max(1, self._dataset.num_classes),
        )
        copy = self._copies.borrow()  # not `model`: that would load this learner's state
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
        # Sorted, so that batches do not depend on the order in which workers were lost.
        self._take_shard(torch.cat([self._shards[rank] for rank in sorted(set(ranks))]))

    def _take_shard(self, shard: Tensor) -> None:
        self.shard = shard
        augment = None
        if self.settings.augmentation is not None:
            # Not a method: a learner that refers to itself waits for the garbage collector.
            augment = partial(_augmented, self.settings.augmentation, self._random)
        self._feed = Feed(self._dataset, shard, self._torch_device, augment)
        self._batches: BatchStream | None = None
        self._point_losses: PointLosses | None = None
        self._kept_batches: dict[str, Any] | None = None  # of a checkpoint, until they are made

    @property
    def batches(self) -> BatchStream:
        """Stream of batches; made on first use, because aggregating takes time.

        Raises:
            LocalProtocolError: If the worker has no data.
        """
        if len(self.shard) == 0:
            raise LocalProtocolError(f"worker {self.rank} asked to Train, but it has no data")
        if self._batches is None:
            with cancellable(self._check_cancelled):
                batches = self._make_batches()
            if self._kept_batches is not None:
                batches.load_state_dict(self._kept_batches)
            self._batches = batches  # last, so that a cancelled learner keeps its checkpoint
        return self._batches

    def _make_batches(self) -> BatchStream:
        settings, aggregated = self.settings, None
        if settings.accuracy_aware.selection.needs_losses:
            samples = self._aggregated_samples
            aggregated, targets = settings.accuracy_aware.aggregate(self._dataset, samples)
            if self._part is not None:
                labels = self._dataset.train.labels[self.shard]
                aggregated = aggregated.extended(self._part, labels)
            self._point_losses = PointLosses(
                self._dataset,
                aggregated.x,
                targets,
                loss=settings.loss,
                forward=settings.forward,
                torch_device=self._torch_device,
            )
        # If a shard is assigned again, the order of its first passes is new.
        key = (*self._key, self._num_assigned) if self._num_assigned else self._key
        return settings.accuracy_aware.make_stream(
            aggregated,
            num_samples=self.num_samples,
            batch_size=settings.batch_size,
            key=key,
            units=self._units,
        )

    @property
    def layout(self) -> Layout:
        """Trained parameters first, then the exchanged buffers."""
        return Layout(self._copies.num_trained)

    def cost(self, request: Train) -> float:
        """Processed samples, plus a third of a sample for each probe of an aggregated point."""
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
        self._require_momentum(request)
        # Parameters first: `model` may borrow a copy, which comes with another worker's.
        self.model.load(request.params)
        self.model.module.train()
        self._tune(request, progress)
        self._replace_moments(request)
        num_samples = 0
        losses = []
        before = torch.get_rng_state()
        for batch in self.take(request):
            # Between steps, so that the optimizer's state fits the parameters.
            self._check_cancelled()
            losses.append(self._step_on(batch))
            num_samples += len(batch)
        if not torch.equal(before, torch.get_rng_state()):
            warnings.warn(
                "training draws from PyTorch's global generator, so this run may not repeat to "
                "the last bit; use nn.Dropout modules instead of functions, and `augmentation` "
                "instead of random transforms",
                stacklevel=2,
            )
        # A copy, because the next request overwrites the model.
        params = self.model.params.to("cpu", copy=True)
        return self._summed_up(request, params, losses, num_samples)

    def _require_no_inputs(self, request: Train) -> None:
        if request.inputs:
            raise LocalProtocolError(
                f"worker {self.rank} was given {sorted(request.inputs)} to train on, but a "
                "Learner draws its own batches; give the role a trainer that takes inputs"
            )

    def _summed_up(
        self, request: Train, params: Tensor, losses: list[Tensor], num_samples: int
    ) -> TrainingResult:
        loss = self._mean_loss(losses)
        self._num_steps += len(losses)
        result = TrainingResult(params, num_samples, len(losses), loss)
        result.metrics = {"focus": self.batches.focus}
        if request.moments is not None:
            result.moments = moments_of(self._memory, self._copies.betas)
        return result

    @property
    def _memory(self) -> OptimizerState | None:
        """The optimizer's state, without gaps."""
        kept = self._at_rest["optimizer"] if self._copy is None else self._copy.memory()
        return self._copies.portable(kept)

    def _replace_moments(self, request: Train) -> None:
        """Continue with the moments of `request`, if it has some."""
        if not request.moments or (memory := self._memory) is None:
            return
        replaced = with_moments(memory, request.moments, self._copies.betas)
        replaced = self._copies.on_device(replaced)
        if self._copy is None:
            self._at_rest = {**self._at_rest, "optimizer": replaced}
        else:
            self._copy.remember(replaced)

    def start_over(self) -> None:
        """Reset the optimizer's state, which may be non-finite after a non-finite loss.

        Non-finite running statistics of normalization layers are also reset.
        """
        self._at_work().start_over()
        reset_lost_statistics(self.model.module)

    def cancel(self) -> None:
        """Stop for good after the current step of training or aggregation."""
        self._is_cancelled = True

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise TrainingError(f"worker {self.rank} was told to stop")

    def take(self, request: Train) -> Iterator[Batch]:
        """Cut the requested work into batches, and probe aggregated points before each pass."""
        batches = self.batches
        batches.resize(request.batch_ratio)
        for part in batches.take(
            request.work, request.keep_ratio, begins_pass=request.begins_pass
        ):
            if isinstance(part, Batch):
                yield part
            else:
                assert self._point_losses is not None
                losses = self._point_losses(self._probed_model().module, part.points)
                batches.sampler.set_losses(losses, part.points)

    def _probed_model(self) -> FlatModel:
        """The model with its present parameters."""
        return self.model

    def _samples(self, batch: Batch) -> Nested:
        """Read a batch, augment it, and prepare it for the model."""
        return self._feed.prepare(self._feed.inputs(batch.positions, self._upcoming))

    def _upcoming(self, num_batches: int) -> list[Tensor]:
        """Positions of the batches that may be read ahead."""
        return self.batches.upcoming(num_batches)

    def _step_on(self, batch: Batch) -> Tensor:
        sampler, copy = self.batches.sampler, self._at_work()
        needs_losses = sampler.selection.needs_sample_losses
        if copy.graphs is not None and not needs_losses and self._is_usual(batch):
            return self._repeat(copy.graphs, copy, batch)
        samples = self._samples(batch)
        loss, losses = self._step.take(copy, batch, samples, needs_losses=needs_losses)
        if losses is not None:
            sampler.record(batch.positions, losses)
        return loss

    def _is_usual(self, batch: Batch) -> bool:
        # Smaller batches at the end of a pass are rare, and the weights of others change.
        return len(batch) == self.batches.sampler.batch_size and batch.weights is None

    def _repeat(self, graphs: StepGraphs, copy: ModelCopy, batch: Batch) -> Tensor:
        """Take a step with a graph that includes the preparation of the samples."""

        def step(inputs: Nested) -> Tensor:
            samples = self._feed.prepare(inputs)
            return self._step.take(copy, batch, samples, needs_losses=False)[0]

        inputs = self._feed.inputs(batch.positions, self._upcoming)
        return graphs.take((self.settings, *self._feed.key), inputs, step)

    def _tune(self, request: Train, progress: float) -> None:
        """Set the learning rate and momentum for this request only."""
        factor = request.rate_ratio * self.settings.schedule.factor(progress)
        for group, (rate, momentum) in zip(
            self._optimizer.param_groups, self._copies.settings, strict=True
        ):
            group["lr"] = factor * rate
            if momentum is not None:
                group["momentum"] = momentum if request.momentum is None else request.momentum

    def _require_momentum(self, request: Train) -> None:
        if request.momentum is not None and any(m is None for _, m in self._copies.settings):
            raise LocalProtocolError(
                f"worker {self.rank} was asked for momentum {request.momentum:g}, but "
                f"{self._copies.optimizer_name} has no such setting; use SGD, or leave the "
                "algorithm's momentum at None"
            )

    def _mean_loss(self, losses: list[Tensor]) -> float:
        return mean_of_finite(losses, self.rank, self._num_steps)

    def state_dict(self) -> Mapping[str, Any]:
        batches = self._kept_batches if self._batches is None else self._batches.state_dict()
        own = self._rest_state()
        return {
            "assigned": self._assigned,
            "num_assigned": self._num_assigned,
            "batches": batches,
            "augmentation": None if self._random is None else self._random.get_state(),
            "num_steps": self._num_steps,
            **own,
            "optimizer": self._copies.portable(own["optimizer"]),
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


def _augmented(
    augmentation: Augmentation, random: torch.Generator | None, samples: Nested
) -> Nested:
    assert random is not None
    match samples:
        case (Tensor() as x, y):
            return augmentation(x, random), y
    return augmentation(samples, random)
