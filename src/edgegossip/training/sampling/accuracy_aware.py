"""Choice of a worker's training data when there is no time for all of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgegossip.contract.errors import DataError
from edgegossip.contract.ranges import check_ranges
from edgegossip.data.dataset import TrainingData
from edgegossip.training.loss import Forward, Loss, forward_pair, losses_of, to_model
from edgegossip.training.sampling.aggregation import AggregatedData, Aggregator, aggregator
from edgegossip.training.sampling.batches import BatchStream, ProbeBudget, UnitTable
from edgegossip.training.sampling.sampler import AccuracyAwareSampler
from edgegossip.training.sampling.selection import Focused, Random, Selection


@dataclass(frozen=True, kw_only=True)
class AccuracyAware:
    """Settings for the choice of an epoch's samples, and for the aggregated points.

    Selections that need losses use the losses of single samples, ``loss(...,
    reduction="none")``, and of aggregated points. In a regression, all samples count as one
    class, and a point's target is the mean of its samples' targets. Tokens and nested batches
    have no such points; use `Random` or `Cyclic` for them.

    Args:
        selection: Selection of the preferred samples.
        aggregator: Makes the aggregated points; unused by selections that need no losses.
        look_share: Maximum share of each epoch, in (0, 1], for probes of aggregated points;
            points with the oldest losses come first. None probes as many points as the
            selection requires; the paper's selection requires all.

    Raises:
        ValueError: If `look_share` is out of range.
    """

    selection: Selection = Focused()
    aggregator: Aggregator = aggregator("hash-kmeans")
    look_share: float | None = 0.02

    def __post_init__(self) -> None:
        check_ranges(self, look_share="in (0, 1] or None")

    def aggregate(self, dataset: TrainingData, shard: Tensor) -> tuple[AggregatedData, Tensor]:
        """Aggregate a worker's data, for a selection that needs losses.

        Args:
            dataset: Data set with the samples.
            shard: [n] indices of the worker's samples.

        Returns:
            The points, and the target of each: its class, or a mean in a regression.

        Raises:
            DataError: If samples have no mean.
        """
        x, y = self._averageable(dataset, shard)
        if dataset.num_classes:
            aggregated = self.aggregator.fit(x, y)
            return aggregated, aggregated.y
        aggregated = self.aggregator.fit(x, dataset.train.labels[shard])
        return aggregated, aggregated.means(y)

    def make_stream(
        self,
        aggregated: AggregatedData | None,
        *,
        num_samples: int,
        batch_size: int,
        key: tuple[int, ...],
        units: UnitTable | None = None,
    ) -> BatchStream:
        """Make a worker's stream of batches.

        Args:
            aggregated: The worker's aggregated data; None for selections that need no losses.
            num_samples: Number of the worker's samples.
            batch_size: Samples per step.
            key: Key of the random stream.
            units: The units of shared data; None if the samples are the worker's own.
        """
        sampler = AccuracyAwareSampler(
            aggregated,
            num_samples=num_samples,
            batch_size=batch_size,
            selection=self.selection,
            key=key,
        )
        if aggregated is None:
            return BatchStream(sampler, units=units)
        return BatchStream(sampler, self._budget(num_samples, len(aggregated.y)), units)

    def import_libraries(self) -> None:
        """Import scikit-learn now if data are to be aggregated, not in the first round.

        This takes a second of processor time. On a host with 0.15 cores it is seven seconds,
        for which all other workers would wait.
        """
        if self.selection.needs_losses:  # few aggregators do without
            import sklearn.mixture  # noqa: F401 - and with it all that aggregators import

    def require_averageable(self, dataset: TrainingData) -> None:
        """Check that the selection can be used on this data.

        Raises:
            DataError: If the selection needs aggregated points and samples have no mean.
        """
        if self.selection.needs_losses:
            self._averageable(dataset, torch.zeros(1, dtype=torch.int64))

    def _averageable(self, dataset: TrainingData, samples: Tensor) -> tuple[Tensor, Tensor]:
        match dataset.train.batch(samples):
            case (Tensor() as x, Tensor() as y) if dataset.num_classes or (
                y.is_floating_point() and (x.is_floating_point() or x.dtype == torch.uint8)
            ):
                return x, y
        raise DataError(
            f"{type(self.selection).__name__} uses the losses of aggregated points, means "
            "of similar samples, which tokens and samples other than pairs (x, y) do not have; "
            "choose Random() or Cyclic()"
        )

    def epoch_cost(self, labels: Tensor, aggregated: Tensor | None = None) -> float:
        """Cost of a pass over samples with `labels` [n] and of its probe, in training samples.

        `aggregated` has the labels of those that are aggregated; None for all.

        This equals `BatchStream.epoch_cost` of their stream, but needs no aggregation.
        """
        if not self.selection.needs_losses:
            return float(len(labels))
        some = labels if aggregated is None else aggregated
        budget = self._budget(len(labels), self.aggregator.num_subsets(some))
        return len(labels) + budget.cost(1.0)

    def _budget(self, num_samples: int, num_subsets: int) -> ProbeBudget:
        max_cost = None if self.look_share is None else self.look_share * num_samples
        return ProbeBudget(min(num_subsets, self.selection.num_points or num_subsets), max_cost)


PLAIN = AccuracyAware(selection=Random())
"""Every pass in a new random order, as without EdgeGossip."""


class PointLosses:
    """Measures a model's losses on aggregated points.

    It uses no augmentation, and normalization layers use their running statistics: means of
    several samples are not training data, and must not change these statistics.

    Args:
        dataset: Prepares samples for the model.
        x: Aggregated points, from `AggregatedData`.
        targets: Target of each point.
        loss: Loss of outputs and targets.
        forward: Maps model and batch to outputs and targets.
        torch_device: Device for the computation.
        batch_size: Points per batch.
    """

    def __init__(
        self,
        dataset: TrainingData,
        x: Tensor,
        targets: Tensor,
        *,
        loss: Loss,
        forward: Forward = forward_pair,
        torch_device: torch.device,
        batch_size: int = 500,
    ) -> None:
        sample, _ = dataset.train.batch(torch.zeros(1, dtype=torch.int64))
        x = dataset.prepare(x, is_picture=sample.dtype == torch.uint8)
        self._x, self._targets = to_model(x, torch_device), targets.to(torch_device)
        self._loss, self._forward = loss, forward
        self._batch_size = batch_size

    @torch.no_grad()
    def __call__(self, module: nn.Module, points: Tensor) -> Tensor:
        """Losses of the aggregated points with indices `points`, [num_points]."""
        was_training = module.training
        module.eval()
        losses = []
        for some in torch.split(points, self._batch_size):
            found = self._forward(module, (self._x[some], self._targets[some]))
            losses.append(losses_of(self._loss, *found, len(some)).cpu())
        module.train(was_training)
        return torch.cat(losses)
