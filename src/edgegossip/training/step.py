"""A training step, which owns the loss, and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edgegossip.contract.ranges import check_counts, check_ranges
from edgegossip.data.nested import Nested, map_leaves
from edgegossip.training.copies import ModelCopy
from edgegossip.training.device import require_autocast
from edgegossip.training.loss import Forward, Loss, losses_of
from edgegossip.training.sampling.sampler import Batch


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
        cuda_graph: On an Nvidia GPU, replay each step, from the samples to the update, as one
            CUDA graph, so that a small model does not wait for Python. The first steps, smaller
            last batches, and steps that weigh or rank samples run without it, and so do all
            steps elsewhere, or if a step needs the host; the log then has the reason.

    Raises:
        ValueError: If a number is out of range, `autocast` is not `torch.bfloat16` or None, or
            `compile` and `cuda_graph` are both set.

    >>> TrainingStep(micro_batch_size=16, max_grad_norm=1.0).micro_batch_size
    16
    """

    autocast: torch.dtype | None = None
    micro_batch_size: int | None = None
    max_grad_norm: float | None = None
    compile: bool = False
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        if self.autocast not in (None, torch.bfloat16):
            raise ValueError(
                f"autocast must be torch.bfloat16 or None, got {self.autocast}; float16 would "
                "need its gradients scaled"
            )
        if self.compile and self.cuda_graph:
            raise ValueError("compile and cuda_graph do not work together; choose one of them")
        check_counts(self, "micro_batch_size")
        check_ranges(
            self, micro_batch_size="at least 1 or None", max_grad_norm="above 0 or None"
        )

    def require_device(self, torch_device: torch.device) -> None:
        """Check that these settings have an effect on a device.

        Raises:
            ValueError: If `autocast` would be silently off.
        """
        if self.autocast is not None:
            require_autocast(torch_device, self.autocast)


PLAIN_STEP = TrainingStep()


class Step:
    """A step of a learner: forward pass, loss, backward pass and update.

    Args:
        settings: Precision, accumulation, clipping and compilation.
        loss: Loss of outputs and targets.
        forward: Maps model and batch to outputs and targets; see `Task`.
        torch_device: Device of the model.
        counts_terms: Whether the caller needs the exact number of a mean's terms.

    Raises:
        ValueError: If a setting has no effect on the device.
    """

    def __init__(
        self,
        settings: TrainingStep,
        loss: Loss,
        forward: Forward,
        torch_device: torch.device,
        *,
        counts_terms: bool = False,
    ) -> None:
        settings.require_device(torch_device)
        self._settings = settings
        self._counts_terms = counts_terms or settings.micro_batch_size is not None
        self._loss = loss
        self._forward = forward
        self._torch_device = torch_device

    def take(
        self, copy: ModelCopy, batch: Batch, samples: Nested, *, needs_losses: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Take a step on a batch; return its mean loss before the step.

        Args:
            copy: Model and optimizer, with the learning rate set.
            batch: Weights of the samples' losses.
            samples: The samples, prepared for the model.
            needs_losses: Whether to return the loss of each sample, [batch], too. They are
                also returned if the batch has weights, which need them.
        """
        mean, losses, _ = self.differentiate(copy, batch, samples, needs_losses=needs_losses)
        self.update(copy)
        return mean, losses

    def differentiate(
        self, copy: ModelCopy, batch: Batch, samples: Nested, *, needs_losses: bool
    ) -> tuple[Tensor, Tensor | None, int]:
        """The first half of `take`: compute the gradient; also return the terms of the mean."""
        settings, model = self._settings, copy.model
        module = copy.compiled if settings.compile else model.module
        model.zero_grad()
        gradient = model.trained.grad
        assert gradient is not None
        if settings.micro_batch_size is None or len(batch) <= settings.micro_batch_size:
            mean, losses, number = self._losses(module, batch, samples, needs_losses)
            mean.backward()  # type: ignore[no-untyped-call]
            return mean.detach(), losses, number
        return self._accumulate(module, gradient, batch, samples, needs_losses)

    def update(self, copy: ModelCopy) -> None:
        """The second half of `take`: clip the gradient and let the optimizer use it."""
        if self._settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_([copy.model.trained], self._settings.max_grad_norm)
        copy.optimizer.step()

    def _losses(
        self, module: nn.Module, batch: Batch, samples: Nested, needs_losses: bool
    ) -> tuple[Tensor, Tensor | None, int]:
        """The mean loss to differentiate, the samples' losses, and the terms of the mean."""
        losses, autocast = None, self._settings.autocast
        precision: AbstractContextManager[object] = nullcontext()
        if autocast is not None:
            precision = torch.autocast(self._torch_device.type, autocast)
        with precision:
            outputs, targets = self._forward(module, samples)
            if batch.weights is not None:
                losses = losses_of(self._loss, outputs, targets, len(batch))
                # From main memory to a GPU, this is safe without waiting.
                weights = batch.weights.to(losses, non_blocking=losses.is_cuda)
                mean = losses @ weights / len(batch)
            else:
                if needs_losses:
                    with torch.no_grad():
                        losses = losses_of(self._loss, outputs, targets, len(batch))
                # Not the mean of `losses`: the task's loss may count tokens, not samples.
                mean = self._loss(outputs, targets)
        return mean, losses, self._num_terms(batch, outputs, targets)

    def _num_terms(self, batch: Batch, outputs: Any, targets: Any) -> int:  # noqa: ANN401
        """Number of terms of a batch's mean loss: samples, or the loss's own count."""
        count = getattr(self._loss, "num_terms", None)
        if not self._counts_terms or count is None or batch.weights is not None:
            return len(batch)  # counting tokens would take time for nothing
        return int(count(outputs, targets))

    def _accumulate(
        self,
        module: nn.Module,
        gradient: Tensor,
        batch: Batch,
        samples: Nested,
        needs_losses: bool,
    ) -> tuple[Tensor, Tensor | None, int]:
        # The number of counted tokens is known after the last forward pass, but memory holds
        # only one piece: weight pieces by their numbers, and divide by the sum afterwards.
        total, num_terms = gradient.new_zeros(()), 0
        found = []
        for piece, some in self._pieces(batch, samples):
            mean, losses, number = self._losses(module, piece, some, needs_losses)
            if losses is not None:
                found.append(losses.detach())
            if number:  # the mean of no terms is not a number
                (mean * number).backward()  # type: ignore[no-untyped-call]
                total += mean.detach() * number
                num_terms += number
        gradient /= num_terms
        return total / num_terms, torch.cat(found) if found else None, num_terms

    def _pieces(self, batch: Batch, samples: Nested) -> Iterator[tuple[Batch, Nested]]:
        size = self._settings.micro_batch_size
        assert size is not None
        for start in range(0, len(batch), size):
            part = slice(start, start + size)
            weights = None if batch.weights is None else batch.weights[part]
            some = map_leaves(lambda leaf, part=part: leaf[part], samples)  # type: ignore[misc]
            yield Batch(batch.positions[part], weights), some


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
