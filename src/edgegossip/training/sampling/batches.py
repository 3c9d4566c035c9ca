"""A worker's batches: endless passes over its data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import Steps, Units, Work
from edgegossip.data.partition import unit_sizes, units_of
from edgegossip.training.sampling.sampler import (
    AccuracyAwareSampler,
    Batch,
    cut_into_batches,
)

FORWARD_COST = 1 / 3
"""Cost of a forward pass over a point, in training samples; a backward pass costs twice as
much.
"""


@dataclass(frozen=True, slots=True)
class ProbeBudget:
    """Number of aggregated points in a probe.

    Attributes:
        num_points: Number of aggregated points per probe; points with the oldest losses come
            first.
        max_cost: Maximum cost of the probe, in samples, before a full pass; proportionally less
            before a shorter pass. None for no limit.
    """

    num_points: int
    max_cost: float | None = None

    def cost(self, keep_ratio: float) -> float:
        """Cost of the probe before a pass of `keep_ratio`, in training samples."""
        return self.num_due(keep_ratio) * FORWARD_COST

    def num_due(self, keep_ratio: float) -> int:
        """Number of points in the probe before a pass of `keep_ratio`."""
        if self.max_cost is None:
            return self.num_points
        affordable = int(keep_ratio * self.max_cost / FORWARD_COST)
        return min(self.num_points, max(1, affordable))


@dataclass(frozen=True, slots=True)
class UnitTable:
    """The units of shared data, for workers that train on `Units`.

    Attributes:
        num_samples: Number of samples of all workers.
        unit_size: Samples per unit; see `Shared`.
        seed: Seed of the run, which draws the units of each epoch.
    """

    num_samples: int
    unit_size: int
    seed: int

    def __len__(self) -> int:
        return len(unit_sizes(self.num_samples, self.unit_size))

    def size(self, work: Units) -> int:
        """Number of samples of the units in `work`."""
        sizes = unit_sizes(self.num_samples, self.unit_size)
        if max(work.indices) >= len(sizes):
            raise LocalProtocolError(f"there are units 0 .. {len(sizes) - 1}, got {work}")
        return sum(sizes[unit] for unit in work.indices)

    def positions(self, work: Units) -> Tensor:
        """Positions of these samples, int64 [num_samples]."""
        units = units_of(self.num_samples, self.unit_size, self.seed, work.epoch)
        return torch.cat([units[unit] for unit in work.indices])


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Aggregated points whose current losses the sampler needs before it chooses a pass.

    Attributes:
        points: Their indices, int64 [num_points].
    """

    points: Tensor


class BatchStream:
    """Cuts work into batches; the sampler chooses the samples of a pass when the pass begins.

    `Steps` continue after the previous work and always take whole batches. The end of a pass is
    omitted if it is too short for a batch; in random order, omitted samples differ from pass to
    pass. By default, `Epochs` begin a new pass and visit all of it, with a smaller last batch
    if necessary.

    A pass cut to `keep_ratio` costs that share of a full pass, including the probe of
    aggregated points: the probe reduces the number of samples.

    Args:
        sampler: Chooses the samples of each pass.
        budget: Number of points to probe before each pass; None for selections that need no
            losses.
        units: The units of shared data; None if `Units` are never requested.

    >>> from edgegossip.training.sampling.selection import Random
    >>> from edgegossip.contract.protocol import Epochs
    >>> stream = BatchStream(
    ...     AccuracyAwareSampler(num_samples=5, batch_size=2, selection=Random())
    ... )
    >>> [len(batch) for batch in stream.take(Epochs())]
    [2, 3]
    """

    def __init__(
        self,
        sampler: AccuracyAwareSampler,
        budget: ProbeBudget | None = None,
        units: UnitTable | None = None,
    ) -> None:
        self.sampler = sampler
        self._budget = budget
        self._units = units
        self._batch_size = sampler.batch_size
        self._batches: list[Batch] = []  # of the current pass
        self._sizes: list[int] = []  # of these batches
        self._position = 0  # number of batches already taken
        self._unpaid = 0.0  # cost of earlier work, not yet charged

    @property
    def epoch_cost(self) -> float:
        """Cost of a pass over all samples and of its probe, in samples."""
        return self.sampler.num_samples + self._probe_cost(1.0)

    def cost(self, work: Work, keep_ratio: float = 1.0, *, begins_pass: bool = True) -> float:
        """Cost of `take`, in samples, without side effects.

        If subsets are kept whole, the sizes of batches are unknown before a pass begins. The
        error of this estimate is charged to the next work.
        """
        return max(0.0, self._unpaid + self._cost(work, keep_ratio, begins_pass))

    def _cost(self, work: Work, keep_ratio: float, begins_pass: bool) -> float:
        if isinstance(work, Steps):
            return self._cost_of_steps(work.num_steps, keep_ratio)
        if isinstance(work, Units):
            share = self._share(work)
            sizes = self._future_sizes(keep_ratio, share)
            return self._probe_cost(keep_ratio * share) + sum(sizes)
        if not begins_pass and self._position < len(self._batches):
            left = self._sizes[self._position :]
            return sum(left[: _num_batches(left, work.share * sum(self._sizes))])
        sizes = self._future_sizes(keep_ratio)
        num_batches = _num_batches(sizes, work.share * sum(sizes))
        return self._probe_cost(keep_ratio) + sum(sizes[:num_batches])

    def take(
        self, work: Work, keep_ratio: float = 1.0, *, begins_pass: bool = True
    ) -> Iterator[Batch | Probe]:
        """Yield the batches of `work` in sequence, and a `Probe` before a pass begins.

        Answer a `Probe` with the sampler's `set_losses` before taking the next batch. Losses
        of samples, which some selections need, go to its `record`.

        Args:
            work: Amount of work.
            keep_ratio: Share of the data that a pass visits; see `Train`.
            begins_pass: As in `Train`.
        """
        cost = self._cost(work, keep_ratio, begins_pass)
        # `cost` has charged for this work, at most back to zero. Batches are added as they are
        # taken, so that only the error of the estimate stays for the next work.
        self._unpaid = min(0.0, self._unpaid + cost) - cost
        for part in self._take(work, keep_ratio, begins_pass):
            if isinstance(part, Batch):
                self._unpaid += len(part)
            yield part

    def upcoming(self, num_batches: int) -> list[Tensor]:
        """Positions of the next batches of this pass, as now cut; at most `num_batches`."""
        ahead = self._batches[self._position : self._position + num_batches]
        return [batch.positions for batch in ahead]

    @property
    def focus(self) -> float:
        """Share of the current pass that was chosen for its high loss, in [0, 1]."""
        return self.sampler.focus

    def resize(self, ratio: float) -> None:
        """Set the batch size to `ratio` times the initial size, from the next batch on.

        The rest of the current pass is cut anew, unless the selection keeps subsets whole.
        """
        size = min(self.sampler.num_samples, max(1, round(ratio * self._batch_size)))
        if size == self.sampler.batch_size:
            return
        self.sampler.batch_size = size
        left = self._batches[self._position :]
        if not left or self.sampler.selection.keeps_subsets_whole:
            return
        positions, weights = _joined(left)
        sizes = self.sampler.batch_sizes(len(positions))
        self._batches[self._position :] = cut_into_batches(positions, weights, sizes)
        self._sizes[self._position :] = sizes

    def _take(
        self, work: Work, keep_ratio: float, begins_pass: bool
    ) -> Iterator[Batch | Probe]:
        if isinstance(work, Steps):
            for _ in range(work.num_steps):
                # A smaller last batch is left out: its noisier step would count as much.
                if self._position >= _num_whole(self._sizes, self.sampler.batch_size):
                    yield from self._begin_pass(keep_ratio)
                yield self._next_batch()
            return
        if isinstance(work, Units):
            yield from self._begin_pass(keep_ratio, work)
            for _ in self._sizes:
                yield self._next_batch()
            return
        if begins_pass or self._position >= len(self._batches):
            yield from self._begin_pass(keep_ratio)
        left = self._sizes[self._position :]
        for _ in range(_num_batches(left, work.share * sum(self._sizes))):
            yield self._next_batch()

    def _next_batch(self) -> Batch:
        batch = self._batches[self._position]
        self._position += 1
        self.sampler.visit(batch)  # when taken, not when chosen: the end may be left out
        return batch

    def _begin_pass(self, keep_ratio: float, units: Units | None = None) -> Iterator[Probe]:
        share = self._share(units)
        if self._budget is not None:
            # Only now: the model has changed since the last pass, also within the same work.
            num_points = self._budget.num_due(keep_ratio * share)
            yield Probe(self.sampler.stalest_points(num_points))
            self._unpaid += self._probe_cost(keep_ratio * share)
        among = None if units is None else self._table.positions(units)
        self._batches = self.sampler.begin_epoch(self._num_due(keep_ratio, share), among)
        self._sizes = list(map(len, self._batches))
        self._position = 0

    # Costs.

    def _probe_cost(self, keep_ratio: float) -> float:
        return 0.0 if self._budget is None else self._budget.cost(keep_ratio)

    def _num_due(self, keep_ratio: float, share: float = 1.0) -> int:
        """Samples in a pass that costs `keep_ratio` of a full one, each with its probe.

        `share` is the share of all samples that the full pass visits.
        """
        whole = share * self.sampler.num_samples
        num_samples = keep_ratio * (whole + self._probe_cost(share))
        num_samples -= self._probe_cost(keep_ratio * share)
        return min(round(whole), self.sampler.at_least_two(num_samples))

    def _future_sizes(self, keep_ratio: float, share: float = 1.0) -> list[int]:
        return self.sampler.batch_sizes(self._num_due(keep_ratio, share))

    @property
    def _table(self) -> UnitTable:
        if self._units is None:
            raise LocalProtocolError(
                "there are no units to train on, because each worker has samples of its own; "
                "use partition=Shared()"
            )
        return self._units

    def _share(self, units: Units | None) -> float:
        """Share of all samples in these units."""
        return 1.0 if units is None else self._table.size(units) / self.sampler.num_samples

    def _cost_of_steps(self, num_steps: int, keep_ratio: float) -> float:
        batch_size = self.sampler.batch_size
        end = min(_num_whole(self._sizes, batch_size), self._position + num_steps)
        present = self._sizes[self._position : end]
        num_left = num_steps - len(present)
        if not num_left:
            return sum(present)
        future = self._future_sizes(keep_ratio)
        future = future[: _num_whole(future, batch_size)]
        num_passes, rest = divmod(num_left, len(future))
        probes = math.ceil(num_left / len(future)) * self._probe_cost(keep_ratio)
        return sum(present) + probes + num_passes * sum(future) + sum(future[:rest])

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        left = self._batches[self._position :]
        positions, weights = _joined(left) if left else (None, None)
        return {
            "sampler": self.sampler.state_dict(),
            "batch_size": self.sampler.batch_size,
            "unpaid": self._unpaid,
            "sizes": self._sizes,
            "position": self._position,
            "positions": positions,
            "weights": weights,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.sampler.batch_size = state["batch_size"]
        self._unpaid = state["unpaid"]
        self._sizes, self._position = list(state["sizes"]), state["position"]
        # Only the sizes of batches already taken matter.
        self._batches = [Batch(torch.empty(0, dtype=torch.int64))] * self._position
        left = self._sizes[self._position :]
        if left:
            self._batches += cut_into_batches(state["positions"], state["weights"], left)


def _joined(batches: list[Batch]) -> tuple[Tensor, Tensor | None]:
    """The samples of several batches, and their weights if they have any."""
    weights = [batch.weights for batch in batches if batch.weights is not None]
    positions = torch.cat([batch.positions for batch in batches])
    return positions, torch.cat(weights) if weights else None


def _num_batches(sizes: list[int], num_due: float) -> int:
    """Number of batches with `num_due` samples, rounded up, at least one."""
    total, num_batches = 0, 0
    # 0.07 * 100 is a hair above 7, which must not add an eighth sample.
    while num_batches < len(sizes) and (total < num_due - 1e-9 or not num_batches):
        total += sizes[num_batches]
        num_batches += 1
    return num_batches


def _num_whole(sizes: list[int], batch_size: int) -> int:
    """Number of a pass's batches that `Steps` uses: all except a smaller last batch."""
    has_small_end = len(sizes) > 1 and sizes[-1] < batch_size
    return len(sizes) - has_small_end
