"""Learners that train together: with stacked parameters, one call computes a step for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgegossip.core.errors import TrainingError
from edgegossip.core.protocol import Train
from edgegossip.core.trainer import Outcome, TrainingResult
from edgegossip.learning.dense_stack import DenseStack
from edgegossip.learning.learner import Learner
from edgegossip.learning.loss import prepare_batch
from edgegossip.learning.optimizer import SGD
from edgegossip.learning.training_step import PLAIN_STEP, require_plain


class StackedLearner(Learner):
    r"""A `Learner` that trains with other learners whose requests have the same shape.

    With all parameters stacked as :math:`x`, of shape [num_learners, num_params], a step is

    .. math:: v \leftarrow \mu v + g(x) + \lambda x, \qquad x \leftarrow x - \eta v

    with the gradient :math:`g(x)` of each learner's own batch, momentum :math:`\mu`, weight
    decay :math:`\lambda`, and a learning rate :math:`\eta` for each learner: `SGD`, optionally
    with Nesterov's momentum. A few large kernels replace many small ones (`DenseStack`). The
    result differs from a `Learner`'s in the last bits, because PyTorch multiplies stacks of
    matrices with a different kernel. It does not depend on the other learners in a stack, as
    long as each learner's rows are aligned in memory: with a batch of 1, or odd numbers of
    samples and units, the last bits may depend on them.

    Args:
        optimizer: An `SGD`.
        arguments: Other arguments of `Learner`. The model must have no buffers or dropout,
            there must be no augmentation, and the selection must not use losses;
            `experiments.batching` checks this.
    """

    def __init__(self, *, optimizer: SGD, **arguments: Any) -> None:  # noqa: ANN401
        require_plain(arguments.get("step", PLAIN_STEP), "StackedLearner")
        super().__init__(optimizer=optimizer, **arguments)
        self._is_sharing = True
        self._sgd = optimizer

    def prepare(self, request: Train, progress: float) -> StackedWork:
        """Choose the samples of all steps; from then on other learners can join."""
        self._require_no_inputs(request)
        self.rest()
        return StackedWork(
            learner=self,
            params=request.params,
            samples=[self.shard[batch.positions] for batch in self._take(request)],
            lr=self._sgd.lr * request.rate_ratio * self._schedule.factor(progress),
            momentum=self._sgd.momentum if request.momentum is None else request.momentum,
        )

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        """Train alone, with the same result as in a stack; see `Learner.train`."""
        (outcome,) = self.prepare(request, progress).train_with([])
        if isinstance(outcome, TrainingError):
            raise outcome
        return outcome

    @property
    def kinship(self) -> int:
        """Equal for learners that can train together."""
        return id(self._copies)

    @property
    def velocity(self) -> Tensor | None:
        """SGD's momentum buffer, [num_params]; None before the first step."""
        kept = self._at_rest["optimizer"]
        return kept[0].get("momentum_buffer") if kept else None

    def train_together(
        self, work: Sequence[StackedWork]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Take all steps of this learner and of the learners that joined it.

        Returns:
            Losses, [num_steps, num_learners]; parameters and velocities after the last step,
            both [num_learners, num_params].
        """
        copy = self._copies.borrow()
        try:
            copy.model.module.train()
            stack = DenseStack(
                copy.model.module,
                self._loss,
                self._sgd,
                work[0].momentum,
                [each.params for each in work],
                [each.learner.velocity for each in work],
                [each.lr for each in work],
            )
            losses = [
                stack.step(*self._read(torch.cat(some)))
                for some in zip(*(each.samples for each in work), strict=True)
            ]
        finally:
            self._copies.give_back(copy)
        return torch.stack(losses), stack.params, [*stack.velocities()]

    def _read(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        x, y = prepare_batch(
            self._dataset, self._dataset.train.batch(samples), self._torch_device
        )
        return x, y

    def finish(
        self, losses: Tensor, num_samples: int, params: Tensor, velocity: Tensor | None
    ) -> TrainingResult:
        """Store the velocity after training, and return the result.

        Args:
            losses: Losses of all steps, [num_steps].
            num_samples: Number of samples in all batches.
            params: The new parameters, [num_params].
            velocity: SGD's momentum buffer; None if it has not changed.
        """
        if velocity is not None:
            self._at_rest = {**self._at_rest, "optimizer": [{"momentum_buffer": velocity}]}
        return self._summed_up(params, [*losses], num_samples)


@dataclass(frozen=True, kw_only=True, eq=False)
class StackedWork:
    """Work that a `StackedLearner` is about to carry out.

    Args:
        learner: The learner.
        params: Parameters to start from, [num_params].
        samples: Indices of the samples of each step.
        lr: Learning rate.
        momentum: SGD's momentum.
    """

    learner: StackedLearner
    params: Tensor
    samples: list[Tensor]
    lr: float
    momentum: float

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for work that can be done together."""
        return self.learner.kinship, self.momentum, *map(len, self.samples)

    def train_with(self, others: Sequence[StackedWork]) -> list[Outcome]:
        """Carry out this and other work of the same `key`; return all outcomes, this one's
        first.

        Failures are separate: an outcome is a `TrainingError` if its own losses are not finite.
        """
        work = [self, *others]
        losses, params, velocities = self.learner.train_together(work)
        num_samples = sum(map(len, self.samples))
        outcomes: list[Outcome] = []
        for number, each in enumerate(work):
            # Clones: otherwise each would keep the memory of all.
            own = params[number].cpu().clone()
            kept = velocities[number] if self.momentum else None
            try:
                result = each.learner.finish(losses[:, number], num_samples, own, kept)
            except TrainingError as error:
                outcomes.append(error)
            else:
                outcomes.append(result)
        return outcomes
