"""Loss and accuracy of a parameter vector on held-out data."""

from __future__ import annotations

import copy
import math
import threading

import torch
from torch import Tensor, nn

from edgegossip.learning.dataset import Dataset, Split
from edgegossip.learning.flat import FlatModel
from edgegossip.learning.loss import Loss, prepare_batch
from edgegossip.learning.normalization import running_statistics


class Evaluator:
    """Measures parameters on the test split.

    A model whose running statistics are not part of its parameters has none that fit an
    average of several models; they are measured anew on some training samples first
    (batch-norm recalibration).

    Args:
        model: Copied.
        loss: Of outputs and targets.
        dataset: Its test split is measured on.
        has_buffers: As in `Learner`.
        torch_device: Where to compute.
        batch_size: Samples at once.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: Loss,
        dataset: Dataset,
        has_buffers: bool = True,
        torch_device: torch.device | str = "cpu",
        batch_size: int = 500,
    ) -> None:
        module = copy.deepcopy(model)
        self._model = FlatModel(module, has_buffers=has_buffers, torch_device=torch_device)
        self._loss = loss
        self._dataset = dataset
        self._torch_device = torch.device(torch_device)
        self._batch_size = batch_size
        self._statistics = [] if has_buffers else running_statistics(module)
        self._lock = threading.Lock()

    @torch.no_grad()
    def evaluate(self, params: Tensor) -> tuple[float, float]:
        """Mean loss and accuracy (share of samples whose largest output is the target)."""
        with self._lock:
            module, num_test = self._load(params), len(self._dataset.test)
            total_loss, num_correct = 0.0, 0
            for indices in torch.split(torch.arange(num_test), self._batch_size):
                x, y = self._batch(self._dataset.test, indices)
                outputs = module(x)
                total_loss += float(self._loss(outputs, y)) * len(y)
                num_correct += int((outputs.argmax(1) == y).sum())
            return total_loss / num_test, num_correct / num_test

    @torch.no_grad()
    def named_parameters(self, params: Tensor) -> dict[str, Tensor]:
        """The model's tensors by name at `params`, as in its `state_dict`: what to deploy."""
        with self._lock:
            tensors = self._load(params).state_dict()
            return {name: tensor.cpu().clone() for name, tensor in tensors.items()}

    def _load(self, params: Tensor) -> nn.Module:
        self._model.params.copy_(params)
        module = self._model.module.eval()
        if self._statistics:
            self._recalibrate()
        return module.eval()

    def _recalibrate(self, num_samples: int = 2000) -> None:
        for layer in self._statistics:
            layer.reset_running_stats()
            layer.momentum = None  # a plain mean over the batches
            layer.train()  # and no other layer: dropout would shift the statistics
        num_train = len(self._dataset.train)
        chosen = torch.arange(0, num_train, max(1, num_train // num_samples))
        # Equal batches: none of a single sample, which has no variance.
        for indices in chosen.tensor_split(math.ceil(len(chosen) / self._batch_size)):
            self._model.module(self._batch(self._dataset.train, indices)[0])

    def _batch(self, split: Split, indices: Tensor) -> tuple[Tensor, Tensor]:
        return prepare_batch(self._dataset, *split.batch(indices), self._torch_device)
