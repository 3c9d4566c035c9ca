"""Algorithm 2 of EdgeGossip as a batch sampler that prefers important samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from edgegossip.contract.randomness import generator
from edgegossip.contract.ranges import check_range
from edgegossip.training.sampling.aggregation import AggregatedData
from edgegossip.training.sampling.selection import Candidates, Selection


@dataclass(slots=True, eq=False)
class Batch:
    """Samples of one step.

    Attributes:
        positions: [batch] positions in the worker's data.
        weights: [batch] weight of each sample's loss; None for all 1.
    """

    positions: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.positions)


def cut_into_batches(
    positions: Tensor, weights: Tensor | None, sizes: list[int]
) -> list[Batch]:
    """Cut samples, and their weights if they have any, into batches of these sizes."""
    split = [None] * len(sizes) if weights is None else torch.split(weights, sizes)
    return [Batch(*pair) for pair in zip(torch.split(positions, sizes), split, strict=True)]


class AccuracyAwareSampler(Sampler[list[int]]):
    r"""Batches of a share `keep_ratio` of a data set, chosen by a `Selection`.

    Before an epoch, measure the losses of the aggregated points with the current model and pass
    them to `set_losses`. Each epoch then visits :math:`\mathrm{round}(r\,|X|)` samples, at
    least two. With a plain `DataLoader`::

        aggregated = aggregator("hash-kmeans").fit(x, y)
        sampler = AccuracyAwareSampler(
            aggregated, batch_size=64, selection=RankedPerClass(), keep_ratio=0.3
        )
        loader = DataLoader(dataset, batch_sampler=sampler)
        for epoch in range(10):
            with torch.no_grad():
                outputs = model(aggregated.x)
                losses = cross_entropy(outputs, aggregated.y, reduction="none")
            sampler.set_losses(losses)
            for x, y in loader: ...

    A selection that weights samples (`Importance`, `Pruned`) sets `weights`. A selection that
    uses sample losses (`Focused`) gets them from `record`; without them, `Focused` chooses like
    `Random`. Both need the positions of a batch's samples, so include these in the data set::

        dataset = TensorDataset(x, y, torch.arange(len(x)))
        ...
            for x, y, positions in loader:
                losses = cross_entropy(model(x), y, reduction="none")
                (losses * sampler.weights[positions]).mean().backward()
                sampler.record(positions, losses)

    Workers of a `DataLoader` prefetch but do not run the sampler, so `num_workers` has no
    effect on the choice.

    Args:
        aggregated: Aggregated points of the samples; None for selections that need no losses.
        num_samples: Total number of samples; needed only without `aggregated`.
        batch_size: Samples per step, at least 1. Batches are smaller only at the end of an
            epoch, and larger only if `Ranked` keeps subsets whole or a single remaining sample
            joins the last batch.
        selection: Selection of the preferred samples.
        keep_ratio: :math:`r`, the share of the samples that an epoch visits, in (0, 1]; may be
            changed before each epoch.
        key: Key of the random stream: (seed, rank, incarnation), or only a seed.

    Attributes:
        weights: [num_samples] factor of each sample's loss in the current epoch.
        focus: Share of the current epoch that was chosen for high loss, in [0, 1].

    Raises:
        ValueError: If a number is out of range, or a required `aggregated` is missing.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 32(7), 2021, Algorithm 2. Departures: the number of
        samples is exact, so the last batch is cut, while the paper's may overshoot; the paper's
        endless loop at :math:`r = 1` is fixed.

    >>> from edgegossip.training.sampling.selection import Random
    >>> sampler = AccuracyAwareSampler(num_samples=8, batch_size=3, selection=Random())
    >>> [len(batch) for batch in sampler]
    [3, 3, 2]
    >>> sampler.keep_ratio = 0.5
    >>> [len(batch) for batch in sampler]
    [4]
    """

    def __init__(
        self,
        aggregated: AggregatedData | None = None,
        *,
        num_samples: int | None = None,
        batch_size: int,
        selection: Selection,
        keep_ratio: float = 1.0,
        key: tuple[int, ...] | int = 0,
    ) -> None:
        if aggregated is not None:
            num_samples = aggregated.num_samples
        if not num_samples or num_samples < 0:
            raise ValueError(
                f"there are no samples to choose from, got num_samples={num_samples}; give "
                "`aggregated`, or the length of the data set"
            )
        check_range("batch_size", batch_size, "at least 1")
        if selection.needs_losses and aggregated is None:
            raise ValueError(
                f"{selection} ranks by losses of aggregated points; give `aggregated`, or "
                "choose Random() or Cyclic()"
            )
        self.num_samples = num_samples
        self.batch_size = min(batch_size, num_samples)
        self.selection = selection
        self.keep_ratio = keep_ratio
        self.num_due(keep_ratio)  # rejects a ratio out of range
        self.epoch = 0
        self._key = (key,) if isinstance(key, int) else key
        nothing = torch.arange(num_samples)
        self._subset_of = nothing if aggregated is None else aggregated.subset_of
        self._labels = torch.zeros_like(nothing) if aggregated is None else aggregated.y
        num_points = len(self._labels)
        self._losses = torch.full((num_points,), torch.nan)
        self._last_probe = torch.full((num_points,), -1)  # epoch of the probe, -1 for never
        self._num_visits = torch.zeros(num_samples, dtype=torch.int64)
        self._sample_losses = torch.full((num_samples,), torch.nan)
        self._recorded: list[tuple[Tensor, Tensor]] = []  # losses that are not in it yet
        self.weights = torch.ones(num_samples)
        self.focus = 0.0

    # The model's losses on the aggregated points.

    def set_losses(self, losses: Tensor, points: Tensor | None = None) -> None:
        """Set the current model's losses on the aggregated points.

        Args:
            losses: [num_points], one for each of `points`; finite.
            points: [num_points] indices of aggregated points; None for all of them.

        Raises:
            ValueError: If shapes do not fit, or a loss is not finite.
        """
        expected = self._losses.shape if points is None else points.shape
        if losses.shape != expected:
            raise ValueError(
                f"got losses of shape {list(losses.shape)} for {list(expected)} points; give "
                "one for each aggregated point (reduction='none')"
            )
        if not bool(losses.isfinite().all()):
            raise ValueError(
                "a loss of an aggregated point is not finite; has training diverged?"
            )
        chosen = slice(None) if points is None else points
        self._losses[chosen] = losses.detach().to("cpu", torch.float32)
        self._last_probe[chosen] = self.epoch

    def stalest_points(self, num_points: int) -> Tensor:
        """Indices of the aggregated points with the oldest losses, at most `num_points`."""
        # Shuffled first: among points of equal age, chance decides.
        order = torch.randperm(
            len(self._losses), generator=generator(*self._key, "look", self.epoch)
        )
        by_age = order[self._last_probe[order].argsort(stable=True)]
        return by_age[:num_points].sort().values

    # One epoch.

    def __len__(self) -> int:
        """Number of batches in an epoch; an upper limit if subsets are kept whole."""
        return len(self.batch_sizes(self.num_due(self.keep_ratio)))

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.begin_epoch(self.num_due(self.keep_ratio)):
            self.visit(batch)
            yield batch.positions.tolist()

    def num_due(self, keep_ratio: float) -> int:
        """Number of visits in an epoch: ``round(keep_ratio * num_samples)``, at least two.

        Raises:
            ValueError: If `keep_ratio` is not in (0, 1].
        """
        check_range("keep_ratio", keep_ratio, "in (0, 1]")
        return self.at_least_two(keep_ratio * self.num_samples)

    def at_least_two(self, num_samples: float) -> int:
        """`num_samples`, rounded and limited to the range from two to all samples."""
        # Batch normalisation cannot train on one sample alone.
        return min(self.num_samples, max(2, round(num_samples)))

    def batch_sizes(self, num_samples: int) -> list[int]:
        """Sizes of the batches of `num_samples` samples, if subsets are not kept whole."""
        num_whole, rest = divmod(num_samples, self.batch_size)
        if rest == 1 and num_whole:
            # As in `at_least_two`.
            return [self.batch_size] * (num_whole - 1) + [self.batch_size + 1]
        return [self.batch_size] * num_whole + [rest] * (rest > 0)

    def begin_epoch(self, num_samples: int, among: Tensor | None = None) -> list[Batch]:
        """Choose `num_samples` samples and cut them into batches; see `visit`.

        Args:
            num_samples: Number of samples to choose.
            among: [n] positions to choose from; None for all samples.

        Raises:
            ValueError: If the selection needs losses and none are set.
        """
        self._settle()
        self.epoch += 1  # before the draw: its number is part of the stream's key
        losses = self._known_losses() if self.selection.needs_losses else self._losses
        some = slice(None) if among is None else among
        choice = self.selection.choose(
            Candidates(
                losses=losses,
                is_newest=self._last_probe == self._last_probe.max(),
                labels=self._labels,
                subset_of=self._subset_of[some],
                num_visits=self._num_visits[some],
                sample_losses=self._sample_losses[some],
            ),
            num_samples,
            generator(*self._key, "batches", self.epoch),
        )
        if among is not None:
            choice = replace(choice, order=among[choice.order])
        self.focus = choice.focus
        self.weights.fill_(1)  # in place, because a training loop of one's own may hold it
        if choice.weights is not None:
            self.weights[choice.order] = choice.weights
        if self.selection.keeps_subsets_whole:
            sizes = self._sizes_of_whole_batches(choice.order)
        else:
            sizes = self.batch_sizes(len(choice.order))
        return cut_into_batches(choice.order, choice.weights, sizes)

    def visit(self, batch: Batch) -> None:
        """Count visits to the samples of `batch`, for selections that balance visits."""
        ones = torch.ones_like(batch.positions)
        self._num_visits.index_add_(0, batch.positions, ones)

    def record(self, positions: Tensor, losses: Tensor) -> None:
        """Record losses from training, [batch], of the samples at `positions`.

        Only selections with `needs_sample_losses` use these losses.
        """
        self._recorded.append((positions, losses.detach()))
        # Losses on a GPU are copied when a pass needs them: a copy in each step would wait.
        if losses.device.type == "cpu":
            self._settle()

    def _settle(self) -> None:
        for positions, losses in self._recorded:
            self._sample_losses[positions] = losses.to("cpu", torch.float32)
        self._recorded.clear()

    def _known_losses(self) -> Tensor:
        """Losses of all points; unmeasured points get the mean of the measured losses."""
        is_known = self._losses.isfinite()
        if not is_known.any():
            raise ValueError(
                f"{self.selection} needs losses; call set_losses before the first epoch"
            )
        return self._losses.where(is_known, self._losses[is_known].mean())

    def _sizes_of_whole_batches(self, order: Tensor) -> list[int]:
        """Sizes of batches that have whole subsets and at least `batch_size` samples."""
        subsets = self._subset_of[order]
        is_end = torch.ones(len(order), dtype=torch.bool)
        is_end[:-1] = subsets[1:] != subsets[:-1]
        sizes, start = [], 0
        for end in (is_end.nonzero()[:, 0] + 1).tolist():
            # One sample alone is no batch.
            if end - start >= self.batch_size and end < len(order) - 1:
                sizes.append(end - start)
                start = end
        return [*sizes, len(order) - start]

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """All state that changes from epoch to epoch."""
        self._settle()
        return {
            "epoch": self.epoch,
            "losses": self._losses,
            "last_probe": self._last_probe,
            "num_visits": self._num_visits,
            "sample_losses": self._sample_losses,
            "weights": self.weights,
            "focus": self.focus,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._recorded.clear()
        self.epoch = state["epoch"]
        self._losses.copy_(state["losses"])
        self._last_probe.copy_(state["last_probe"])
        self._num_visits.copy_(state["num_visits"])
        self._sample_losses.copy_(state["sample_losses"])
        self.weights.copy_(state["weights"])
        self.focus = state["focus"]
