"""The aggregator: each aggregated point is the mean of similar samples of one class."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.tiers import thorough
from torch import Tensor

from edgegossip.contract.errors import DataError
from edgegossip.training.sampling.aggregation import (
    COMBINATIONS,
    AggregatedData,
    Aggregator,
    aggregator,
)
from edgegossip.training.sampling.division import RandomHyperplanes
from edgegossip.training.sampling.reduction import PCA

SHAPES = [(3, 8, 8), (1, 5, 5), (4, 12), (6,)]
every_combination = pytest.mark.parametrize("name", COMBINATIONS)


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(num_samples: int, shape: tuple[int, ...] = (1, 6, 6), seed: int = 0) -> Tensor:
    return torch.randint(256, (num_samples, *shape), dtype=torch.uint8, generator=random(seed))


def assert_aggregates(aggregated: AggregatedData, x: Tensor, y: Tensor) -> None:
    """Check the promises of `AggregatedData`: one subset a sample, pure classes, true means."""
    num_subsets = len(aggregated.x)
    assert aggregated.subset_of.shape == (len(x),)
    assert aggregated.subset_of.unique().tolist() == list(range(num_subsets))  # type: ignore[no-untyped-call]
    assert torch.equal(aggregated.y[aggregated.subset_of], y.long())
    assert aggregated.y.tolist() == sorted(aggregated.y.tolist())
    assert int(aggregated.sizes.sum()) == aggregated.num_samples == len(x)
    assert aggregated.x.dtype == torch.float32
    for subset, point in enumerate(aggregated.x):
        mean = x[aggregated.subset_of == subset].double().mean(dim=0)
        torch.testing.assert_close(point, mean.float())


@every_combination
@settings(max_examples=15)
@given(data=st.data())
def test_aggregated_points_are_means_of_subsets_that_do_not_mix_classes(
    name: str, data: st.DataObject
) -> None:
    num_samples = data.draw(st.integers(1, 50), label="num_samples")
    num_different = data.draw(st.integers(1, num_samples), label="num_different")
    num_classes = data.draw(st.integers(1, 4), label="num_classes")
    ratio = data.draw(st.floats(1, 60), label="ratio")
    shape = data.draw(st.sampled_from(SHAPES), label="shape")
    seed = data.draw(st.integers(0, 2**40), label="seed")
    x = pictures(num_samples, shape, seed)[torch.arange(num_samples) % num_different]
    if len(shape) < 3:
        x = x.float() - 100
    y = torch.randint(num_classes, (num_samples,), generator=random(seed)) * 7 - 3
    aggregated = aggregator(name, ratio, seed).fit(x, y)
    assert_aggregates(aggregated, x, y)
    extra = len(aggregated.x) - round(num_samples / ratio)
    assert 0 <= extra <= num_classes  # at least one subset for each class


@every_combination
@pytest.mark.parametrize("ratio", [2.5, 5.0, 10.0, 20.0])
def test_aggregation_ratio_is_met(name: str, ratio: float) -> None:
    # Class sizes that no ratio divides, one of them with many duplicates.
    y = torch.tensor([0] * 203 + [1] * 57 + [2] * 131)
    x = pictures(len(y))
    x[203:240] = x[203]
    aggregated = aggregator(name, ratio).fit(x, y)
    assert len(aggregated.x) == round(len(y) / ratio)
    assert aggregated.ratio == pytest.approx(ratio, rel=0.05)


@every_combination
def test_ratio_one_leaves_every_sample_by_itself(name: str) -> None:
    x, y = pictures(20), torch.arange(20) % 3
    x[10:] = x[0]
    aggregated = aggregator(name, ratio=1).fit(x, y)
    assert aggregated.sizes.tolist() == [1] * 20
    assert torch.equal(aggregated.x, x[y.argsort(stable=True)].float())


def test_classes_smaller_than_the_ratio_have_one_subset_each() -> None:
    y = torch.tensor([5] * 9 + [2] + [8] * 4)
    aggregated = aggregator("svd-kmeans").fit(pictures(14), y)
    assert aggregated.y.tolist() == [2, 5, 8]
    assert aggregated.sizes.tolist() == [1, 9, 4]


@every_combination
@pytest.mark.parametrize("value", [0, 200])
def test_samples_that_are_all_equal_are_aggregated_without_a_warning(
    name: str, value: int
) -> None:
    x = torch.full((30, 1, 6, 6), value, dtype=torch.uint8)
    aggregated = aggregator(name).fit(x, torch.zeros(30, dtype=torch.int64))
    assert torch.equal(aggregated.x, torch.full((3, 1, 6, 6), float(value)))


@every_combination
@pytest.mark.parametrize("scale", [1e-40, 1e-20, 3e38])
def test_tiny_and_huge_floats_are_aggregated_without_a_warning(name: str, scale: float) -> None:
    x = (2 * torch.rand(30, 5, generator=random()) - 1) * scale
    y = torch.arange(30) % 2
    assert_aggregates(aggregator(name, ratio=4).fit(x, y), x, y)


@every_combination
def test_subsets_are_more_alike_than_random_ones(name: str) -> None:
    # Pictures of ten different brightnesses: what every reduction sees.
    brightness = torch.arange(200) % 10 / 10
    x = brightness.view(-1, 1, 1, 1) + torch.rand(200, 1, 8, 8, generator=random()) / 10
    y = torch.zeros(200, dtype=torch.int64)
    aggregated = aggregator(name).fit(x, y)
    within = float((x - aggregated.x[aggregated.subset_of]).square().sum())
    total = float((x - x.mean(dim=0)).square().sum())
    assert within < 0.45 * total  # random subsets of ten leave about 0.9


@every_combination
def test_same_seed_gives_the_same_bytes_and_leaves_global_generators_alone(name: str) -> None:
    x, y = pictures(100), torch.arange(100) % 3
    torch_state = torch.random.get_rng_state()
    numpy_state = np.random.get_state(legacy=False)["state"]
    first, second = (aggregator(name, seed=4).fit(x, y) for _ in range(2))
    assert torch.equal(first.subset_of, second.subset_of)
    assert torch.equal(first.x, second.x)
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    np.testing.assert_equal(np.random.get_state(legacy=False)["state"], numpy_state)


def test_seed_changes_the_division() -> None:
    x, y = pictures(100), torch.arange(100) % 3
    first, second = (aggregator("svd-kmeans", seed=seed).fit(x, y) for seed in (0, 1))
    assert not torch.equal(first.subset_of, second.subset_of)


def test_a_class_is_divided_the_same_whatever_the_others_are() -> None:
    x, y = pictures(90), torch.arange(90) % 3
    x[0] = 255
    both = y < 2
    whole, part = (
        aggregator("svd-kmeans", ratio=5).fit(x[chosen], y[chosen]) for chosen in (y < 3, both)
    )
    assert torch.equal(whole.subset_of[both], part.subset_of)


def test_bytes_and_floats_of_the_same_pictures_aggregate_alike() -> None:
    x, y = pictures(60), torch.arange(60) % 2
    from_bytes, from_floats = (aggregator("hash-kmeans").fit(z, y) for z in (x, x.float()))
    assert torch.equal(from_bytes.subset_of, from_floats.subset_of)
    assert torch.equal(from_bytes.x, from_floats.x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_floats_and_small_integer_labels_are_taken(dtype: torch.dtype) -> None:
    x = torch.rand(40, 6, generator=random()).to(dtype)
    y = (torch.arange(40) % 2).to(torch.uint8)
    assert_aggregates(aggregator("pca-kmeans").fit(x, y), x, y)


def test_any_reduction_goes_with_any_division() -> None:
    x, y = pictures(60), torch.arange(60) % 2
    chosen = Aggregator(reduction=PCA(), division=RandomHyperplanes(), ratio=7)
    assert_aggregates(chosen.fit(x, y), x, y)


def test_three_of_eight_combinations_are_the_ones_the_paper_selects() -> None:
    assert len({*COMBINATIONS} - {"isvd-lsh-printed"}) == 8
    selected = [name for name, entry in COMBINATIONS.items() if entry.is_selected]
    assert selected == ["svd-kmeans", "isvd-lsh", "hash-kmeans"]


def test_unknown_name_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(
        ValueError, match=r"unknown aggregator 'svd-kmean'.*did you mean 'svd-kmeans'"
    ):
        aggregator("svd-kmean")


@pytest.mark.parametrize("ratio", [0.99, 0.0, -10.0, math.inf, math.nan])
def test_ratio_below_one_or_not_finite_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=rf"ratio must be at least 1 .*got {ratio}"):
        aggregator("svd-kmeans", ratio=ratio)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(0, 3), torch.zeros(0).long(), r"at least one sample.*shape \[0, 3\]"),
        (torch.zeros(4, 0), torch.zeros(4).long(), r"one value.*shape \[4, 0\]"),
        (torch.zeros(4), torch.zeros(4).long(), r"\[num_samples, \.\.\.\].*shape \[4\]"),
        (torch.zeros(4, 2), torch.zeros(3).long(), r"each of the 4 samples, got shape \[3\]"),
        (torch.zeros(4, 2), torch.zeros(4, 1).long(), r"got shape \[4, 1\]"),
        (torch.zeros(4, 2), torch.zeros(4), r"y must be whole numbers.*float32"),
        (torch.zeros(4, 2), torch.zeros(4).bool(), r"y must be whole numbers.*bool"),
        (
            torch.zeros(4, 2).long(),
            torch.zeros(4).long(),
            r"pictures \(uint8\) or floats.*int64",
        ),
    ],
)
def test_wrong_samples_are_refused(x: Tensor, y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aggregator("hash-kmeans").fit(x, y)


def test_arrays_are_refused_with_what_makes_tensors_of_them() -> None:
    x, y = torch.zeros(4, 2), torch.zeros(4).long()
    with pytest.raises(ValueError, match=r"got ndarray and Tensor; torch.as_tensor"):
        aggregator("hash-kmeans").fit(x.numpy(), y)  # type: ignore[arg-type]


@every_combination
def test_samples_that_need_gradients_are_aggregated_as_any_others(name: str) -> None:
    x, y = torch.rand(30, 9), torch.arange(30) % 2
    plain = aggregator(name, ratio=5).fit(x, y)
    with_gradients = aggregator(name, ratio=5).fit(x.clone().requires_grad_(), y)
    assert torch.equal(with_gradients.subset_of, plain.subset_of)
    assert torch.equal(with_gradients.x, plain.x)
    assert not with_gradients.x.requires_grad


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_with_the_sample(value: float) -> None:
    x = torch.zeros(4, 2, 3)
    x[2, 1, 0] = value
    with pytest.raises(DataError, match="sample 2 of x has a value that is not finite"):
        aggregator("hash-kmeans").fit(x, torch.zeros(4).long())


@every_combination
def test_cost_grows_with_samples_and_values(name: str) -> None:
    chosen = aggregator(name)
    cost = chosen.num_flops(2000, (1, 28, 28))
    assert 0 < cost < chosen.num_flops(4000, (1, 28, 28))
    assert cost < chosen.num_flops(2000, (3, 32, 32))


def test_cost_is_that_of_the_means_where_nothing_is_divided() -> None:
    alone = aggregator("hash-kmeans", ratio=1).num_flops(2000, (1, 28, 28))
    together = aggregator("svd-gmm", ratio=200).num_flops(2000, (1, 28, 28))
    assert 0 < alone == together < aggregator("hash-kmeans").num_flops(2000, (1, 28, 28))


@pytest.mark.parametrize("name", ["svd-kmeans", "isvd-lsh", "hash-kmeans"])
def test_selected_combinations_cost_less_than_three_epochs_of_lenet5(name: str) -> None:
    epoch = 12_500 * 3.2e6  # FLOPs of LeNet-5 on 12,500 pictures, forward and backward
    assert aggregator(name).num_flops(12_500, (3, 32, 32)) < 3 * epoch


@thorough
def test_no_round_waits_for_an_import() -> None:
    """The worker may be slow, and the others would wait for it."""
    code = (
        "import sys\n"
        "from tests.small_learners import learner\n"
        "from edgegossip.training.sampling.accuracy_aware import AccuracyAware\n"
        "from edgegossip.training.sampling.aggregation import COMBINATIONS, aggregator\n"
        "made = [\n"
        "    learner(accuracy_aware=AccuracyAware(aggregator=aggregator(name, ratio=2)))\n"
        "    for name in COMBINATIONS\n"
        "]\n"
        "before = set(sys.modules)\n"
        "for each in made:\n"
        "    each.set_up()\n"
        "late = set(sys.modules) - before\n"
        "assert not late, late\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
