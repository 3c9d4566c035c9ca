"""The cut that is planned is the best there is, and costs are those of the blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from edgegossip.models import eight_layers
from edgegossip.models.flops import OVERHEAD, training_flops
from edgegossip.training.stages.cutting import activations, blocks, boundaries, cut
from edgegossip.training.stages.planning import (
    Bandwidth,
    BlockCost,
    CutPlan,
    block_costs,
    measured_costs,
    plan_cut,
)


def costs(
    *work: float, num_bytes: Sequence[int] | int = 0, num_params: Sequence[int] | int = 1
) -> list[BlockCost]:
    sizes = [num_bytes] * len(work) if isinstance(num_bytes, int) else num_bytes
    params = [num_params] * len(work) if isinstance(num_params, int) else num_params
    return [BlockCost(w, s, s, p) for w, s, p in zip(work, sizes, params, strict=True)]


@dataclass(frozen=True)
class World:
    """All that a cut is planned from; numbers such that no time is rounded."""

    work: list[int]
    num_bytes: list[int]
    num_params: list[int]
    speeds: list[float]
    bandwidths: list[Bandwidth]
    return_share: float
    overheads: dict[tuple[int, int], int]

    def overhead(self, first: int, last: int) -> float:
        return float(self.overheads.get((first, last), 0))

    def plan(self) -> CutPlan:
        return plan_cut(
            costs(*self.work, num_bytes=self.num_bytes, num_params=self.num_params),
            self.speeds,
            self.bandwidths,
            return_share=self.return_share,
            stage_overhead=self.overhead,
        )

    def link_seconds(self, link: int, num_bytes: int) -> float:
        bandwidth = self.bandwidths[link]
        back = self.return_share * num_bytes
        if isinstance(bandwidth, tuple):
            return max(num_bytes / bandwidth[0], back / bandwidth[1])
        return (num_bytes + back) / bandwidth

    def cut_at(self, at: tuple[int, ...]) -> CutPlan:
        """The times of one cut, by hand."""
        stages = []
        for speed, (first, last) in zip(
            self.speeds, itertools.pairwise((0, *at, len(self.work))), strict=True
        ):
            work = sum(self.work[first:last]) + self.overhead(first, last)
            stages.append(work / speed)
        links = [self.link_seconds(k, self.num_bytes[i - 1]) for k, i in enumerate(at)]
        return CutPlan(at, tuple(stages), tuple(links), max(stages + links))

    def sent(self, plan: CutPlan) -> int:
        return sum(self.num_bytes[i - 1] for i in plan.at)

    def all_train(self, at: tuple[int, ...]) -> bool:
        stages = itertools.pairwise((0, *at, len(self.work)))
        return all(any(self.num_params[first:last]) for first, last in stages)

    def best_of_all(self) -> CutPlan:
        cuts = itertools.combinations(range(1, len(self.work)), len(self.speeds) - 1)
        every = [self.cut_at(at) for at in cuts if self.all_train(at)]
        return min(every, key=lambda plan: (plan.bottleneck, self.sent(plan), plan.at))


POWERS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0])


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num_blocks = draw(st.integers(1, 8))
    num_params = draw(st.lists(st.integers(0, 2), min_size=num_blocks, max_size=num_blocks))
    num_params[0] = 1  # somebody has something to train
    num_machines = draw(st.integers(1, min(4, sum(map(bool, num_params)))))
    small = st.integers(0, 6)  # few values, so that there are ties
    per_block = st.lists(small, min_size=num_blocks, max_size=num_blocks)
    bandwidths: st.SearchStrategy[Bandwidth] = st.one_of(
        POWERS, st.just(math.inf), st.tuples(POWERS, POWERS)
    )
    return World(
        work=draw(per_block),
        num_bytes=draw(per_block),
        num_params=num_params,
        speeds=draw(st.lists(POWERS, min_size=num_machines, max_size=num_machines)),
        bandwidths=draw(
            st.lists(bandwidths, min_size=num_machines - 1, max_size=num_machines - 1)
        ),
        return_share=draw(st.sampled_from([0.0, 0.5, 1.0])),
        overheads=draw(st.dictionaries(st.tuples(small, st.integers(1, 8)), small)),
    )


@given(worlds())
def test_no_cut_is_better_and_of_equal_ones_the_same_is_taken(world: World) -> None:
    assert world.plan() == world.best_of_all()


@given(
    st.lists(st.floats(0, 1e3), min_size=3, max_size=8),
    st.lists(st.floats(0.1, 1e3), min_size=3, max_size=3),
)
def test_no_cut_is_faster_whatever_the_numbers(work: list[float], speeds: list[float]) -> None:
    plan = plan_cut(costs(*work), speeds, [1.0, 1.0])
    cuts = itertools.combinations(range(1, len(work)), 2)
    slowest = [
        max(
            math.fsum(work[i:j]) / speed
            for speed, (i, j) in zip(
                speeds, itertools.pairwise((0, *at, len(work))), strict=True
            )
        )
        for at in cuts
    ]
    assert plan.bottleneck == pytest.approx(min(slowest))
    assert plan.bottleneck == max(plan.stage_seconds)


# Single rules.


def test_twice_as_fast_a_machine_gets_twice_the_work() -> None:
    assert plan_cut(costs(*[1.0] * 6), [1.0, 2.0], [1.0]).at == (2,)
    assert plan_cut(costs(*[1.0] * 6), [2.0, 1.0], [1.0]).at == (4,)


def test_a_thin_link_moves_the_cut_to_where_little_passes() -> None:
    blocks_ = costs(1.0, 1.0, 1.0, 1.0, num_bytes=[1, 90, 90, 0])
    assert plan_cut(blocks_, [1.0, 1.0], [1e3]).at == (2,)
    assert plan_cut(blocks_, [1.0, 1.0], [10.0]).at == (1,)


def test_gradients_that_seldom_go_back_need_less_of_a_link() -> None:
    blocks_ = costs(1.0, 1.0, num_bytes=8)
    shared, own = [
        [
            plan_cut(blocks_, [1.0, 1.0], [link], return_share=share).link_seconds[0]
            for share in (0.0, 0.5, 1.0)
        ]
        for link in (4.0, (4.0, 1.0))
    ]
    assert shared == [2.0, 3.0, 4.0]
    assert own == [2.0, 4.0, 8.0]


def test_of_equal_cuts_the_one_with_the_fewest_bytes_is_taken_then_the_first() -> None:
    blocks_ = costs(4.0, 0.0, 0.0, 4.0, num_bytes=[3, 2, 3, 0])
    assert plan_cut(blocks_, [1.0, 1.0], [100.0]).at == (2,)
    assert plan_cut(costs(4.0, 0.0, 0.0, 4.0), [1.0, 1.0], [100.0]).at == (1,)
    # The first two machines alone would rather be cut where it is fast, and much is sent.
    blocks_ = costs(1.0, 1.0, 9.0, num_bytes=[5, 1, 0])
    plan = plan_cut([*blocks_, *costs(0.0)], [1.0, 1.0, 1.0], [100.0, 100.0])
    assert plan.at == (2, 3)
    assert plan.bottleneck == 9.0


def test_equal_loads_are_equal_whatever_comes_before_them() -> None:
    """As differences of running sums in floating point, 0.1 + 0.2 would not always be that."""
    blocks_ = costs(0.1, 0.2, 1e9, 0.1, 0.2, num_bytes=1)
    plan = plan_cut(blocks_, [1.0, 1.0, 1.0], [100.0, 100.0])
    assert plan.stage_seconds == (0.1 + 0.2, 1e9, 0.1 + 0.2)


def test_what_a_stage_costs_besides_its_blocks_counts() -> None:
    def overhead(first: int, last: int) -> float:
        return 2.0 if first == 0 else 0.0

    assert plan_cut(costs(*[1.0] * 6), [1.0, 1.0], [1.0]).at == (3,)
    plan = plan_cut(costs(*[1.0] * 6), [1.0, 1.0], [1.0], stage_overhead=overhead)
    assert plan.stage_seconds == (4.0, 4.0)
    assert plan.at == (2,)


def test_one_machine_gets_all_and_as_many_as_blocks_get_one_each() -> None:
    assert plan_cut(costs(1.0, 2.0), [2.0]) == CutPlan((), (1.5,), (), 1.5)
    assert plan_cut(costs(1.0, 9.0, 0.0), [1.0] * 3, [1.0] * 2).at == (1, 2)


def test_every_machine_gets_something_to_train() -> None:
    blocks_ = costs(5.0, 5.0, 1.0, num_params=[1, 0, 1])
    assert plan_cut(blocks_, [1.0, 1.0], [1.0]).stage_seconds == (5.0, 6.0)
    with pytest.raises(ValueError, match="3 machines cannot share 2 blocks with parameters"):
        plan_cut(blocks_, [1.0] * 3, [1.0] * 2)


def test_a_plan_is_made_for_a_hundred_blocks() -> None:
    work = [float(1 + i * 7 % 11) for i in range(100)]
    plan = plan_cut(costs(*work, num_bytes=1), [1.0, 3.0, 2.0, 1.0], [1e3] * 3)
    assert sum(work) / 7 <= plan.bottleneck < sum(work) / 7 + 11


@pytest.mark.parametrize(
    ("speeds", "bandwidths", "return_share", "message"),
    [
        (
            [1.0] * 4,
            [1.0] * 3,
            1.0,
            "4 machines cannot share 3 blocks with parameters.* 1 to 3 ",
        ),
        ([], [], 1.0, "0 machines cannot share"),
        ([1.0, 1.0], [], 1.0, "2 machines in a row have 1 links between them, got 0"),
        ([1.0, 0.0], [1.0], 1.0, r"speeds\[1\] must be above 0 and finite, got 0.0"),
        ([math.inf], [], 1.0, r"speeds\[0\] must be above 0 and finite"),
        ([1.0, 1.0], [0.0], 1.0, r"bandwidths\[0\] must be above 0 bytes/s"),
        ([1.0, 1.0], [(1.0, -1.0)], 1.0, r"bandwidths\[0\] must be above 0 bytes/s, got -1.0"),
        ([1.0, 1.0], [1.0], 1.5, r"return_share must be in \[0, 1\], got 1.5"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    speeds: list[float], bandwidths: list[Bandwidth], return_share: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_cut(costs(1.0, 1.0, 1.0), speeds, bandwidths, return_share=return_share)


def test_costs_and_overheads_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="work must be at least 0 and finite, got nan"):
        costs(math.nan)
    with pytest.raises(ValueError, match="num_bytes must be at least 0, got -1"):
        BlockCost(1.0, 0, -1, 0)
    with pytest.raises(ValueError, match=r"stage_overhead\(0, 1\) must be at least 0"):
        plan_cut(costs(1.0), [1.0], stage_overhead=lambda first, last: -1.0)


# Costs of blocks.


def test_costs_of_blocks_add_up_to_those_of_the_model() -> None:
    model = eight_layers((3, 16, 16), 10, width=0.25)
    x = torch.zeros(1, 3, 16, 16)
    found = block_costs(blocks(model), x)
    assert sum(cost.work for cost in found) == training_flops(model, x) - OVERHEAD
    assert sum(cost.num_params for cost in found) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert [cost.num_outputs for cost in found] == [2048, 512, 1024, 256, 64, 32, 16, 10]
    assert all(cost.num_bytes == 4 * cost.num_outputs for cost in found)
    assert found[1].work == 3 * 2 * (16 * 16) * (8 * 8 * 9)  # multiply and add, three passes
    flat = block_costs(blocks(model, is_flat=True), x)
    assert sum(cost.work for cost in flat) == sum(cost.work for cost in found)


def test_costs_are_those_of_one_sample() -> None:
    with pytest.raises(ValueError, match=r"costs are those of one sample, .* got \[2, 4\]"):
        block_costs([nn.Linear(4, 4)], torch.zeros(2, 4))


def test_measured_costs_are_medians_of_a_sample_on_one_thread() -> None:
    """A clock that says how long each pass takes: the first is not counted."""
    model = nn.Sequential(nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(4, 3)).eval()
    passes = [99.0, 2.0, 4.0, 60.0] * 3
    times = iter([time for seconds in passes for time in (0.0, seconds)])
    threads = []

    def clock() -> float:
        threads.append(torch.get_num_threads())
        return next(times)

    before = torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        found = measured_costs([*model], torch.ones(1, 4), 8, num_repeats=3, clock=clock)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert [cost.work for cost in found] == [4.0 / 8] * 3
    assert {*threads} == {1}
    assert found[2].num_bytes == 12
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert model[2].weight.grad is None


def test_a_model_is_cut_as_planned() -> None:
    model, x = eight_layers((3, 16, 16), 10, width=0.25), torch.zeros(1, 3, 16, 16)
    plan = plan_cut(block_costs(blocks(model), x), [1e9, 2e9, 1e9], [1e7, 1e7])
    stages = cut(model, plan.at)
    inputs = [x, *activations(stages, x)]
    flops = [
        training_flops(stage, y) - OVERHEAD for stage, y in zip(stages, inputs, strict=False)
    ]
    assert plan.stage_seconds == (flops[0] / 1e9, flops[1] / 2e9, flops[2] / 1e9)
    sent = [math.prod(shape) for shape in boundaries(stages, x)]
    assert plan.link_seconds == tuple(2 * 4 * each / 1e7 for each in sent)
