"""Batches of what a selection prefers: just as many samples as there is time for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.training.sampling.aggregation import AggregatedData
from edgegossip.training.sampling.sampler import AccuracyAwareSampler
from edgegossip.training.sampling.selection import (
    Candidates,
    Choice,
    Focused,
    Random,
    Selection,
)


@dataclass(frozen=True)
class HardestSubsets(Selection):
    """Whole subsets, those of the highest loss first."""

    keeps_subsets_whole: ClassVar[bool] = True

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        of_sample = candidates.losses[candidates.subset_of]
        order = torch.sort(of_sample, descending=True, stable=True).indices
        return Choice(order[:num_samples])


@dataclass(frozen=True)
class Weighted(Selection):
    """The first samples, the first of all doubly."""

    needs_losses: ClassVar[bool] = False

    def choose(
        self, candidates: Candidates, num_samples: int, random: torch.Generator
    ) -> Choice:
        weights = torch.ones(num_samples)
        weights[0] = 2.0
        return Choice(torch.arange(num_samples), weights)


def aggregated(subset_of: list[int]) -> AggregatedData:
    num_points = max(subset_of) + 1
    return AggregatedData(
        x=torch.zeros(num_points, 2),
        y=torch.zeros(num_points, dtype=torch.int64),
        subset_of=torch.tensor(subset_of),
    )


def plain(
    num_samples: int = 10,
    batch_size: int = 3,
    selection: Selection | None = None,
    keep_ratio: float = 1.0,
    key: int = 0,
) -> AccuracyAwareSampler:
    return AccuracyAwareSampler(
        num_samples=num_samples,
        batch_size=batch_size,
        selection=selection or Random(),
        keep_ratio=keep_ratio,
        key=key,
    )


def hardest(subset_of: list[int], batch_size: int, losses: list[float]) -> AccuracyAwareSampler:
    sampler = AccuracyAwareSampler(
        aggregated(subset_of), batch_size=batch_size, selection=HardestSubsets()
    )
    sampler.set_losses(torch.tensor(losses))
    return sampler


# With a real DataLoader.


@pytest.mark.parametrize("keep_ratio", [1.0, 0.5])
def test_a_data_loader_yields_the_batches_of_the_sampler(keep_ratio: float) -> None:
    data = TensorDataset(torch.arange(10))
    loader = DataLoader(data, batch_sampler=plain(keep_ratio=keep_ratio))
    twin = plain(keep_ratio=keep_ratio)
    for _ in range(2):
        got = [x.tolist() for (x,) in loader]
        assert got == list(twin)
        assert sum(map(len, got)) == 10 * keep_ratio
        assert len(loader) == len(got)


def test_the_keep_ratio_may_change_from_epoch_to_epoch() -> None:
    sampler = plain(100, 10)
    for keep_ratio, count in [(1.0, 100), (0.25, 25), (0.6, 60)]:
        sampler.keep_ratio = keep_ratio
        assert sum(map(len, sampler)) == count


# How many, and in which batches.


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.floats(0.001, 1))
def test_an_epoch_visits_exactly_its_share_and_none_twice(
    num_samples: int, batch_size: int, keep_ratio: float
) -> None:
    sampler = plain(num_samples, batch_size, keep_ratio=keep_ratio)
    num_batches = len(sampler)
    batches = list(sampler)
    order = [position for batch in batches for position in batch]
    due = max(min(2, num_samples), round(keep_ratio * num_samples))
    assert len(order) == len(set(order)) == due
    assert len(batches) == num_batches
    assert all(len(batch) >= min(batch_size, num_samples) for batch in batches[:-1])


def test_a_single_last_sample_joins_the_batch_before() -> None:
    assert [len(batch) for batch in plain(7, 3)] == [3, 4]


def test_an_epoch_has_two_samples_at_least_where_there_are_two() -> None:
    assert [len(batch) for batch in plain(7, 3, keep_ratio=0.01)] == [2]
    assert [len(batch) for batch in plain(1, 3, keep_ratio=0.01)] == [1]


@settings(max_examples=20, deadline=None)
@given(
    subset_of=st.lists(st.integers(0, 5), min_size=2, max_size=40),
    batch_size=st.integers(1, 12),
    keep_ratio=st.floats(0.05, 1),
)
def test_whole_subsets_fill_batches_that_are_only_cut_at_the_end(
    subset_of: list[int], batch_size: int, keep_ratio: float
) -> None:
    subset_of = [*range(6), *subset_of]
    sampler = hardest(subset_of, batch_size, [5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    sampler.keep_ratio = keep_ratio
    batches = list(sampler)
    assert sum(map(len, batches)) == max(2, round(keep_ratio * len(subset_of)))
    subsets = [{subset_of[position] for position in batch} for batch in batches]
    for one, other in pairwise(subsets):
        assert not one & other
    assert all(len(batch) >= sampler.batch_size for batch in batches[:-1])
    assert len(batches) == 1 or batch_size == 1 or len(batches[-1]) > 1


def test_batches_end_where_a_subset_does_once_they_are_full() -> None:
    sampler = hardest([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], 4, [1.0, 4.0, 3.0, 2.0])
    assert list(sampler) == [[3, 4, 5, 6, 7, 8], [9, 10, 11, 0, 1, 2]]
    sampler.keep_ratio = 8 / 12
    assert list(sampler) == [[3, 4, 5, 6, 7, 8], [9, 10]]


# Losses.


def test_the_hardest_come_first() -> None:
    sampler = hardest([0, 1, 2, 0, 1, 2], 2, [0.1, 9.0, 0.5])
    sampler.keep_ratio = 1 / 3
    assert list(sampler) == [[1, 4]]
    sampler.set_losses(torch.tensor([9.0]), torch.tensor([0]))
    sampler.set_losses(torch.tensor([0.0]), torch.tensor([1]))
    assert list(sampler) == [[0, 3]]


def test_points_never_probed_count_as_average() -> None:
    sampler = AccuracyAwareSampler(
        aggregated([0, 0, 1, 1, 2, 2]), batch_size=2, selection=HardestSubsets()
    )
    sampler.set_losses(torch.tensor([1.0, 3.0]), torch.tensor([0, 2]))
    assert list(sampler) == [[4, 5], [2, 3], [0, 1]]


def test_without_losses_nothing_can_be_ranked() -> None:
    sampler = AccuracyAwareSampler(aggregated([0, 1]), batch_size=1, selection=HardestSubsets())
    with pytest.raises(ValueError, match="call set_losses before the first epoch"):
        list(sampler)


@pytest.mark.parametrize(
    ("losses", "points", "message"),
    [
        (torch.zeros(2), None, r"got losses of shape \[2\] for \[3\] points"),
        (torch.tensor(1.0), None, r"got losses of shape \[\] .* \(reduction='none'\)"),
        (torch.zeros(3), torch.tensor([0]), r"got losses of shape \[3\] for \[1\] points"),
        (torch.tensor([0.0, torch.nan, 0.0]), None, "not finite; has training diverged"),
        (torch.tensor([0.0, torch.inf, 0.0]), None, "not finite"),
    ],
)
def test_losses_that_do_not_fit_are_refused(
    losses: Tensor, points: Tensor | None, message: str
) -> None:
    sampler = hardest([0, 1, 2], 1, [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=message):
        sampler.set_losses(losses, points)


def test_the_points_probed_longest_ago_are_the_stalest() -> None:
    sampler = hardest([0, 1, 2, 3], 1, [1.0] * 4)
    list(sampler)
    sampler.set_losses(torch.ones(2), torch.tensor([0, 2]))
    assert sampler.stalest_points(2).tolist() == [1, 3]
    list(sampler)
    sampler.set_losses(torch.ones(2), torch.tensor([1, 3]))
    assert sampler.stalest_points(2).tolist() == [0, 2]


def test_losses_recorded_in_a_data_loader_bring_focus() -> None:
    sampler = AccuracyAwareSampler(
        aggregated([0] * 20), batch_size=4, selection=Focused(), keep_ratio=0.5
    )
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_sampler=sampler)
    hard = torch.arange(20) < 5
    for _ in range(3):
        sampler.set_losses(torch.zeros(1))  # all recognised
        visited = torch.cat([positions for (positions,) in loader])
        sampler.record(torch.arange(20), hard.float())
    assert bool(hard[visited].all())


# Weights.


def test_weights_are_those_of_the_present_epoch() -> None:
    sampler = plain(4, 2, Weighted())
    batches = sampler.begin_epoch(3)
    assert [batch.positions.tolist() for batch in batches] == [[0, 1, 2]]
    assert batches[0].weights is not None
    assert batches[0].weights.tolist() == [2.0, 1.0, 1.0]
    assert sampler.weights.tolist() == [2.0, 1.0, 1.0, 1.0]


def test_without_weights_all_are_one() -> None:
    sampler = plain(4, 2)
    assert all(batch.weights is None for batch in sampler.begin_epoch(4))
    assert sampler.weights.tolist() == [1.0] * 4


# Checkpoints and arguments.


def test_a_restored_sampler_goes_on_as_the_original() -> None:
    original, other = (hardest([0, 1, 2, 0, 1], 2, [1.0, 2.0, 3.0]) for _ in range(2))
    list(original)
    original.set_losses(torch.tensor([7.0]), torch.tensor([0]))
    other.load_state_dict(assemble(*dismantle(original.state_dict())))
    for _ in range(2):
        assert list(other) == list(original)
        assert torch.equal(other.stalest_points(2), original.stalest_points(2))


def test_another_key_is_another_order() -> None:
    orders = {str(list(plain(50, 10, key=key))) for key in range(5)}
    assert len(orders) == 5


@pytest.mark.parametrize("keep_ratio", [0.0, -0.5, 1.01])
def test_a_keep_ratio_out_of_range_is_refused(keep_ratio: float) -> None:
    with pytest.raises(ValueError, match=r"keep_ratio must be in \(0, 1\], got"):
        plain(keep_ratio=keep_ratio)
    sampler = plain()
    sampler.keep_ratio = keep_ratio
    with pytest.raises(ValueError, match=r"keep_ratio must be in \(0, 1\], got"):
        list(sampler)


@pytest.mark.parametrize("num_samples", [0, -1])
def test_no_samples_are_refused(num_samples: int) -> None:
    with pytest.raises(ValueError, match=f"no samples to choose from, got .*={num_samples};"):
        plain(num_samples)


def test_a_selection_that_ranks_needs_aggregated_points() -> None:
    with pytest.raises(ValueError, match="give `aggregated`, or choose Random"):
        plain(selection=HardestSubsets())
