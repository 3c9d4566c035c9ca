"""Settings of a training step: precision, accumulation, clipping, compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edgegossip.contract.ranges import check_counts, check_ranges
from edgegossip.data.nested import Nested, map_leaves
from edgegossip.models.flat import FlatModel
from edgegossip.training.loss import Loss
from edgegossip.training.sampling.sampler import Batch

MeanLoss = Callable[[Batch, Nested], tuple[Tensor, int]]
"""Maps a batch and its samples to the mean loss and the number of terms of that mean."""


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """Settings of each optimizer step of a `Learner`; the default is one plain pass.

    Args:
        autocast: `torch.bfloat16` computes losses in mixed precision. Parameters, gradients and
            messages stay as they are, and evaluations keep full precision.
        micro_batch_size: Maximum samples for one forward and backward pass. A larger
            batch's gradients are accumulated into the gradient of its mean loss, so memory need
            only suffice for a micro-batch. Layers such as batch norm see only micro-batches.
        max_grad_norm: Maximum norm of the entire gradient; larger gradients are scaled down.
        compile: Run the model through `torch.compile`. On a CPU, PyTorch needs a C++ compiler.

    Raises:
        ValueError: If a number is out of range, or `autocast` is not `torch.bfloat16` or None.

    >>> TrainingStep(micro_batch_size=16, max_grad_norm=1.0).micro_batch_size
    16
    """

    autocast: torch.dtype | None = None
    micro_batch_size: int | None = None
    max_grad_norm: float | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        if self.autocast not in (None, torch.bfloat16):
            raise ValueError(
                f"autocast must be torch.bfloat16 or None, got {self.autocast}; float16 would "
                "need its gradients scaled"
            )
        check_counts(self, "micro_batch_size")
        check_ranges(
            self, micro_batch_size="at least 1 or None", max_grad_norm="above 0 or None"
        )

    def precision(self, torch_device: torch.device) -> AbstractContextManager[object]:
        """The context for forward passes."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(torch_device.type, self.autocast)

    def gradients(
        self, model: FlatModel, batch: Batch, samples: Nested, mean_loss: MeanLoss
    ) -> Tensor:
        """Compute the gradient of a batch's mean loss, and return that loss.

        Args:
            model: Model that stores the gradient.
            batch: The batch.
            samples: Its samples.
            mean_loss: Loss to differentiate, of the batch or a part of it.
        """
        model.zero_grad()
        assert model.trained.grad is not None
        if self.micro_batch_size is None or len(batch) <= self.micro_batch_size:
            loss, _ = mean_loss(batch, samples)
            loss.backward()  # type: ignore[no-untyped-call]
            loss = loss.detach()
        else:
            loss = self._accumulated(model.trained.grad, batch, samples, mean_loss)
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_([model.trained], self.max_grad_norm)
        return loss

    def num_terms(self, batch: Batch, loss: Loss, outputs: Any, targets: Any) -> int:  # noqa: ANN401
        """Number of terms of a batch's mean loss: samples, or the loss's own count."""
        count = getattr(loss, "num_terms", None)
        if self.micro_batch_size is None or count is None or batch.weights is not None:
            return len(batch)  # counting tokens would take time for nothing
        return int(count(outputs, targets))

    def _accumulated(
        self, gradient: Tensor, batch: Batch, samples: Nested, mean_loss: MeanLoss
    ) -> Tensor:
        # The number of counted tokens is known after the last forward pass, but memory holds
        # only one piece: weight pieces by their numbers, and divide by the sum afterwards.
        total, num_terms = gradient.new_zeros(()), 0
        for piece, some in self._pieces(batch, samples):
            loss, number = mean_loss(piece, some)
            if number:  # the mean of no terms is not a number
                (loss * number).backward()  # type: ignore[no-untyped-call]
                total += loss.detach() * number
                num_terms += number
        gradient /= num_terms
        return total / num_terms

    def _pieces(self, batch: Batch, samples: Nested) -> Iterator[tuple[Batch, Nested]]:
        assert self.micro_batch_size is not None
        for start in range(0, len(batch), self.micro_batch_size):
            part = slice(start, start + self.micro_batch_size)
            weights = None if batch.weights is None else batch.weights[part]
            some = map_leaves(lambda leaf, part=part: leaf[part], samples)  # type: ignore[misc]
            yield Batch(batch.positions[part], weights), some


PLAIN_STEP = TrainingStep()


def require_plain(step: TrainingStep, who: str) -> None:
    """Reject all settings but the default for a trainer that computes its steps itself.

    Raises:
        ValueError: If `step` is not the default.
    """
    if step != PLAIN_STEP:
        raise ValueError(
            f"{who} computes its steps itself, and does not support {step}; leave out the "
            "task's step, or train with a Learner"
        )
