"""Choice of a worker's training data when there is no time for all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from edgegossip.core.ranges import check_ranges
from edgegossip.learning.dataset import TrainingData
from edgegossip.learning.loss import Loss, losses_of, to_model
from edgegossip.learning.sampling.aggregated import AggregatedData
from edgegossip.learning.sampling.aggregation import Aggregator, aggregator
from edgegossip.learning.sampling.batches import BatchStream
from edgegossip.learning.sampling.look import Budget, Look
from edgegossip.learning.sampling.sampler import AccuracyAwareSampler
from edgegossip.learning.sampling.selection import Focused, Random, Selection


@dataclass(frozen=True, kw_only=True)
class AccuracyAware:
    """Settings for the choice of an epoch's samples, and for the aggregated points.

    Args:
        selection: Selection of the preferred samples.
        aggregator: Makes the aggregated points; unused by selections that need no losses.
        look_share: Maximum share of each epoch, in (0, 1], for looks at aggregated points,
            stalest first. None looks at the number that the selection requires; the paper's
            requires all.

    Raises:
        ValueError: If `look_share` is out of range.
    """

    selection: Selection = Focused()
    aggregator: Aggregator = aggregator("hash-kmeans")
    look_share: float | None = 0.02

    def __post_init__(self) -> None:
        check_ranges(self, look_share="in (0, 1] or None")

    def make_stream(
        self,
        dataset: TrainingData,
        shard: Tensor,
        batch_size: int,
        key: tuple[int, ...],
        module: Callable[[], nn.Module],
        loss: Loss,
        torch_device: torch.device,
    ) -> BatchStream:
        """Aggregate a worker's data, if the selection needs it, and make its stream.

        Args:
            dataset: Data set with the samples.
            shard: [n] indices of the worker's samples.
            batch_size: Samples per step.
            key: Key of the random stream.
            module: Returns the model for looks at aggregated points.
            loss: Loss of outputs and targets.
            torch_device: Device of the module.
        """
        make = partial(self.stream_of, num_samples=len(shard), batch_size=batch_size, key=key)
        if not self.selection.needs_losses:
            return make(None)
        aggregated = self.aggregator.fit(*dataset.train.batch(shard))
        return make(
            aggregated, AggregatedLosses(module, loss, dataset, aggregated, torch_device)
        )

    def stream_of(
        self,
        aggregated: AggregatedData | None,
        loss_of: Callable[[Tensor], Tensor] | None = None,
        *,
        num_samples: int,
        batch_size: int,
        key: tuple[int, ...],
    ) -> BatchStream:
        """Make a stream over aggregated data; `loss_of` measures losses of points."""
        sampler = AccuracyAwareSampler(
            aggregated,
            num_samples=num_samples,
            batch_size=batch_size,
            selection=self.selection,
            key=key,
        )
        if aggregated is None or loss_of is None:
            return BatchStream(sampler)
        return BatchStream(sampler, Look(loss_of, self._budget(num_samples, len(aggregated.y))))

    def epoch_cost(self, labels: Tensor) -> float:
        """Cost of a pass over samples of these labels ([n]), in samples, including its look.

        It equals `BatchStream.epoch_cost` of their stream, but needs no aggregation.
        """
        if not self.selection.needs_losses:
            return float(len(labels))
        budget = self._budget(len(labels), self.aggregator.num_subsets(labels))
        return len(labels) + budget.cost(1.0)

    def _budget(self, num_samples: int, num_subsets: int) -> Budget:
        max_cost = None if self.look_share is None else self.look_share * num_samples
        return Budget(min(num_subsets, self.selection.num_points or num_subsets), max_cost)


PLAIN = AccuracyAware(selection=Random())
"""Every pass in a new random order, as without EdgeGossip."""


class AggregatedLosses:
    """Measures a model's losses on aggregated points.

    It uses no augmentation, and normalization layers use their running statistics: means of
    several samples are no training data, and must not change these statistics.

    Args:
        module: Returns the model, at its current parameters.
        loss: Loss of outputs and targets.
        dataset: Prepares samples for the model.
        aggregated: The points.
        torch_device: Device for the computation.
        batch_size: Points per batch.
    """

    def __init__(
        self,
        module: Callable[[], nn.Module],
        loss: Loss,
        dataset: TrainingData,
        aggregated: AggregatedData,
        torch_device: torch.device,
        batch_size: int = 500,
    ) -> None:
        self._module = module
        self._loss = loss
        sample, _ = dataset.train.batch(torch.zeros(1, dtype=torch.int64))
        x = dataset.prepare(aggregated.x, is_picture=sample.dtype == torch.uint8)
        self._x, self._y = to_model(x, torch_device), aggregated.y.to(torch_device)
        self._batch_size = batch_size

    @torch.no_grad()
    def __call__(self, points: Tensor) -> Tensor:
        """Losses of the aggregated points of these indices, [num_points]."""
        module = self._module()
        was_training = module.training
        module.eval()
        losses = [
            losses_of(self._loss, module(self._x[some]), self._y[some]).cpu()
            for some in torch.split(points, self._batch_size)
        ]
        module.train(was_training)
        return torch.cat(losses)
