"""The loss of a batch, and of each of its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgegossip.contract.errors import DataError, TrainingError
from edgegossip.contract.protocol import Rank
from edgegossip.data.dataset import TrainingData
from edgegossip.data.nested import Nested, map_leaves, num_samples

Loss: TypeAlias = Callable[..., Tensor]
"""``loss(outputs, targets)``: the mean over the batch, a scalar. If samples are ranked or
weighted, also ``loss(outputs, targets, reduction="none")``: one loss for each sample, as from
the functions of `torch.nn.functional`."""
Forward: TypeAlias = Callable[[nn.Module, Nested], tuple[Any, Any]]
"""``forward(model, batch)``: outputs and targets, the arguments of loss and metrics."""

IGNORED = -100
"""Target of tokens that do not count, such as padding; PyTorch's own default."""


def forward_pair(model: nn.Module, batch: Nested) -> tuple[Any, Any]:
    """Default: run the model on x of a batch (x, y); outputs are model(x), targets y.

    Raises:
        DataError: If the batch is not a pair.
    """
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        found = (
            f"dict with {[*batch]}" if isinstance(batch, dict) else f"{type(batch).__name__}"
        )
        raise DataError(
            f"a batch is a {found}, not a pair (x, y); give the task a forward(model, batch) "
            "that returns outputs and targets, or forward=edgegossip.model_and_batch and a "
            "loss(model, batch)"
        )
    x, y = batch
    return model(x), y


def next_token(model: nn.Module, batch: Nested) -> tuple[Any, Tensor]:
    """Run the model on all tokens but the last; targets are all but the first.

    A batch is one tensor of whole numbers, [batch, length + 1]. Targets are int64 [batch,
    length].

    Raises:
        DataError: If the batch is not such a tensor.
    """
    if not isinstance(batch, Tensor) or batch.is_floating_point() or batch.ndim != 2:
        found = type(batch).__name__
        if isinstance(batch, Tensor):
            found = f"{batch.dtype} tensor of shape {list(batch.shape)}"
        raise DataError(
            f"a batch is a {found}; next_token takes one of whole numbers, [batch, length + 1]"
        )
    tokens = batch.long()
    return model(tokens[:, :-1]), tokens[:, 1:]


def model_and_batch(model: nn.Module, batch: Nested) -> tuple[nn.Module, Nested]:
    """Pass model and batch unchanged to a ``loss(model, batch)`` and metrics of this form."""
    return model, batch


@dataclass(frozen=True)
class TokenCrossEntropy:
    """Mean cross entropy of the next token, over all tokens of a batch: a task's `loss`.

    Outputs are [batch, ..., num_tokens], targets int64 [batch, ...]. Targets of -100, such as
    padding, do not count.

    >>> import torch
    >>> loss = TokenCrossEntropy()
    >>> round(float(loss(torch.zeros(1, 3, 8), torch.tensor([[1, 2, -100]]))), 4)
    2.0794
    """

    def __call__(
        self, outputs: Tensor, targets: Tensor, reduction: Literal["mean", "none"] = "mean"
    ) -> Tensor:
        """The mean over all tokens, or with "none" the mean of each sample, [batch]."""
        tokens = outputs.flatten(0, -2), targets.flatten()
        if reduction == "mean":
            return F.cross_entropy(*tokens, ignore_index=IGNORED)
        losses = F.cross_entropy(*tokens, ignore_index=IGNORED, reduction="none")
        number = (targets != IGNORED).flatten(1).sum(1).clamp(min=1)
        return losses.view(len(targets), -1).sum(1) / number

    def num_terms(self, outputs: Tensor, targets: Tensor) -> int:
        """Number of tokens that count."""
        return int((targets != IGNORED).sum())


def losses_of(loss: Loss, outputs: Any, targets: Any, number: int) -> Tensor:  # noqa: ANN401
    """The loss of each sample, [number].

    Raises:
        ValueError: If `loss` cannot compute one loss per sample.
    """
    problem = (
        f"ranking samples needs the loss of each one, but {loss!r} takes no "
        "reduction='none' as the functions of torch.nn.functional do; let it, or choose "
        "Random() or Cyclic()"
    )
    try:
        losses = loss(outputs, targets, reduction="none")
    except TypeError as error:
        raise ValueError(problem) from error
    if losses.shape[:1] != (number,):
        raise ValueError(problem)
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def mean_of_finite(losses: Sequence[Tensor], rank: Rank, num_before: int) -> float:
    """The mean of a worker's losses in the steps after its first `num_before` steps.

    Raises:
        TrainingError: If a loss is not finite.
    """
    values = torch.stack([*losses])
    is_finite = values.isfinite()
    if not is_finite.all():
        first = int(is_finite.logical_not().nonzero()[0])
        raise TrainingError(
            f"the loss of worker {rank} became {float(values[first])} in its step "
            f"{num_before + first + 1}; try a smaller learning rate, or look for extreme "
            "values in its data"
        )
    return float(values.mean())


def prepare_batch(dataset: TrainingData, batch: Nested, torch_device: torch.device) -> Nested:
    """Move a batch to the device; if it is a pair (x, y) of tensors, prepare x.

    Preparation standardizes x, and converts pictures to the channels-last layout.

    Raises:
        DataError: If the batch has tensors of unequal length, or anything but tensors.
    """
    match batch:
        case (Tensor() as x, Tensor() as y) if x.ndim and y.ndim and len(x) == len(y):
            x = to_model(dataset.prepare(x.to(torch_device)), torch_device)
            return x, y.to(torch_device)
    num_samples(batch)  # rejects tensors that do not fit together
    return map_leaves(lambda leaf: leaf.to(torch_device), batch)


def to_model(x: Tensor, torch_device: torch.device) -> Tensor:
    """Move prepared samples to the device, pictures in the fastest layout for its kernels."""
    x = x.to(torch_device)
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
