"""Loss and metrics of a parameter vector on held-out data, in one place or with the workers."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Literal

import torch
from torch import Tensor, nn

from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import Rank
from edgegossip.data.dataset import Dataset, Split
from edgegossip.data.nested import Nested
from edgegossip.models.flat import FlatModel
from edgegossip.models.normalization import trained_statistics
from edgegossip.training.loss import Forward, Loss, forward_pair, prepare_batch
from edgegossip.training.metrics import Accuracy, Measurement, Metric

_RECALIBRATION = 2000
"""Approximate number of training samples for measuring running statistics."""


class Evaluator:
    """Measures parameters on one held-out split, without access to the other held-out split.

    If running statistics are not part of the parameters, an average of several models lacks
    matching statistics. The statistics are then measured again on some training samples
    (batch-norm recalibration).

    Args:
        model: Model to measure; copied.
        loss: Loss of outputs and targets.
        metrics: Metrics of outputs and targets.
        forward: Maps model and batch to outputs and targets; see `Task`.
        dataset: Data set with the split.
        has_buffers: As in `Learner`.
        torch_device: Device for the computation.
        batch_size: Samples per batch.
        split: "test" for reports, "validation" for algorithms.

    Attributes:
        cost: Cost of an evaluation, in training samples: a third of the samples used, because a
            backward pass takes twice as many operations as a forward pass.

    Raises:
        ValueError: If `split` is "validation" and `dataset` has none.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: Loss,
        dataset: Dataset,
        metrics: Sequence[Metric] = (Accuracy(),),
        forward: Forward = forward_pair,
        has_buffers: bool = True,
        torch_device: torch.device | str = "cpu",
        batch_size: int = 500,
        split: Literal["test", "validation"] = "test",
    ) -> None:
        measured = dataset.test if split == "test" else dataset.validation
        if measured is None:
            raise ValueError(f"{dataset.name!r} has no validation split; use hold_out")
        module = copy.deepcopy(model)
        self._model = FlatModel(module, has_buffers=has_buffers, torch_device=torch_device)
        self._loss = loss
        self._metrics = tuple(metrics)
        self._forward = forward
        self._dataset = dataset.training
        self._split = measured
        self._torch_device = torch.device(torch_device)
        self._batch_size = batch_size
        self._statistics = [] if has_buffers else trained_statistics(module)
        num_train = len(dataset.train) if self._statistics else 0
        self._recalibration = torch.arange(0, num_train, max(1, num_train // _RECALIBRATION))
        self.cost = (len(measured) + len(self._recalibration)) / 3
        self._lock = threading.Lock()

    def evaluate(self, params: Tensor) -> tuple[float, dict[str, float]]:
        """Mean loss, and the value of each metric by name, in the order of `metrics`."""
        found = self.measure(params)
        return found.loss, found.values(self._metrics)

    @torch.no_grad()
    def measure(self, params: Tensor) -> Measurement:
        """Sums for loss and metrics; they can be added to sums over other workers' splits.

        In the mean loss, batches are weighted by their numbers of samples, or, if the loss has
        a method ``num_terms(outputs, targets)``, by its result.
        """
        with self._lock:
            module, found = self._load(params), Measurement()
            num_terms = getattr(self._loss, "num_terms", None)
            for indices in torch.split(torch.arange(len(self._split)), self._batch_size):
                outputs, targets = self._forward(module, self._batch(self._split, indices))
                number = len(indices) if num_terms is None else num_terms(outputs, targets)
                found.num_samples += len(indices)
                found.num_terms += number
                if number:
                    found.total_loss += float(self._loss(outputs, targets)) * number
                for metric in self._metrics:
                    found.add(metric, metric.sums(outputs, targets))
            return found

    @torch.no_grad()
    def named_parameters(self, params: Tensor) -> dict[str, Tensor]:
        """The model's tensors by name at `params`, as in its `state_dict`, for deployment."""
        with self._lock:
            tensors = self._load(params).state_dict()
            return {name: tensor.cpu().clone() for name, tensor in tensors.items()}

    def _load(self, params: Tensor) -> nn.Module:
        if params.shape != (self._model.num_params,):
            raise LocalProtocolError(
                f"asked to evaluate {list(params.shape)} parameters, but the whole model has "
                f"{self._model.num_params}; a part alone cannot be measured"
            )
        self._model.load(params)
        module = self._model.module.eval()
        if self._statistics:
            self._recalibrate()
        return module.eval()

    def _recalibrate(self) -> None:
        for layer in self._statistics:
            layer.reset_running_stats()
            layer.momentum = None  # a plain mean over the batches
            layer.train()  # and no other layer: dropout would shift the statistics
        chosen = self._recalibration
        # Equal batches: none of a single sample, which has no variance.
        for indices in chosen.tensor_split(math.ceil(len(chosen) / self._batch_size)):
            self._forward(self._model.module, self._batch(self._dataset.train, indices))

    def _batch(self, split: Split, indices: Tensor) -> Nested:
        return prepare_batch(self._dataset, split.batch(indices), self._torch_device)


class LocalReporter:
    """Measures a model on the validation samples of all workers.

    Args:
        model: Model to measure; copied.
        evaluator_of: Makes the evaluator of a worker, on its own validation samples.
        ranks: The workers that have data.
        metrics: Metrics of the task.
        has_buffers: As in `Learner`.
    """

    def __init__(
        self,
        model: nn.Module,
        evaluator_of: Callable[[Rank], Evaluator],
        ranks: Sequence[Rank],
        metrics: Sequence[Metric],
        *,
        has_buffers: bool,
    ) -> None:
        self._model = FlatModel(copy.deepcopy(model), has_buffers=has_buffers)
        self._evaluator_of = evaluator_of
        self._ranks = tuple(ranks)
        self._metrics = tuple(metrics)

    def evaluate(self, params: Tensor) -> tuple[float, dict[str, float]]:
        """Mean loss, and the value of each metric by name, over all samples."""
        found = together([self._evaluator_of(rank).measure(params) for rank in self._ranks])
        return found.loss, found.values(self._metrics)

    @torch.no_grad()
    def named_parameters(self, params: Tensor) -> dict[str, Tensor]:
        """The model's tensors by name at `params`, as in its `state_dict`."""
        self._model.load(params)
        tensors = self._model.module.state_dict()
        return {name: tensor.clone() for name, tensor in tensors.items()}


def together(found: Sequence[Measurement]) -> Measurement:
    """Add the workers' measurements, in the order of their ranks."""
    return reduce(add, found, Measurement())
