"""Tasks: data, model, loss, metrics, optimizer, and the partition of samples among workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgegossip.contract.errors import DataError, unknown_name
from edgegossip.contract.metrics import MetricSpec
from edgegossip.contract.protocol import WORKER, Rank, Role
from edgegossip.contract.randomness import derive_seed
from edgegossip.contract.ranges import check_counts, check_ranges, check_type
from edgegossip.contract.trainer import Trainer
from edgegossip.data.dataset import Dataset, FlippedLabels, Split, WorkerData
from edgegossip.data.local import Local, LocalShards
from edgegossip.data.partition import IID, Partition, Shared, deal, is_skewed
from edgegossip.models.blocks import drawn_from
from edgegossip.models.flat import described, frozen_sample
from edgegossip.models.normalization import (
    trained_statistics,
    warn_of_other_buffers,
    warn_of_running_statistics,
)
from edgegossip.models.parts import Join, Parts, in_sequence
from edgegossip.training.copies import ModelCopies
from edgegossip.training.device import chosen_device
from edgegossip.training.evaluator import Evaluator, LocalReporter
from edgegossip.training.learner import Augmentation, Learner, LearnerSettings
from edgegossip.training.loss import Forward, Loss, forward_pair
from edgegossip.training.metrics import Accuracy, Metric, check_metrics
from edgegossip.training.optimizer import SGD, Constant, OptimizerFactory, Schedule
from edgegossip.training.sampling.accuracy_aware import PLAIN, AccuracyAware
from edgegossip.training.stacked.learner import StackedLearner
from edgegossip.training.step import PLAIN_STEP, TrainingStep

MakeModel: TypeAlias = Callable[[], nn.Module]
MakeTrainer: TypeAlias = Callable[..., Trainer]
"""Makes a trainer from the keyword arguments of `Learner`."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task for joint training; by default, a classification.

    A training step computes ``loss(*forward(model, batch))``. Evaluations compute `metrics`
    from the results of `forward`; reports, target values and speed-ups use one metric.

    Args:
        dataset: Training and test samples, and validation samples for algorithms that evaluate;
            or `Local`, if each worker reads its own data.
        model: Makes the model; called once per run, and each worker gets a copy. Dropout of
            `nn.Dropout`, `nn.Dropout1d` to `3d`, `nn.LSTM`, `nn.GRU`, `nn.RNN` and
            `nn.MultiheadAttention` (and so of `nn.TransformerEncoderLayer`) repeats; in other
            classes, such as `nn.AlphaDropout`, it must be 0. For an algorithm whose roles hold
            parts of a model: the makers of the parts, by role name.
        join: Joins the parts into the whole model for evaluation and saving; by default in
            sequence, in the order of `model`.
        trainer: Makes a worker's trainer from the keyword arguments of `Learner` except
            `copies`: one maker for all workers, or several by role name.
        loss: ``loss(outputs, targets)``, the mean over a batch. Evaluations average it over
            batches of 500, weighted by their numbers of samples. A mean over anything else,
            e.g. with class weights, is exact if the loss has a method ``num_terms(outputs,
            targets)`` that returns its divisor, e.g. the sum of the weights.
        metrics: Metrics that evaluations measure, with different names.
        target_metric: Name of the metric for target values, speed-ups and reports; None for
            the first.
        forward: ``forward(model, batch)``: outputs and targets, for `loss` and `metrics`. By
            default, a batch is a pair (x, y), and the results are model(x) and y. With
            `model_and_batch`, the results are the model and the batch.
        optimizer: Makes each worker's optimizer from its parameters; each group of the
            optimizer has a learning rate ``lr``.
        schedule: Factor on the optimizer's learning rate over the run.
        batch_size: Samples per step, at least 1.
        step: Mixed precision, gradient accumulation, clipping and compilation of each step.
        partition: Divides the training samples among the workers; unused for `Local` data.
        accuracy_aware: Choice of the samples of an epoch, for `EdgeGossip`; random by default.
        augmentation: Random changes to x of training batches (x, y), e.g. `flip_and_crop`, or
            to entire batches of other kinds.
        has_buffers: Exchange and average floating-point buffers, such as running statistics,
            with the parameters; see `FlatModel`. Otherwise they stay with each worker, and
            running statistics are measured again on 2000 to 4000 training samples before each
            evaluation.
        torch_device: Device of the models: "cpu", "cuda", "cuda:1" or "mps"; "auto" becomes the
            first of cuda, mps and cpu that this machine has.

    Raises:
        ValueError: If an argument has the wrong type, such as a model instead of a function
            that makes it; if `batch_size` is not a whole number of at least 1, the device
            cannot be used or ignores the step's `autocast`, there is no model or metric, names
            of metrics are equal or reserved, `target_metric` is unknown, a metric does not fit
            the data, or `Local` data has a partition.
        DataError: If the data has no test split or cannot be used with `accuracy_aware`.
    """

    dataset: Dataset
    model: MakeModel | Mapping[str, MakeModel]
    join: Join = in_sequence
    trainer: MakeTrainer | Mapping[str, MakeTrainer] = Learner
    loss: Loss = F.cross_entropy
    metrics: tuple[Metric, ...] = (Accuracy(),)
    target_metric: str | None = None
    forward: Forward = forward_pair
    optimizer: OptimizerFactory = SGD()
    schedule: Schedule = Constant()
    batch_size: int = 64
    step: TrainingStep = PLAIN_STEP
    partition: Partition = IID()
    accuracy_aware: AccuracyAware = PLAIN
    augmentation: Augmentation | None = None
    has_buffers: bool = True
    torch_device: str = "cpu"

    def __post_init__(self) -> None:
        check_counts(self, "batch_size")
        check_ranges(self, batch_size="at least 1")
        self._check_types()
        check_metrics(self.metrics, self.target_metric, self.dataset)
        self._check_data()
        # Resolved here, so that experiment.json names the device that "auto" became.
        object.__setattr__(self, "torch_device", chosen_device(self.torch_device))
        self.step.require_device(torch.device(self.torch_device))

    def _check_types(self) -> None:
        if not self.models:
            raise ValueError("model has no parts; name one for each role")
        for make in self.models.values():
            if isinstance(make, nn.Module) or not callable(make):
                raise ValueError(
                    "model must be a function that makes the model, got an instance of "
                    f"{type(make).__name__}; give e.g. model=lambda: MyModel()"
                )
        if not callable(self.optimizer):
            raise ValueError(
                "optimizer must be a function that makes the optimizer, got an instance of "
                f"{type(self.optimizer).__name__}; give e.g. optimizer=lambda params: "
                "torch.optim.Adam(params)"
            )
        check_type("dataset", self.dataset, Dataset, "from_torch('mine', train, test)")
        check_type("schedule", self.schedule, Schedule, "Cosine()")
        aware = "AccuracyAware(selection=Focused())"
        check_type("accuracy_aware", self.accuracy_aware, AccuracyAware, aware)

    def _check_data(self) -> None:
        if not isinstance(self.dataset, Local):
            self.accuracy_aware.require_averageable(self.dataset.training)
            if not len(self.dataset.test):
                raise DataError(
                    f"{self.dataset.name!r} has no test split, on which reports measure; only "
                    "a worker's own data (Local) needs none"
                )
        elif self.partition != IID():
            raise ValueError(
                f"partition is {self.partition!r}, but Local data stays with its workers and "
                "is not divided; leave out partition"
            )

    @property
    def chosen_first(self) -> tuple[Metric, ...]:
        """The metrics, with the target metric first."""
        chosen = self.target_metric
        return tuple(
            sorted(self.metrics, key=lambda m: chosen is not None and m.name != chosen)
        )

    @property
    def specs(self) -> list[MetricSpec]:
        """Names, units and directions of the metrics, with the target metric first."""
        return [metric.spec for metric in self.chosen_first]

    @property
    def metric(self) -> MetricSpec:
        """Name, unit and direction of the target metric."""
        return self.chosen_first[0].spec

    def learner_settings(self, model: nn.Module) -> LearnerSettings:
        """The settings of the learners that train `model`."""
        return LearnerSettings(
            model=model,
            loss=self.loss,
            optimizer=self.optimizer,
            batch_size=self.batch_size,
            schedule=self.schedule,
            accuracy_aware=self.accuracy_aware,
            augmentation=self.augmentation,
            has_buffers=self.has_buffers,
            torch_device=self.torch_device,
            forward=self.forward,
            step=self.step,
        )

    @property
    def models(self) -> Mapping[str, MakeModel]:
        """Factory of each part, by role name; a factory for all roles has the key ""."""
        return self.model if isinstance(self.model, Mapping) else {"": self.model}

    def part(self, role: str) -> str:
        """Return the key in `models` for the workers of a role.

        Raises:
            ValueError: If the role has no part.
        """
        if not isinstance(self.model, Mapping):
            return ""
        if role not in self.model:
            raise ValueError(unknown_name("role", role, self.model))
        return role


class Workload:
    """A task prepared for one run, with shards and initial parameters.

    Args:
        task: Task to learn.
        ranks: The workers that have data, in order.
        seed: Seed of the run.
        role: Each worker's role, if workers hold parts or slices of a model.
        reads: The workers whose `Local` data this process may read; None for all of them.
        flipped: Workers that train on false labels, which need classes.

    Raises:
        ValueError: If running statistics would be measured again, but the data is `Local`; if
            labels are to be flipped in data without classes; or if the partition's shards do
            not fit the workers or the samples.
    """

    def __init__(
        self,
        task: Task,
        ranks: Sequence[Rank],
        seed: int,
        role: Callable[[Rank], Role] = lambda rank: WORKER,
        reads: Container[Rank] | None = None,
        flipped: Collection[Rank] = (),
    ) -> None:
        self.task = task
        self._flipped = flipped
        if flipped and (isinstance(task.dataset, Local) or not task.dataset.num_classes):
            raise ValueError(
                f"labels are to be flipped, but {task.dataset.name!r} is Local data or "
                "has no classes; leave out FlipLabels"
            )
        self._ranks = tuple(ranks)
        self._seed = seed
        self._role = role
        # A stream of its own, so that weights do not depend on what was drawn before.
        with drawn_from(derive_seed(seed, "model")):
            models = {part: make() for part, make in task.models.items()}
        self._parts = Parts(models, task.join, has_buffers=task.has_buffers)
        self._initial = {part: flat.params.clone() for part, flat in self._parts.models.items()}
        is_local = isinstance(task.dataset, Local)
        if len(ranks) > 1 and (is_local or is_skewed(task.partition)):
            warn_of_running_statistics(self._parts.whole, has_buffers=task.has_buffers)
        if len(ranks) > 1:
            for flat in self._parts.models.values():
                warn_of_other_buffers(flat.module, flat.moved_buffers)
        self._settings = {
            part: task.learner_settings(flat.module)
            for part, flat in self._parts.models.items()
        }
        self._lent: dict[str, ModelCopies] = {}
        self._validators: dict[Rank, Evaluator] = {}
        self._shards: LocalShards | dict[Rank, Tensor]
        if not isinstance(task.dataset, Local):
            self._shards = deal(task.dataset, ranks, task.partition, seed)
            return
        if not task.has_buffers and trained_statistics(self._parts.whole):
            raise ValueError(
                "has_buffers is False, so an averaged model's normalization layers would need "
                "training samples, and Local data is not here; use has_buffers=True"
            )
        self._shards = LocalShards(task.dataset, ranks, reads)

    @property
    def shards(self) -> Mapping[Rank, Tensor]:
        """Indices [n] of each worker's training samples in its split, for workers with data."""
        return self._shards.indices if isinstance(self._shards, LocalShards) else self._shards

    @property
    def num_train(self) -> int:
        """Total number of training samples of all workers."""
        if isinstance(self._shards, LocalShards):
            return self._shards.num_samples
        return len(self.task.dataset.train)

    def __getstate__(self) -> dict[str, object]:
        """State that other processes need to train; evaluators stay here."""
        reports = Evaluator | LocalReporter
        kept = {k: v for k, v in vars(self).items() if not isinstance(v, reports)}
        return {**kept, "_lent": {}, "_validators": {}}

    def _part(self, rank: Rank) -> str:
        return self.task.part(self._role(rank).name)

    def initial_params(self, rank: Rank = 0) -> Tensor:
        """Initial parameters of worker `rank`, [num_params] of its part."""
        return self._initial[self._part(rank)]

    def frozen_sample(self, rank: Rank = 0) -> Tensor | None:
        """Some values of the frozen parameters of worker `rank`; see `flat.frozen_sample`."""
        return frozen_sample(self._parts.models[self._part(rank)].module)

    def described_tensors(self, rank: Rank) -> list[str]:
        """The tensors that worker `rank` exchanges; see `flat.described`."""
        return described(
            self._parts.models[self._part(rank)].module, has_buffers=self.task.has_buffers
        )

    def num_params(self, rank: Rank) -> int:
        """Length of the estimate of worker `rank`."""
        return self._role(rank).num_held(len(self.initial_params(rank)))

    def make_trainer(
        self, rank: Rank, incarnation: int = 0, make: MakeTrainer | None = None
    ) -> Trainer:
        """Make the trainer of worker `rank`, by default with the task's own maker."""
        make = make or self.trainer_kind(rank)
        part = self._part(rank)
        # A custom trainer may rely on keeping the same model throughout.
        is_sharing = make in (Learner, StackedLearner)
        return make(
            settings=self._settings[part],
            data=self._worker_data(rank),
            seed=self._seed,
            rank=rank,
            incarnation=incarnation,
            **({"copies": self._copies(part)} if is_sharing else {}),
        )

    def trainer_kind(self, rank: Rank) -> MakeTrainer:
        """The task's maker of the trainer of worker `rank`."""
        make = self.task.trainer
        return make.get(self._role(rank).name, Learner) if isinstance(make, Mapping) else make

    def _worker_data(self, rank: Rank) -> WorkerData:
        if isinstance(self._shards, LocalShards):
            return self._shards.worker_data(rank)
        partition = self.task.partition
        data = self.task.dataset.training  # no trainer gets the test split
        if rank in self._flipped:
            data = replace(data, train=FlippedLabels(data.train, data.num_classes))
        return WorkerData(
            dataset=data,
            shard=self._shards.get(rank, torch.empty(0, dtype=torch.int64)),
            shards=self._shards,
            unit_size=partition.units if isinstance(partition, Shared) else 0,
        )

    def _copies(self, part: str) -> ModelCopies:
        if part not in self._lent:
            self._lent[part] = self._settings[part].copies()
        return self._lent[part]

    def is_whole(self, ranks: Iterable[Rank]) -> bool:
        """Whether these workers together hold all parts and slices of a model."""
        there: dict[str, set[int]] = {}
        wanted: dict[str, int] = dict.fromkeys(self.task.models, 1)
        for rank in ranks:
            part, role = self._part(rank), self._role(rank)
            there.setdefault(part, set()).add(role.slice_index)
            wanted[part] = role.num_slices
        return all(len(there.get(part, ())) == number for part, number in wanted.items())

    def average(self, estimates: Mapping[Rank, Tensor]) -> tuple[Tensor, float]:
        """Average the estimates of each part, and join the parts; see `Parts.average`."""
        by_part: dict[str, dict[int, list[Tensor]]] = {}
        for rank, estimate in estimates.items():
            slices = by_part.setdefault(self._part(rank), {})
            slices.setdefault(self._role(rank).slice_index, []).append(estimate)
        return self._parts.average({part: _stacked(each) for part, each in by_part.items()})

    def with_own(self, whole: Tensor, rank: Rank, estimate: Tensor) -> Tensor:
        """Return the vector `whole` with the estimate of worker `rank` as its part.

        If the worker holds a slice, `whole` already has its entries, because no other worker
        shares the slice.
        """
        if self._role(rank).num_slices > 1:
            return whole
        return self._parts.replace(whole, self._part(rank), estimate)

    def evaluate(self, params: Tensor) -> tuple[float, dict[str, float]]:
        """Mean loss and metrics of `params` on the test split; for reports, not algorithms.

        `Local` data has no test split, so the validation samples of all workers are used. The
        target metric comes first.
        """
        return self._reporter.evaluate(params)

    def validate(self, params: Tensor) -> tuple[float, dict[str, float]]:
        """Mean loss and metrics of `params` on the validation split.

        For `Local` data, which has no test split, these are the numbers of `evaluate`.
        """
        if isinstance(self.task.dataset, Local):
            return self.evaluate(params)
        return self._validator.evaluate(params)

    def initial_loss(self, samples: Split) -> float:
        """Mean loss of the initial parameters on some samples."""
        whole, _ = self._parts.average({part: x[None] for part, x in self._initial.items()})
        measured = replace(self.task.dataset, test=samples)
        return self._evaluator("test", measured).measure(whole).loss

    def named_parameters(self, params: Tensor) -> dict[str, Tensor]:
        """Cut the vector `params` into the model's named tensors, as in its `state_dict`."""
        return self._reporter.named_parameters(params)

    def validator(self, rank: Rank) -> Evaluator | None:
        """The evaluator for a worker's `Evaluate`; None without a validation split."""
        if isinstance(self._shards, LocalShards):
            has_split = rank in self._ranks or self._role(rank).evaluates
            return self._own_validator(rank) if has_split else None
        return None if self.task.dataset.validation is None else self._validator

    def _own_validator(self, rank: Rank) -> Evaluator:
        assert isinstance(self._shards, LocalShards)
        if rank not in self._validators:
            own = self._shards.validation(rank)
            self._validators[rank] = self._evaluator("validation", own)
        return self._validators[rank]

    @cached_property
    def _validator(self) -> Evaluator:
        return self._evaluator("validation", self.task.dataset)

    @cached_property
    def _reporter(self) -> Evaluator | LocalReporter:
        if not isinstance(self.task.dataset, Local):
            return self._evaluator("test", self.task.dataset)
        return LocalReporter(
            self._parts.whole,
            self._own_validator,
            self._ranks,
            self.task.chosen_first,
            has_buffers=self.task.has_buffers,
        )

    def _evaluator(self, split: Literal["test", "validation"], dataset: Dataset) -> Evaluator:
        return Evaluator(
            model=self._parts.whole,
            loss=self.task.loss,
            metrics=self.task.chosen_first,
            forward=self.task.forward,
            dataset=dataset,
            has_buffers=self.task.has_buffers,
            torch_device=self.task.torch_device,
            split=split,
        )


def _stacked(slices: Mapping[int, Sequence[Tensor]]) -> Tensor:
    """Stack estimates, [num_workers, num_params]; slices become one row of joined means."""
    if len(slices) == 1:
        return torch.stack([*slices[0]])
    return torch.cat([torch.stack([*slices[i]]).mean(0) for i in sorted(slices)])[None]
