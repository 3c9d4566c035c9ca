"""What is learnt: data, model, loss, optimizer, and who gets which samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgegossip.core.protocol import Rank
from edgegossip.core.randomness import derive_seed
from edgegossip.learning.dataset import Dataset
from edgegossip.learning.evaluator import Evaluator
from edgegossip.learning.flat import FlatModel
from edgegossip.learning.learner import Augmentation, Learner
from edgegossip.learning.loss import Loss
from edgegossip.learning.normalization import warn_of_running_statistics
from edgegossip.learning.optimizer import SGD, OptimizerFactory
from edgegossip.learning.partition import IID, Partition, is_skewed
from edgegossip.learning.sampling.accuracy_aware import PLAIN, AccuracyAware
from edgegossip.learning.schedule import Constant, Schedule

_GLOBAL_GENERATOR = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Task:
    """A classification task to learn together.

    Args:
        dataset: Training and test samples, and validation samples for algorithms that evaluate.
        model: Makes the model; called once, other workers get copies.
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
        ValueError: If `batch_size` is below 1, or there is no such device.
    """

    dataset: Dataset
    model: Callable[[], nn.Module]
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
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        try:
            torch.empty(0, device=self.torch_device)
        except (RuntimeError, AssertionError) as error:  # the latter: built without CUDA
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"torch_device {self.torch_device!r} cannot be used ({reason}); choose 'cpu'"
            ) from error


class Workload:
    """A task made ready for one run: shards dealt, initial parameters drawn.

    Args:
        task: What is learnt.
        ranks: The workers that have data, in order.
        seed: Of the run.

    Attributes:
        initial_params: [num_params] what every worker starts from.
        shards: The training samples of each rank, [n] indices.
    """

    def __init__(self, task: Task, ranks: Sequence[Rank], seed: int) -> None:
        self.task = task
        self._seed = seed
        # Initialisers draw from the global generator; it is put back afterwards. Workers may be
        # threads of one process.
        with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "model"))
            model = task.model()
        if len(ranks) > 1 and is_skewed(task.partition):
            warn_of_running_statistics(model, has_buffers=task.has_buffers)
        self._flat = FlatModel(model, has_buffers=task.has_buffers)
        self.initial_params: Tensor = self._flat.params.clone()
        shards = task.partition(task.dataset, len(ranks), seed)
        self.shards: dict[Rank, Tensor] = dict(zip(ranks, shards, strict=True))

    def make_trainer(self, rank: Rank, incarnation: int = 0) -> Learner:
        """Make the learner of worker `rank`."""
        return Learner(
            model=self._flat.module,
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
            model=self._flat.module,
            loss=self.task.loss,
            dataset=self.task.dataset,
            has_buffers=self.task.has_buffers,
            torch_device=self.task.torch_device,
            split=split,
        )
