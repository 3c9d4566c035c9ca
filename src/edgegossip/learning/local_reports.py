"""Reports on data that stays with the workers: sums of the workers' measurements."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from edgegossip.core.protocol import Rank
from edgegossip.learning.evaluator import Evaluator
from edgegossip.learning.flat import FlatModel
from edgegossip.learning.metric import Measurement, Metric


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
