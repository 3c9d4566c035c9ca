"""The probe of aggregated points: what it costs, and whose turn it is."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.unit.test_sampler import HardestSubsets, aggregated

from edgegossip.contract.protocol import Epochs, Steps
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.batches import BatchStream, ProbeBudget
from edgegossip.training.sampling.sampler import AccuracyAwareSampler, Batch
from edgegossip.training.sampling.selection import Focused

NUM_SAMPLES, NUM_POINTS = 120, 12


class Model:
    """Takes batches of a stream; its loss on point i is i."""

    def __init__(self, batches: BatchStream) -> None:
        self.batches = batches
        self.probes: list[list[int]] = []

    def take(
        self, work: Epochs | Steps, keep_ratio: float = 1.0, *, begins_pass: bool = True
    ) -> int:
        """Number of samples in the batches of `work`."""
        num_samples = 0
        for part in self.batches.take(work, keep_ratio, begins_pass=begins_pass):
            if isinstance(part, Batch):
                num_samples += len(part)
            else:
                self.probes.append(part.points.tolist())
                losses = part.points.to(torch.float32)
                self.batches.sampler.set_losses(losses, part.points)
        return num_samples


def stream(max_cost: float | None = None) -> tuple[BatchStream, Model]:
    sampler = AccuracyAwareSampler(
        aggregated([i % NUM_POINTS for i in range(NUM_SAMPLES)]),
        batch_size=10,
        selection=HardestSubsets(),
    )
    some = BatchStream(sampler, ProbeBudget(NUM_POINTS, max_cost))
    return some, Model(some)


def test_a_point_costs_a_third_of_a_training_sample() -> None:
    assert ProbeBudget(12).cost(0.5) == pytest.approx(4.0)


def test_a_probe_that_may_cost_less_sees_fewer_points() -> None:
    probe = ProbeBudget(12, max_cost=2.0)
    assert probe.cost(1.0) == pytest.approx(2.0)
    assert probe.cost(0.5) == pytest.approx(1.0)
    assert probe.cost(0.01) == pytest.approx(1 / 3)


def test_all_points_are_probed_before_each_pass_and_only_then() -> None:
    _, model = stream()
    model.take(Epochs(0.5))
    model.take(Epochs(0.5), begins_pass=False)
    assert model.probes == [list(range(NUM_POINTS))]
    model.take(Epochs())
    assert len(model.probes) == 2


def test_by_turns_all_points_are_probed() -> None:
    _, model = stream(max_cost=1.0)
    # Of points never probed, any come first.
    for _ in range(4):
        model.take(Epochs())
    assert [len(points) for points in model.probes] == [3] * 4
    assert sorted(itertools.chain(*model.probes)) == list(range(NUM_POINTS))


def test_no_more_points_are_probed_than_the_selection_asks_for() -> None:
    points = aggregated([i % NUM_POINTS for i in range(NUM_SAMPLES)])
    for num_points, seen in ((5, 5), (100, NUM_POINTS)):
        selection = Focused(num_points=num_points)
        some = AccuracyAware(selection=selection, look_share=None).make_stream(
            points, num_samples=NUM_SAMPLES, batch_size=10, key=(0,)
        )
        model = Model(some)
        model.take(Epochs())
        assert [len(points) for points in model.probes] == [seen]


def test_a_whole_epoch_costs_its_samples_and_the_probe() -> None:
    some, model = stream()
    assert some.epoch_cost == some.cost(Epochs()) == pytest.approx(NUM_SAMPLES + 4)
    assert model.take(Epochs()) == NUM_SAMPLES


@pytest.mark.parametrize("max_cost", [None, 2.0])
@pytest.mark.parametrize("keep_ratio", [0.25, 0.5, 0.8])
def test_a_cut_pass_costs_its_share_of_a_whole_one(
    keep_ratio: float, max_cost: float | None
) -> None:
    some, model = stream(max_cost)
    cost = some.cost(Epochs(), keep_ratio)
    assert cost == pytest.approx(keep_ratio * some.epoch_cost, abs=0.5)
    # The probe is paid for with samples.
    probe = ProbeBudget(NUM_POINTS, max_cost).cost(keep_ratio)
    assert model.take(Epochs(), keep_ratio) == round(cost - probe)


def test_a_probe_dearer_than_the_share_leaves_two_samples() -> None:
    _, model = stream()
    assert model.take(Epochs(), 0.01) == 2


def test_going_on_costs_no_probe() -> None:
    some, model = stream()
    model.take(Epochs(0.5))
    assert some.cost(Epochs(0.5), begins_pass=False) == 60
    model.take(Epochs(0.5), begins_pass=False)
    assert some.cost(Epochs(0.5), begins_pass=False) == pytest.approx(64)  # the next pass


def test_steps_probe_when_they_begin_a_pass() -> None:
    some, model = stream()
    assert some.cost(Steps(3)) == pytest.approx(3 * 10 + 4)
    model.take(Steps(3))
    assert some.cost(Steps(3)) == pytest.approx(3 * 10)
    assert len(model.probes) == 1


@pytest.mark.parametrize("look_share", [0.0, 1.5, -1.0])
def test_a_share_out_of_range_is_refused(look_share: float) -> None:
    with pytest.raises(ValueError, match=r"look_share must be in \(0, 1\] or None, got"):
        AccuracyAware(look_share=look_share)
