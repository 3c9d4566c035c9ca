"""The look at aggregated points: what it costs, and whose turn it is."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.unit.test_sampler import HardestSubsets, aggregated
from torch import Tensor

from edgegossip.contract.protocol import Epochs, Steps
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.batches import BatchStream, Budget, Look
from edgegossip.training.sampling.sampler import AccuracyAwareSampler
from edgegossip.training.sampling.selection import Focused

NUM_SAMPLES, NUM_POINTS = 120, 12


class Model:
    """Whose loss on point i is i; notes what it is shown."""

    def __init__(self) -> None:
        self.looks: list[list[int]] = []

    def __call__(self, points: Tensor) -> Tensor:
        self.looks.append(points.tolist())
        return points.to(torch.float32)


def stream(max_cost: float | None = None) -> tuple[BatchStream, Model]:
    model = Model()
    sampler = AccuracyAwareSampler(
        aggregated([i % NUM_POINTS for i in range(NUM_SAMPLES)]),
        batch_size=10,
        selection=HardestSubsets(),
    )
    return BatchStream(sampler, Look(model, Budget(NUM_POINTS, max_cost))), model


def take(some: BatchStream, work: Epochs | Steps, keep_ratio: float = 1.0) -> int:
    return sum(map(len, some.take(work, keep_ratio)))


def go_on(some: BatchStream, share: float) -> int:
    return sum(map(len, some.take(Epochs(share), begins_pass=False)))


def test_a_point_costs_a_third_of_a_training_sample() -> None:
    assert Budget(12).cost(0.5) == pytest.approx(4.0)


def test_a_look_that_may_cost_less_sees_fewer_points() -> None:
    look = Budget(12, max_cost=2.0)
    assert look.cost(1.0) == pytest.approx(2.0)
    assert look.cost(0.5) == pytest.approx(1.0)
    assert look.cost(0.01) == pytest.approx(1 / 3)


def test_all_points_are_looked_at_before_each_pass_and_only_then() -> None:
    some, model = stream()
    take(some, Epochs(0.5))
    go_on(some, 0.5)
    assert model.looks == [list(range(NUM_POINTS))]
    take(some, Epochs())
    assert len(model.looks) == 2


def test_by_turns_all_points_are_looked_at() -> None:
    some, model = stream(max_cost=1.0)
    # Of points never looked at, any come first.
    for _ in range(4):
        take(some, Epochs())
    assert [len(points) for points in model.looks] == [3] * 4
    assert sorted(itertools.chain(*model.looks)) == list(range(NUM_POINTS))


def test_no_more_points_are_looked_at_than_the_selection_asks_for() -> None:
    points = aggregated([i % NUM_POINTS for i in range(NUM_SAMPLES)])
    for num_points, seen in ((5, 5), (100, NUM_POINTS)):
        model = Model()
        selection = Focused(num_points=num_points)
        some = AccuracyAware(selection=selection, look_share=None).stream_of(
            points, model, num_samples=NUM_SAMPLES, batch_size=10, key=(0,)
        )
        take(some, Epochs())
        assert [len(points) for points in model.looks] == [seen]


def test_a_whole_epoch_costs_its_samples_and_the_look() -> None:
    some, _ = stream()
    assert some.epoch_cost == some.cost(Epochs()) == pytest.approx(NUM_SAMPLES + 4)
    assert take(some, Epochs()) == NUM_SAMPLES


@pytest.mark.parametrize("max_cost", [None, 2.0])
@pytest.mark.parametrize("keep_ratio", [0.25, 0.5, 0.8])
def test_a_cut_pass_costs_its_share_of_a_whole_one(
    keep_ratio: float, max_cost: float | None
) -> None:
    some, _ = stream(max_cost)
    cost = some.cost(Epochs(), keep_ratio)
    assert cost == pytest.approx(keep_ratio * some.epoch_cost, abs=0.5)
    # The look is paid for with samples.
    look = Budget(NUM_POINTS, max_cost).cost(keep_ratio)
    assert take(some, Epochs(), keep_ratio) == round(cost - look)


def test_a_look_dearer_than_the_share_leaves_two_samples() -> None:
    some, _ = stream()
    assert take(some, Epochs(), 0.01) == 2


def test_going_on_costs_no_look() -> None:
    some, _ = stream()
    take(some, Epochs(0.5))
    assert some.cost(Epochs(0.5), begins_pass=False) == 60
    go_on(some, 0.5)
    assert some.cost(Epochs(0.5), begins_pass=False) == pytest.approx(64)  # the next pass


def test_steps_look_when_they_begin_a_pass() -> None:
    some, model = stream()
    assert some.cost(Steps(3)) == pytest.approx(3 * 10 + 4)
    take(some, Steps(3))
    assert some.cost(Steps(3)) == pytest.approx(3 * 10)
    assert len(model.looks) == 1


@pytest.mark.parametrize("look_share", [0.0, 1.5, -1.0])
def test_a_share_out_of_range_is_refused(look_share: float) -> None:
    with pytest.raises(ValueError, match=r"look_share must be in \(0, 1\] or None, got"):
        AccuracyAware(look_share=look_share)
