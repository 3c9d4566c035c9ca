"""Reductions: few features, in which similar points stay similar."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgegossip.training.sampling.reduction import (
    PCA,
    Fingerprint,
    Histogram,
    IncrementalSVD,
    Reduction,
    SingularValues,
    WholeDataSVD,
)

REDUCTIONS = [
    SingularValues(),
    IncrementalSVD(),
    Fingerprint(),
    Histogram(),
    WholeDataSVD(),
    PCA(),
]
SHAPES = [(3, 8, 8), (1, 5, 7), (4, 16), (7,), (1,)]


def points(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def type_name(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=type_name)
def test_features_are_few_finite_floats_for_each_point(
    reduction: Reduction, shape: tuple[int, ...]
) -> None:
    x = 2 * points(12, *shape) - 1
    features = reduction(x, 5, 0)
    assert features.dtype == torch.float32
    assert len(features) == 12
    assert 1 <= features.shape[1] <= 10
    assert bool(features.isfinite().all())


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=type_name)
def test_points_of_zeros_are_reduced_without_a_warning(reduction: Reduction) -> None:
    assert bool(reduction(torch.zeros(6, 1, 4, 4), 2, 0).isfinite().all())


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=type_name)
def test_points_are_not_changed(reduction: Reduction) -> None:
    x = points(6, 3, 4, 4)
    reduction(x, 2, 0)
    assert torch.equal(x, points(6, 3, 4, 4))


def test_singular_values_ignore_order_of_rows_and_their_squares_sum_to_the_squared_norm() -> (
    None
):
    x = points(4, 6, 9)
    values = SingularValues()(x, 1, 0)
    torch.testing.assert_close(values, SingularValues()(x.flip(1), 1, 0))
    torch.testing.assert_close(values.square().sum(1), x.square().sum((1, 2)))


def test_flat_features_fill_a_square_padded_with_zeros() -> None:
    x = points(2, 7)
    square = torch.zeros(2, 9)
    square[:, :7] = x
    expected = torch.linalg.svdvals(square.view(2, 3, 3))
    torch.testing.assert_close(SingularValues()(x, 1, 0), expected)


def test_pictures_are_made_gray() -> None:
    x = points(2, 3, 5, 5)
    gray = x.mean(dim=1, keepdim=True)
    torch.testing.assert_close(SingularValues()(x, 1, 0), SingularValues()(gray, 1, 0))


def entry_by_entry(
    x: NDArray[np.float64], num_factors: int, svd: IncrementalSVD
) -> NDArray[np.float64]:
    """SlimML's loop, one step for each entry, on our columns."""
    u = np.full((num_factors, len(x)), svd.initial_value)
    v = np.full((num_factors, x.shape[1]), svd.initial_value)
    for f in range(num_factors):
        for _ in range(svd.num_passes):
            for i in range(len(x)):
                for j in svd._columns(f, x.shape[1]):
                    error = x[i, j] - float(np.clip(u[:, i] @ v[:, j], -30, 30))
                    u_old, v_old = u[f, i], v[f, j]
                    u[f, i] += svd.lr * (error * v_old - svd.regularization * u_old)
                    v[f, j] += svd.lr * (error * u_old - svd.regularization * v_old)
    return u.T


@pytest.mark.parametrize(("block_size", "tolerance"), [(1, 0.01), (16, 0.05)])
def test_incremental_svd_follows_the_entry_by_entry_loop(
    block_size: int, tolerance: float
) -> None:
    svd = IncrementalSVD(block_size=block_size)
    x = points(20, 200) * points(20, 1, seed=1)  # of different brightness
    expected = entry_by_entry(x.double().numpy(), 2, svd)
    found = svd(x, 4, 0).double().numpy()
    assert (np.abs(found - expected) <= tolerance * expected.std(axis=0)).all()


@pytest.mark.parametrize(("num_subsets", "num_factors"), [(2, 1), (3, 2), (8, 3), (9, 4)])
def test_incremental_svd_has_a_factor_for_each_halving(
    num_subsets: int, num_factors: int
) -> None:
    assert IncrementalSVD()(points(10, 3), num_subsets, 0).shape == (10, num_factors)


@pytest.mark.parametrize(
    ("num_attributes", "num_subsets", "num_factors"),
    [(784, 4, 3), (3072, 4, 5), (784, 2, 2), (20, 4, 1)],
)
def test_the_printed_number_of_factors_depends_on_attributes_and_ratio(
    num_attributes: int, num_subsets: int, num_factors: int
) -> None:
    # log2(0.1 * 784 / 10) = 2.97 for 40 points in 4 subsets; never below 1.
    features = IncrementalSVD(factors="printed")(points(40, num_attributes), num_subsets, 0)
    assert features.shape == (40, num_factors)


def test_attributes_of_a_factor_spread_over_the_whole_point_and_differ_between_factors() -> (
    None
):
    first, second = (IncrementalSVD()._columns(factor, 784) for factor in (0, 1))
    assert len(first) == 8  # 1 %
    assert np.diff(first).tolist() == [98] * 7
    assert not set(first) & set(second)


def test_many_attributes_of_a_factor_spread_over_the_whole_point_too() -> None:
    """With whole strides, six of ten would be the first six."""
    columns = IncrementalSVD(attribute_share=0.6)._columns(0, 10)
    assert columns.tolist() == [0, 1, 3, 5, 6, 8]


def test_fingerprints_are_no_farther_apart_than_points() -> None:
    x, y = points(5, 3, 7, 6), points(5, 3, 7, 6, seed=1)
    apart = (Fingerprint()(x, 1, 0) - Fingerprint()(y, 1, 0)).abs().amax(dim=1)
    assert bool((apart <= (x - y).abs().flatten(1).amax(dim=1)).all())


def test_histogram_counts_each_value_once_and_ignores_where_it_is() -> None:
    x = points(5, 1, 6, 6)
    counts = Histogram()(x, 1, 0)
    assert counts.sum(dim=1).tolist() == [36] * 5
    assert torch.equal(counts, Histogram()(x.flip(3), 1, 0))


def test_svd_of_all_points_keeps_inner_products_where_the_rank_is_small() -> None:
    x = points(30, 4) @ points(4, 50, seed=1) / 4
    features = WholeDataSVD()(x, 3, 0)
    torch.testing.assert_close(features @ features.T, x @ x.T, atol=1e-4, rtol=0)


def test_pca_keeps_distances_whatever_is_added_to_all_points() -> None:
    x = points(30, 4) @ points(4, 50, seed=1) / 4
    for shift in (0, 0.5):
        features = PCA()(x + shift, 3, 0)
        torch.testing.assert_close(torch.pdist(features), torch.pdist(x), atol=1e-4, rtol=0)
        assert float(features.mean(dim=0).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SingularValues(num_features=0), "num_features must be at least 1, got 0"),
        (lambda: PCA(num_features=-1), "num_features must be at least 1, got -1"),
        (lambda: IncrementalSVD(num_passes=0), "num_passes must be at least 1, got 0"),
        (lambda: IncrementalSVD(attribute_share=1.5), r"attribute_share must be in \(0, 1\]"),
        (lambda: IncrementalSVD(lr=0), "lr must be above 0 and finite, got 0"),
        (
            lambda: IncrementalSVD(regularization=-1),
            "regularization must be at least 0 and finite",
        ),
    ],
)
def test_hyperparameters_out_of_range_are_refused(
    make: Callable[[], Reduction], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=type_name)
def test_cost_grows_with_the_points(reduction: Reduction) -> None:
    few, many = (reduction.num_flops(n, (3, 32, 32), 10) for n in (100, 1000))
    assert 0 < 5 * few < many < 10.1 * few
