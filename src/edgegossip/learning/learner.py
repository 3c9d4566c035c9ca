"""One worker's training: a model, an optimizer and a shard of the data."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from edgegossip.core.errors import TrainingError
from edgegossip.core.protocol import Payload, Rank, TrainingResult, Work
from edgegossip.core.randomness import generator
from edgegossip.learning.batches import BatchStream
from edgegossip.learning.dataset import Dataset
from edgegossip.learning.dropout import replace_dropout
from edgegossip.learning.flat import FlatModel
from edgegossip.learning.optimizer import OptimizerFactory

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``loss(outputs, targets)``: the mean over the batch, a scalar."""


Augmentation: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
"""Changes a batch, as the data set holds it, at random; draws from the generator only."""


class Learner:
    """Trains a model on one shard; a `core.Trainer` for PyTorch.

    Everything random (order of the batches, dropout, augmentation) comes from streams keyed
    by (seed, rank, incarnation), so learners can train in threads at once and still repeat to
    the last bit.

    Args:
        model: Copied; the learner's own.
        loss: Of outputs and targets.
        optimizer: Makes the optimizer.
        dataset: Its training split is trained on.
        shard: [n] indices of this worker's samples in the training split.
        batch_size: Samples a step.
        seed: Of the run.
        rank: Whose learner this is.
        incarnation: How often this worker has come back.
        augmentation: Applied to each training batch; None for none.
        has_buffers: Exchange normalisation buffers too; see `FlatModel`.
        torch_device: Where to compute.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: Loss,
        optimizer: OptimizerFactory,
        dataset: Dataset,
        shard: Tensor,
        batch_size: int,
        seed: int = 0,
        rank: Rank = 0,
        incarnation: int = 0,
        augmentation: Augmentation | None = None,
        has_buffers: bool = True,
        torch_device: torch.device | str = "cpu",
    ) -> None:
        key = (seed, rank, incarnation)
        self.rank = rank
        self.batches = BatchStream(shard=shard, batch_size=batch_size, key=key)
        self._random = generator(*key, "augmentation")
        self._dropout = torch.Generator(torch_device)
        self._dropout.manual_seed(generator(*key, "dropout").initial_seed())
        module = copy.deepcopy(model)
        replace_dropout(module, self._dropout)
        self.model = FlatModel(module, has_buffers=has_buffers, torch_device=torch_device)
        is_elementwise = getattr(optimizer, "is_elementwise", False)
        trained = [self.model.trained] if is_elementwise else list(module.parameters())
        self._optimizer = optimizer(trained)
        self._loss = loss
        self._dataset = dataset
        self._augmentation = augmentation
        self._torch_device = torch.device(torch_device)
        self._num_steps = 0

    @property
    def num_samples(self) -> int:
        """Samples in the shard."""
        return len(self.batches.shard)

    def cost(self, work: Work, inputs: Payload) -> float:
        """Samples that `work` processes."""
        return self.batches.num_samples(work)

    def train(self, params: Tensor, work: Work, inputs: Payload) -> TrainingResult:
        """Train from `params` ([num_params]).

        Raises:
            TrainingError: If a loss is not finite.
        """
        self.model.params.copy_(params)
        self.model.module.train()
        batches = self.batches.take(work)
        before = torch.get_rng_state()
        losses = [self._step(batch) for batch in batches]
        if not torch.equal(before, torch.get_rng_state()):
            warnings.warn(
                "training draws from PyTorch's global generator, so this run may not repeat to "
                "the last bit; use nn.Dropout modules instead of functions, and `augmentation` "
                "instead of random transforms",
                stacklevel=2,
            )
        loss = self._mean_loss(losses)
        self._num_steps += len(batches)
        num_samples = sum(map(len, batches))
        return TrainingResult(
            self.model.params.to("cpu", copy=True), num_samples, len(batches), loss
        )

    def _step(self, batch: Tensor) -> Tensor:
        x, y = self._dataset.train.batch(batch)
        if self._augmentation is not None:
            x = self._augmentation(x, self._random)
        x, y = prepare_batch(self._dataset, x, y, self._torch_device)
        self.model.zero_grad()
        loss = self._loss(self.model.module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach()

    def _mean_loss(self, losses: list[Tensor]) -> float:
        values = torch.stack(losses)
        is_finite = values.isfinite()
        if not is_finite.all():
            first = int(is_finite.logical_not().nonzero()[0])
            raise TrainingError(
                f"the loss of worker {self.rank} became {float(values[first])} in its step "
                f"{self._num_steps + first + 1}; try a smaller learning rate, or look for "
                "extreme values in its data"
            )
        return float(values.mean())

    def state_dict(self) -> Mapping[str, Any]:
        return {
            "params": self.model.params,
            "optimizer": self._optimizer.state_dict(),
            "batches": self.batches.state_dict(),
            "augmentation": self._random.get_state(),
            "dropout": self._dropout.get_state(),
            "num_steps": self._num_steps,
            "buffers": dict(self.model.module.named_buffers()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.params.copy_(state["params"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.batches.load_state_dict(state["batches"])
        self._random.set_state(state["augmentation"])
        self._dropout.set_state(state["dropout"])
        self._num_steps = state["num_steps"]
        buffers = dict(self.model.module.named_buffers())
        for name, buffer in state["buffers"].items():
            buffers[name].copy_(buffer)


def prepare_batch(
    dataset: Dataset, x: Tensor, y: Tensor, torch_device: torch.device
) -> tuple[Tensor, Tensor]:
    """Samples as the model takes them: on the device, normalised, pictures channels-last."""
    x = dataset.prepare(x.to(torch_device))
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, y.to(torch_device)
