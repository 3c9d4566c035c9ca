"""Divisions: as many subsets as asked for, none empty, similar points together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from edgegossip.training.sampling.division import (
    Division,
    GaussianMixture,
    KMeans,
    MedianSplit,
    RandomHyperplanes,
    split_largest,
)

DIVISIONS = [KMeans(), MedianSplit(), RandomHyperplanes(), GaussianMixture()]


def type_name(value: object) -> str:
    return type(value).__name__


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blobs(num_points: int, num_blobs: int) -> tuple[Tensor, Tensor]:
    """Points around far apart centers on the corners of a cube, and the blob of each."""
    blob = torch.arange(num_points) % num_blobs
    corners = (blob[:, None] // 2 ** torch.arange(3)) % 2 * 20.0 - 10
    return corners + normal(num_points, 3) / 10, blob


@pytest.mark.parametrize("division", DIVISIONS, ids=type_name)
@settings(max_examples=25)
@given(data=st.data())
def test_all_points_are_divided_into_as_many_subsets_as_asked_for(
    division: Division, data: st.DataObject
) -> None:
    num_points = data.draw(st.integers(3, 40), label="num_points")
    num_subsets = data.draw(st.integers(2, num_points - 1), label="num_subsets")
    num_features = data.draw(st.integers(1, 3), label="num_features")
    num_different = data.draw(st.integers(1, num_points), label="num_different")
    scale = data.draw(st.sampled_from([1e-6, 1.0, 1e3]), label="scale")
    features = normal(num_points, num_features)[torch.arange(num_points) % num_different]
    subset_of = division(features * scale, num_subsets, 0)
    assert subset_of.dtype == torch.int64
    assert subset_of.unique().tolist() == list(range(num_subsets))  # type: ignore[no-untyped-call]
    assert len(subset_of) == num_points


@pytest.mark.parametrize("division", DIVISIONS, ids=type_name)
def test_seed_settles_the_division(division: Division) -> None:
    features = normal(60, 4)
    first = division(features, 7, 2**62)
    assert torch.equal(first, division(features.clone(), 7, 2**62))


@pytest.mark.parametrize("division", [KMeans(), RandomHyperplanes()], ids=type_name)
def test_another_seed_divides_differently(division: Division) -> None:
    features = normal(60, 4)
    assert not torch.equal(division(features, 7, 0), division(features, 7, 1))


@pytest.mark.parametrize(
    "division", [KMeans(), MedianSplit(), GaussianMixture()], ids=type_name
)
def test_far_blobs_are_found(division: Division) -> None:
    features, blob = blobs(80, 8)
    subset_of = division(features, 8, 0)
    pairs = set(zip(subset_of.tolist(), blob.tolist(), strict=True))
    assert len(pairs) == 8


def test_k_means_leaves_each_point_with_the_nearest_mean() -> None:
    features = normal(200, 3)
    subset_of = KMeans(num_iterations=100)(features, 10, 0)
    means = torch.stack([features[subset_of == subset].mean(dim=0) for subset in range(10)])
    assert torch.equal(torch.cdist(features, means).argmin(dim=1), subset_of)


def test_k_means_does_not_lose_small_distances_to_a_large_offset() -> None:
    features, _ = blobs(80, 8)
    near, far = KMeans()(features, 8, 0), KMeans()(features + 65_536, 8, 0)
    assert torch.equal(near, far)


@given(num_points=st.integers(2, 200), data=st.data())
def test_buckets_of_median_splits_differ_in_size_by_at_most_one(
    num_points: int, data: st.DataObject
) -> None:
    num_subsets = data.draw(st.integers(1, num_points), label="num_subsets")
    sizes = MedianSplit()(normal(num_points, 3), num_subsets, 0).bincount()
    assert len(sizes) == num_subsets
    assert int(sizes.max()) - int(sizes.min()) <= 1


def test_median_split_into_a_power_of_two_is_the_recursive_halving_of_slimml() -> None:
    features = normal(37, 3)

    def halve(points: Tensor, level: int) -> list[set[int]]:
        if level == 3:
            return [set(points.tolist())]
        points = points[features[points, level].argsort()]
        half = len(points) // 2
        return halve(points[:half], level + 1) + halve(points[half:], level + 1)

    subset_of = MedianSplit()(features, 8, 0)
    found = [set((subset_of == subset).nonzero()[:, 0].tolist()) for subset in range(8)]
    assert found == halve(torch.arange(37), 0)


def test_hyperplanes_part_opposite_points_more_often_than_close_ones() -> None:
    direction = normal(1, 5)
    features = torch.cat([direction + normal(20, 5) / 100, -direction + normal(20, 5) / 100])
    subset_of = RandomHyperplanes()(features, 2, 0)
    assert sorted({tuple(subset_of[:20].tolist()), tuple(subset_of[20:].tolist())}) == [
        (0,) * 20,
        (1,) * 20,
    ]


def test_largest_subset_is_cut_where_it_varies_most() -> None:
    features = torch.tensor([[0.0, 0], [1, 50], [0, 100], [1, 150], [9, 9]])
    subset_of = split_largest(torch.tensor([3, 3, 3, 3, 5]), features, 3)
    assert subset_of.tolist() == [0, 0, 2, 2, 1]


def test_no_iterations_are_refused() -> None:
    with pytest.raises(ValueError, match="num_iterations must be at least 1, got 0"):
        KMeans(num_iterations=0)


@pytest.mark.parametrize("division", DIVISIONS, ids=type_name)
def test_cost_grows_with_points_and_subsets(division: Division) -> None:
    assert 0 < division.num_flops(100, 10) < division.num_flops(200, 10)
    assert division.num_flops(200, 10) < division.num_flops(200, 20)
