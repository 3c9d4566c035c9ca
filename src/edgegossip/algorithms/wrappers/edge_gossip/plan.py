"""An epoch or a round of steps, done in blocks so that it ends on time at changing speeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.algorithms.wrappers.pieces import Pieces
from edgegossip.contract import Epochs, Layout, Seconds, Steps, Train, Trained

TOLERANCE = 0.02
"""Tolerated deviation from a plan, as a share of the epoch; batches and forecasts are inexact
anyway.
"""

MOST_BLOCKS = 12
"""Ratio of the first block's size to the smallest, which bounds the number of blocks."""


SHORTEST_BLOCK: Seconds = 0.125
"""Training that shows a speed; a monitor measures in such stretches, too."""


def differ(one: float, other: float) -> bool:
    """Whether two speeds or durations differ by more than a tenth; measurements hardly do."""
    return abs(one - other) > 0.1 * max(one, other)


@dataclass(frozen=True, slots=True)
class Correction:
    r"""Factor for an epoch's change of the parameters, from the share of data that was visited.

    Attributes:
        mean_keep_ratio: :math:`\bar r`, the mean share of all training workers; None (no
            correction) if it is unknown.
        exponent: :math:`\beta`; see `EdgeGossip`.
    """

    mean_keep_ratio: float | None = None
    exponent: float = 0.0

    def factor(self, kept: float, focus: float) -> float:
        r"""Return :math:`(\bar r / r)^{\beta (1 - f)}`.

        Args:
            kept: The share that was actually done, :math:`r`; the planned share may be wrong
                after a short slowdown.
            focus: :math:`f`, the part of this share that was chosen for its high loss.
        """
        if self.mean_keep_ratio is None:
            return 1.0
        return float((self.mean_keep_ratio / kept) ** (self.exponent * (1 - focus)))


@dataclass(slots=True, kw_only=True, eq=False)
class EpochPlan(Pieces):
    """Plan for one epoch: the work, its deadline, and the work done so far.

    Attributes:
        keep_ratio: Share of the worker's data that the pass visits.
        epoch_cost: Cost of a pass over all data, in training samples.
        cost: Total work, in training samples.
        deadline: Planned end.
        block_share: Share of the remaining work that the next block does, in (0, 1].
        pass_samples: Total samples that the pass visits; 0 before the first block.
        correction: Factor for the change of the parameters.
        layout: Layout of `params`; see `Started`.
        has_changed: Whether the amount of work has been adjusted since the plan was made.
    """

    keep_ratio: float
    epoch_cost: float
    cost: float
    deadline: Seconds
    block_share: float
    pass_samples: float = 0.0
    correction: Correction = Correction()
    layout: Layout | None = None
    has_changed: bool = False

    @classmethod
    def begin(
        cls,
        train: Train,
        *,
        keep_ratio: float,
        epoch_cost: float,
        throughput: float,
        block_share: float,
        now: Seconds,
        correction: Correction = Correction(),
        layout: Layout | None = None,
    ) -> EpochPlan:
        """Plan `train` for this predicted `throughput`, in training samples per second."""
        assert isinstance(train.work, Epochs)
        cost = train.work.share * keep_ratio * epoch_cost
        return cls(
            train=train,
            keep_ratio=keep_ratio,
            epoch_cost=epoch_cost,
            cost=cost,
            deadline=now + cost / throughput,
            start=now,
            block_share=block_share,
            params=train.params,
            correction=correction,
            layout=layout,
        )

    def first(self) -> Train:
        """The first block, which begins the pass unless the request continues one."""
        work = self.train.work
        assert isinstance(work, Epochs)
        share = work.share * self.block_share
        return self._train(share, begins_pass=self.train.begins_pass)

    def account(self, event: Trained) -> None:
        """Add the work of a block."""
        if not self.num_steps:  # the first block paid for the look at aggregated points
            look_cost = max(0.0, event.cost - event.num_samples)
            self.pass_samples = self.keep_ratio * self.epoch_cost - look_cost
        self.add(event)

    @property
    def is_done(self) -> bool:
        """Whether less than one sample remains or, after a change of plan, less than half a
        batch.
        """
        return self.cost - self.done < self._least

    def next(self, throughput: float, now: Seconds) -> Train | None:
        """The next block at this predicted speed; None if too little work remains.

        Args:
            throughput: Training samples per second.
            now: Time on the worker's clock.
        """
        left = self.cost - self.done
        # The deadline stays: the others have planned for it. The amount of work gives way.
        affordable = throughput * max(0.0, self.deadline - now)
        if abs(affordable - left) > TOLERANCE * self.cost:
            # Small deviations are left alone, or an exact forecast would never end a pass
            # with its planned samples.
            left = affordable
            self.cost, self.has_changed = self.done + left, True
        if left < self._least:
            return None
        # Blocks shrink with the remaining work, so the last ones correct the end most finely;
        # the limit keeps them from shrinking forever. A remainder joins the last block.
        block = self.block_share * max(left, self.cost / MOST_BLOCKS)
        amount = left if left < 1.5 * block else block
        share = min(1.0, amount / self.pass_samples)
        return self._train(share, begins_pass=False)

    def result(self, now: Seconds) -> Trained:
        """The result of the requested training, combined from all blocks."""
        return self.total(now, self._corrected_params())

    def _corrected_params(self) -> Tensor:
        assert isinstance(self.train.work, Epochs)
        kept = self.done / (self.train.work.share * self.epoch_cost)
        factor = self.correction.factor(kept, self.metrics.get("focus", 0.0))
        if factor == 1.0:
            return self.params  # bit for bit, which `lerp` would not be
        # Statistics are averages already: extrapolated, a variance could become negative.
        params = torch.lerp(self.train.params, self.params, factor)
        return (
            params if self.layout is None else self.layout.with_statistics(params, self.params)
        )

    @property
    def _least(self) -> float:
        # The last batch may be small, as planned. For less than half a batch, training would
        # begin another pass.
        return 0.5 * self.num_samples / self.num_steps if self.has_changed else 1.0

    def _train(self, share: float, *, begins_pass: bool) -> Train:
        return self.piece(Epochs(share), keep_ratio=self.keep_ratio, begins_pass=begins_pass)


@dataclass(slots=True, kw_only=True, eq=False)
class RoundPlan(Pieces):
    """Plan for the steps of a round: as many as fit into the time for which it was made.

    A block does half of the steps that are left, at least a quarter of the planned ones. How
    long it took shows for how many more there is time, without a forecast.

    Attributes:
        num_planned: Steps that were planned.
        left: Steps that are left.
        throughput: Predicted speed, in training samples per second.
        shortest: Steps of the shortest block.
        most: Most steps that the round may have at a higher speed.
    """

    num_planned: int
    left: int
    throughput: float
    shortest: int
    most: int

    @classmethod
    def begin(
        cls,
        train: Train,
        num_steps: int,
        *,
        throughput: float,
        step_cost: float,
        most: int,
        now: Seconds,
    ) -> RoundPlan:
        """Plan `num_steps` at this predicted `throughput`.

        Args:
            train: The request.
            num_steps: Steps to take, at least 1.
            throughput: Training samples per second, above 0.
            step_cost: Rough cost of a step, in training samples; 0 if it is not known yet, so
                the round is one block.
            most: Most steps that the round may have, whatever its speed.
            now: Time on the worker's clock.
        """
        in_shortest = SHORTEST_BLOCK * throughput / step_cost if step_cost else math.inf
        # Each block begins and ends a training: at most three if all goes as planned.
        in_shortest = max(in_shortest, num_steps / 4)
        return cls(
            train=train,
            start=now,
            params=train.params,
            num_planned=num_steps,
            left=num_steps,
            throughput=throughput,
            shortest=math.ceil(min(in_shortest, num_steps)),
            # If the speed rises by more, the next round will be longer.
            most=max(num_steps, min(most, 2 * num_steps)),
        )

    def block(self) -> Train:
        """The next block."""
        half = -(-self.left // 2)
        return self.piece(Steps(self.left if half < self.shortest else half))

    def account(self, event: Trained, now: Seconds) -> None:
        """Add the steps of a block, and plan the others at the speed that it had."""
        self.add(event)
        self.left = max(0, self.left - event.num_steps)
        if event.is_skipped:
            self.left = 0  # there is nothing to train on
        if not self.left or event.seconds <= 0 or not self.num_samples:
            return
        # From these samples, because the batches of other rounds may have another size.
        seconds_per_step = self.num_samples / self.num_steps / self.throughput
        elapsed = now - self.start
        if not differ(elapsed, self.num_steps * seconds_per_step):
            return  # the time to begin and end a training, or a measurement's error
        time_left = self.start + self.num_planned * seconds_per_step - now
        affordable = time_left * event.num_steps / event.seconds
        self.left = max(0, round(min(affordable, self.most - self.num_steps)))

    def result(self, now: Seconds) -> Trained:
        """The result of the requested training, combined from all blocks."""
        return self.total(now, self.params)
