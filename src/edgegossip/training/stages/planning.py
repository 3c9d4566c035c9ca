"""Planning of cuts that make the slowest machine or link as fast as possible."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from itertools import accumulate
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_range, check_ranges
from edgegossip.models.dropout import replace_dropout
from edgegossip.models.flops import OVERHEAD, training_flops
from edgegossip.training.stages.cutting import activations

Bandwidth: TypeAlias = float | tuple[float, float]
"""Bytes per second of a link: shared by both directions, or separate as (forward, back)."""

StageOverhead: TypeAlias = Callable[[int, int], float]
"""``(first, last)``: work of a stage beyond its blocks ``first`` to ``last - 1``."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block, for one training sample.

    Args:
        work: Work of the forward and the backward pass, in FLOPs, or in seconds on a reference
            machine.
        num_outputs: Number of entries of the block's output activations, at least 0.
        num_bytes: Size of these activations in bytes, at least 0.
        num_params: Number of trainable parameters, at least 0.

    Raises:
        ValueError: If a number is out of range.
    """

    work: float
    num_outputs: int
    num_bytes: int
    num_params: int

    def __post_init__(self) -> None:
        words = dict.fromkeys(("num_outputs", "num_bytes", "num_params"), "at least 0")
        check_ranges(self, work="at least 0 and finite", **words)


@dataclass(frozen=True)
class CutPlan:
    """Cuts, and the resulting time per sample of each stage and link.

    Attributes:
        at: Index of the first block of each stage except the first, for `cut` and
            `stage_models`.
        stage_seconds: Seconds to train one sample, for each stage.
        link_seconds: Seconds to send a sample's activations and gradients, for each link.
        bottleneck: The largest of these times. A pipeline whose stages all work at once trains
            ``1 / bottleneck`` samples per second.
    """

    at: tuple[int, ...]
    stage_seconds: tuple[Seconds, ...]
    link_seconds: tuple[Seconds, ...]
    bottleneck: Seconds


def block_costs(blocks: Sequence[nn.Module], sample: Tensor) -> tuple[BlockCost, ...]:
    """Count the cost of each block, with its work in FLOPs.

    As in `training_flops`, a backward pass counts as two forward passes. Only matrix products
    and convolutions count; pooling is free.

    Args:
        blocks: Result of `blocks`; modes and buffers are not changed.
        sample: [1, ...] one prepared sample.

    Raises:
        ValueError: If `sample` is not exactly one sample.

    >>> model = nn.Sequential(nn.Linear(10, 5), nn.ReLU())
    >>> for cost in block_costs([*model], torch.zeros(1, 10)):
    ...     print(cost)
    BlockCost(work=300.0, num_outputs=5, num_bytes=20, num_params=55)
    BlockCost(work=0.0, num_outputs=5, num_bytes=20, num_params=0)
    """
    if len(sample) != 1:
        raise ValueError(f"costs are those of one sample, [1, ...], got {[*sample.shape]}")
    outputs = activations(blocks, sample)
    inputs = (sample, *outputs)
    return tuple(
        BlockCost(
            # The whole model's overhead belongs to no block: see `plan_cut`.
            work=training_flops(copy.deepcopy(block), x.clone()) - OVERHEAD,
            num_outputs=y.numel(),
            num_bytes=y.numel() * y.element_size(),
            num_params=sum(each.numel() for each in block.parameters() if each.requires_grad),
        )
        for block, x, y in zip(blocks, inputs, outputs, strict=False)
    )


def measured_costs(
    blocks: Sequence[nn.Module],
    sample: Tensor,
    batch_size: int,
    *,
    num_repeats: int = 11,
    clock: Callable[[], Seconds] = time.perf_counter,
) -> tuple[BlockCost, ...]:
    """Measure the cost of each block, with its work in seconds on one thread of this machine.

    The work is the median time of `num_repeats` forward and backward passes on a copy of the
    block, after a warm-up.

    Args:
        blocks: Result of `blocks`.
        sample: [1, ...] one prepared sample, repeated to form batches.
        batch_size: Samples per batch, at least 1; with batch normalization at least 2.
        num_repeats: Number of measured passes, at least 1.
        clock: Clock in seconds.

    Raises:
        ValueError: If a number is out of range, or `sample` is not exactly one sample.
    """
    check_range("batch_size", batch_size, "at least 1")
    check_range("num_repeats", num_repeats, "at least 1")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        costs = block_costs(blocks, sample)
        x = torch.cat([sample] * batch_size)
        work = []
        for index, block in enumerate(blocks):
            copied = nn.Sequential(copy.deepcopy(block)).train()
            replace_dropout(copied, torch.Generator().manual_seed(0))
            needs_gradient = index > 0 and x.is_floating_point()  # no block below the first
            passes = [_time(copied, x, needs_gradient, clock) for _ in range(num_repeats + 1)]
            work.append(statistics.median(passes[1:]) / batch_size)
            [x] = activations([copied.eval()], x)
    finally:
        torch.set_num_threads(num_threads)
    return tuple(replace(cost, work=each) for cost, each in zip(costs, work, strict=True))


def _time(
    block: nn.Module, x: Tensor, needs_gradient: bool, clock: Callable[[], Seconds]
) -> Seconds:
    x = x.detach().requires_grad_(needs_gradient).clone()  # it may write to its input
    begin = clock()
    y = block(x)
    if y.requires_grad:
        torch.autograd.backward(y, torch.ones_like(y))
    return clock() - begin


def plan_cut(
    costs: Sequence[BlockCost],
    speeds: Sequence[float],
    bandwidths: Sequence[Bandwidth] = (),
    *,
    return_share: float = 1.0,
    stage_overhead: StageOverhead = lambda first, last: 0.0,
) -> CutPlan:
    r"""Minimize the time per sample of the slowest stage or link.

    Machines and links all work at once, each on a different batch, so the slowest sets the
    pace. Block :math:`i` has work :math:`w_i`, machine :math:`k` has speed :math:`s_k`, and the
    link into machine :math:`k` needs time :math:`d_k(i)` for the output of block
    :math:`i - 1`. Then

    .. math:: T_k(j) = \min_{i < j} \max(T_{k-1}(i), d_k(i), (w_i + ... + w_{j-1}) / s_k)

    is the lowest possible time per sample of the slowest machine or link, with the first
    :math:`j` blocks on machines 0 to :math:`k`. The search takes O(K n^2) steps for K machines
    and n blocks. Each machine gets a block with parameters, because it would otherwise have
    nothing to train. Ties go to the cut with the fewest bytes, and then to the earliest cuts.
    Latency does not matter, because it delays batches without reducing their rate. The plan
    assumes one message per batch and direction at a link's full bandwidth; it ignores headers,
    an uplink that two links share, and stages that wait for each other.

    Args:
        costs: Costs of the blocks, in order.
        speeds: Speeds of the machines, in the order of their stages, above 0: work per second.
            For work in FLOPs these are FLOP/s; for measured work, they are relative to the
            measured machine.
        bandwidths: Bandwidth of the link from each machine to the next: bytes/s shared by both
            directions, as with radio, or a pair (forward, back).
        return_share: Share of the batches whose gradients are returned, in [0, 1]; it may be
            below 1 for synthetic gradients.
        stage_overhead: ``stage_overhead(first, last)``: work of a stage in addition to its
            blocks ``first`` to ``last - 1``, e.g. that of a module for synthetic gradients.

    Raises:
        ValueError: If a number is out of range, or there are more machines than blocks with
            parameters.

    >>> costs = [BlockCost(work, 250, 1000, 9) for work in (1.0, 1.0, 1.0, 3.0)]
    >>> plan_cut(costs, speeds=[1.0, 2.0], bandwidths=[1e4])
    CutPlan(at=(2,), stage_seconds=(2.0, 2.0), link_seconds=(0.2,), bottleneck=2.0)
    """
    times = _Times(costs, speeds, bandwidths, return_share, stage_overhead)
    shape = (len(costs), len(speeds))

    def slowest(before: float, machine: int, first: int, last: int) -> float:
        return max(before, times.slowest(machine, first, last))

    bottleneck = _best(shape, 0.0, slowest)
    assert bottleneck is not None

    def fewest(
        before: tuple[int, tuple[int, ...]], machine: int, first: int, last: int
    ) -> tuple[int, tuple[int, ...]] | None:
        if times.slowest(machine, first, last) > bottleneck:
            return None
        sent = costs[first - 1].num_bytes if machine else 0
        return before[0] + sent, (*before[1], first)

    nothing: tuple[int, tuple[int, ...]] = (0, ())
    found = _best(shape, nothing, fewest)
    assert found is not None  # at least the cut with that bottleneck
    starts = found[1]
    ends = (*starts[1:], len(costs))
    return CutPlan(
        at=starts[1:],
        stage_seconds=tuple(map(times.stage, range(len(speeds)), starts, ends)),
        link_seconds=tuple(map(times.link, range(1, len(speeds)), starts[1:])),
        bottleneck=bottleneck,
    )


def _best(
    shape: tuple[int, int],
    start: _T,
    extend: Callable[[_T, int, int, int], _T | None],
) -> _T | None:
    """The least value of any assignment of blocks to machines; None if none is allowed.

    Args:
        shape: Numbers of blocks and machines.
        start: Value before any block is assigned.
        extend: ``extend(value, machine, first, last)``: the value when `machine` gets blocks
            ``first`` to ``last - 1`` next, nondecreasing in `value`; None if not allowed.
    """
    num_blocks, num_machines = shape
    best = {0: start}  # by the number of assigned blocks
    for machine in range(num_machines):
        extended: dict[int, _T] = {}
        for last in range(machine + 1, num_blocks - num_machines + machine + 2):
            values = [
                value
                for first, before in best.items()
                if first < last and (value := extend(before, machine, first, last)) is not None
            ]
            if values:
                extended[last] = min(values)  # type: ignore[type-var]
        best = extended
    return best.get(num_blocks)


@dataclass(frozen=True)
class _Times:
    """Seconds per sample of any stage on any machine, and of any link with any cut."""

    costs: Sequence[BlockCost]
    speeds: Sequence[float]
    bandwidths: Sequence[Bandwidth]
    return_share: float
    stage_overhead: StageOverhead

    def __post_init__(self) -> None:
        num_speeds = len(self.speeds)
        num_most = sum(cost.num_params > 0 for cost in self.costs)
        if not 1 <= num_speeds <= num_most:
            raise ValueError(
                f"{num_speeds} machines cannot share {num_most} blocks with parameters, as "
                f"each needs one; give 1 to {num_most} speeds, or list finer blocks (is_flat)"
            )
        if len(self.bandwidths) != num_speeds - 1:
            raise ValueError(
                f"{num_speeds} machines in a row have {num_speeds - 1} links between them, got "
                f"{len(self.bandwidths)} bandwidths; give one for each link"
            )
        for machine, speed in enumerate(self.speeds):
            check_range(f"speeds[{machine}]", speed, "above 0 and finite")
        for link, bandwidth in enumerate(self.bandwidths):
            for each in bandwidth if isinstance(bandwidth, tuple) else (bandwidth,):
                check_range(f"bandwidths[{link}]", each, "above 0 bytes/s")
        check_range("return_share", self.return_share, "in [0, 1]")

    @cached_property
    def _work(self) -> StageOverhead:
        num_params = [*accumulate((cost.num_params for cost in self.costs), initial=0)]
        # Exact, so that equal loads are equal, whatever comes before them.
        sums = [*accumulate((Fraction(cost.work) for cost in self.costs), initial=Fraction(0))]

        def work(first: int, last: int) -> float:
            if num_params[first] == num_params[last]:
                return math.inf  # nothing to train
            overhead = self.stage_overhead(first, last)
            check_range(f"stage_overhead({first}, {last})", overhead, "at least 0 and finite")
            return float(sums[last] - sums[first]) + overhead

        return cache(work)

    def stage(self, machine: int, first: int, last: int) -> Seconds:
        return self._work(first, last) / self.speeds[machine]

    def link(self, machine: int, first: int) -> Seconds:
        """Seconds per sample on the link into `machine`, whose first block is `first`."""
        num_bytes = self.costs[first - 1].num_bytes
        bandwidth = self.bandwidths[machine - 1]
        if isinstance(bandwidth, tuple):
            forward, back = bandwidth
            return max(num_bytes / forward, self.return_share * num_bytes / back)
        return (1.0 + self.return_share) * num_bytes / bandwidth

    def slowest(self, machine: int, first: int, last: int) -> Seconds:
        seconds = self.stage(machine, first, last)
        return max(seconds, self.link(machine, first)) if machine else seconds
