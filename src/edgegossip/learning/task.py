"""Tasks to learn: data, model, loss, optimizer, and the split of samples among workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgegossip.core.errors import unknown_name
from edgegossip.core.protocol import WORKER, Rank, Role
from edgegossip.core.randomness import derive_seed
from edgegossip.core.ranges import check_ranges
from edgegossip.core.trainer import Trainer
from edgegossip.learning.dataset import Dataset
from edgegossip.learning.evaluator import Evaluator
from edgegossip.learning.learner import Augmentation, Learner
from edgegossip.learning.loss import Loss
from edgegossip.learning.models.initialization import drawn_from
from edgegossip.learning.normalization import warn_of_running_statistics
from edgegossip.learning.optimizer import SGD, OptimizerFactory
from edgegossip.learning.partition import IID, Partition, is_skewed
from edgegossip.learning.parts import Join, Parts, in_sequence
from edgegossip.learning.sampling.accuracy_aware import PLAIN, AccuracyAware
from edgegossip.learning.schedule import Constant, Schedule

MakeModel: TypeAlias = Callable[[], nn.Module]
MakeTrainer: TypeAlias = Callable[..., Trainer]
"""Takes the keyword arguments of `Learner`."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A classification task to learn together.

    Args:
        dataset: Training and test samples, and validation samples for algorithms that evaluate.
        model: Makes the model; called once, other workers get copies. For an algorithm whose
            roles hold parts of one model: what makes each part, by the name of its role.
        join: Joins the parts to the whole model that is evaluated and saved; by default one
            behind the other, as they stand in `model`.
        trainer: Makes a worker's trainer from the arguments of `Learner`, by keyword: for all,
            or by role name, as parts of a model need.
        loss: ``loss(outputs, targets)``, the mean over a batch.
        optimizer: Makes each worker's optimizer from its parameters.
        schedule: How the optimizer's learning rate changes over the run.
        batch_size: Samples a step, at least 1.
        partition: Deals the training samples to the workers.
        accuracy_aware: Chooses the samples of an epoch, for `EdgeGossip`; by default any.
        augmentation: Changes training batches at random, e.g. `flip_and_crop`.
        has_buffers: Exchange and average normalisation buffers with the parameters.
        torch_device: Where models live: "cpu", "cuda".

    Raises:
        ValueError: If `batch_size` is below 1, there is no such device, or no model.
    """

    dataset: Dataset
    model: MakeModel | Mapping[str, MakeModel]
    join: Join = in_sequence
    trainer: MakeTrainer | Mapping[str, MakeTrainer] = Learner
    loss: Loss = F.cross_entropy
    optimizer: OptimizerFactory = SGD()
    schedule: Schedule = Constant()
    batch_size: int = 64
    partition: Partition = IID()
    accuracy_aware: AccuracyAware = PLAIN
    augmentation: Augmentation | None = None
    has_buffers: bool = True
    torch_device: str = "cpu"

    def __post_init__(self) -> None:
        check_ranges(self, batch_size="at least 1")
        if isinstance(self.model, Mapping) and not self.model:
            raise ValueError("model has no parts; name one for each role")
        try:
            torch.empty(0, device=self.torch_device)
        except (RuntimeError, AssertionError) as error:  # the latter: built without CUDA
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"torch_device {self.torch_device!r} cannot be used ({reason}); choose 'cpu'"
            ) from error

    @property
    def models(self) -> Mapping[str, MakeModel]:
        """Factory of each part, by role name; one model that is for all has the name ""."""
        return self.model if isinstance(self.model, Mapping) else {"": self.model}

    def part(self, role: str) -> str:
        """Say which of `models` the workers of a role hold.

        Raises:
            ValueError: If there is none for it.
        """
        if not isinstance(self.model, Mapping):
            return ""
        if role not in self.model:
            raise ValueError(unknown_name("role", role, self.model))
        return role


class Workload:
    """A task made ready for one run: shards dealt, initial parameters drawn.

    Args:
        task: Task to learn.
        ranks: The workers that have data, in order.
        seed: Seed of the run.
        role: Each worker's role, where they hold parts or slices of a model.

    Attributes:
        shards: The training samples of each rank, [n] indices.
    """

    def __init__(
        self,
        task: Task,
        ranks: Sequence[Rank],
        seed: int,
        role: Callable[[Rank], Role] = lambda rank: WORKER,
    ) -> None:
        self.task = task
        self._seed = seed
        self._role = role
        with drawn_from(derive_seed(seed, "model")):
            models = {part: make() for part, make in task.models.items()}
        self._parts = Parts(models, task.join, has_buffers=task.has_buffers)
        self._initial = {part: flat.params.clone() for part, flat in self._parts.models.items()}
        if len(ranks) > 1 and is_skewed(task.partition):
            warn_of_running_statistics(self._parts.whole, has_buffers=task.has_buffers)
        shards = task.partition(task.dataset, len(ranks), seed)
        self.shards: dict[Rank, Tensor] = dict(zip(ranks, shards, strict=True))

    def __getstate__(self) -> dict[str, object]:
        """What other processes need to train; evaluators stay here."""
        return {k: v for k, v in vars(self).items() if not isinstance(v, Evaluator)}

    def _part(self, rank: Rank) -> str:
        return self.task.part(self._role(rank).name)

    def initial_params(self, rank: Rank = 0) -> Tensor:
        """Give what worker `rank` starts from, [num_params] of its part."""
        return self._initial[self._part(rank)]

    def num_params(self, rank: Rank) -> int:
        """Say how long the estimate of worker `rank` is."""
        return self._role(rank).num_held(len(self.initial_params(rank)))

    def make_trainer(self, rank: Rank, incarnation: int = 0) -> Trainer:
        """Make the trainer of worker `rank`."""
        make = self.task.trainer
        if isinstance(make, Mapping):
            make = make.get(self._role(rank).name, Learner)
        return make(
            model=self._parts.models[self._part(rank)].module,
            loss=self.task.loss,
            optimizer=self.task.optimizer,
            dataset=self.task.dataset,
            shard=self.shards.get(rank, torch.empty(0, dtype=torch.int64)),
            batch_size=self.task.batch_size,
            schedule=self.task.schedule,
            seed=self._seed,
            rank=rank,
            incarnation=incarnation,
            accuracy_aware=self.task.accuracy_aware,
            shards=self.shards,
            augmentation=self.task.augmentation,
            has_buffers=self.task.has_buffers,
            torch_device=self.task.torch_device,
        )

    def is_whole(self, ranks: Iterable[Rank]) -> bool:
        """Say whether these workers hold all parts of a model, and all slices of them."""
        there: dict[str, set[int]] = {}
        wanted: dict[str, int] = dict.fromkeys(self.task.models, 1)
        for rank in ranks:
            part, role = self._part(rank), self._role(rank)
            there.setdefault(part, set()).add(role.slice_index)
            wanted[part] = role.num_slices
        return all(len(there.get(part, ())) == number for part, number in wanted.items())

    def average(self, estimates: Mapping[Rank, Tensor]) -> tuple[Tensor, float]:
        """Average what workers of one part have, and join the parts; see `Parts.average`."""
        by_part: dict[str, dict[int, list[Tensor]]] = {}
        for rank, estimate in estimates.items():
            slices = by_part.setdefault(self._part(rank), {})
            slices.setdefault(self._role(rank).slice_index, []).append(estimate)
        return self._parts.average({part: _stacked(each) for part, each in by_part.items()})

    def with_own(self, whole: Tensor, rank: Rank, estimate: Tensor) -> Tensor:
        """Give the vector `whole` with what worker `rank` has in place of its part.

        One with a slice has nothing else than the whole has: nobody shares its slice.
        """
        if self._role(rank).num_slices > 1:
            return whole
        return self._parts.replace(whole, self._part(rank), estimate)

    def evaluate(self, params: Tensor) -> tuple[float, float]:
        """Mean loss and accuracy of `params` on the test split: for reports, not algorithms."""
        return self._reporter.evaluate(params)

    def named_parameters(self, params: Tensor) -> dict[str, Tensor]:
        """Cut the vector `params` into the model's named tensors, as in its `state_dict`."""
        return self._reporter.named_parameters(params)

    @cached_property
    def validator(self) -> Evaluator | None:
        """Answers `Evaluate`, on the validation split; None if there is none."""
        return None if self.task.dataset.validation is None else self._evaluator("validation")

    @cached_property
    def _reporter(self) -> Evaluator:
        return self._evaluator("test")

    def _evaluator(self, split: Literal["test", "validation"]) -> Evaluator:
        return Evaluator(
            model=self._parts.whole,
            loss=self.task.loss,
            dataset=self.task.dataset,
            has_buffers=self.task.has_buffers,
            torch_device=self.task.torch_device,
            split=split,
        )


def _stacked(slices: Mapping[int, Sequence[Tensor]]) -> Tensor:
    """Stack estimates, [num_workers, num_params]; of slices, one row of their means, joined."""
    if len(slices) == 1:
        return torch.stack([*slices[0]])
    return torch.cat([torch.stack([*slices[i]]).mean(0) for i in sorted(slices)])[None]
