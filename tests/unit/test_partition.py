"""Partitions: every sample has one owner, and the skew is the one asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.partition import (
    IID,
    BySubject,
    Dirichlet,
    LabelSkew,
    Partition,
    Proportional,
)

NUM_CLASSES = 10


def dataset(labels: Tensor, subjects: Tensor | None = None) -> Dataset:
    split = ArraySplit(torch.zeros(len(labels), 1), labels)
    return Dataset("task", split, split, NUM_CLASSES, (1,), subjects=subjects)


BALANCED = dataset(torch.arange(1000).remainder(NUM_CLASSES))


def class_counts(task: Dataset, shards: list[Tensor]) -> Tensor:
    """How many samples of each class each worker has, [num_workers, NUM_CLASSES]."""
    labels = task.train.labels
    return torch.stack([labels[shard].bincount(minlength=NUM_CLASSES) for shard in shards])


def partitions(num_workers: int) -> st.SearchStrategy[Partition]:
    proportions = st.lists(st.floats(1e-3, 1e3), min_size=num_workers, max_size=num_workers)
    return st.one_of(
        st.just(IID()),
        proportions.map(lambda values: Proportional(tuple(values))),
        st.floats(1e-9, 1e9).map(Dirichlet),
        st.floats(0, 1).map(LabelSkew),
        st.just(BySubject()),
    )


@settings(max_examples=40)
@given(data=st.data())
def test_shards_are_disjoint_sorted_never_empty_and_cover_every_sample(
    data: st.DataObject,
) -> None:
    num_workers = data.draw(st.integers(1, 12), label="num_workers")
    labels = data.draw(
        st.lists(st.integers(0, NUM_CLASSES - 1), min_size=num_workers, max_size=80),
        label="labels",
    )
    partition = data.draw(partitions(num_workers), label="partition")
    seed = data.draw(st.integers(0, 2**32), label="seed")
    # Every worker's number occurs among the subjects, so that there are enough of them.
    subjects = torch.arange(len(labels)).remainder(num_workers + len(labels) // 4)
    task = dataset(torch.tensor(labels), subjects)

    shards = partition(task, num_workers, seed)

    assert len(shards) == num_workers
    assert all(shard.dtype == torch.int64 and len(shard) > 0 for shard in shards)
    assert all(torch.equal(shard, shard.sort().values) for shard in shards)
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(len(labels)))


RANDOM = [IID(), Proportional((1.0, 2.0, 3.0)), Dirichlet(0.3), LabelSkew(0.5)]


@pytest.mark.parametrize("partition", RANDOM, ids=lambda p: type(p).__name__)
def test_equal_seeds_give_equal_shards_and_others_different_ones(partition: Partition) -> None:
    first, again, other = (torch.cat(partition(BALANCED, 3, seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("partition", [*RANDOM, BySubject()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("num_workers", [0, 5])
def test_number_of_workers_must_be_one_to_the_number_of_samples(
    partition: Partition, num_workers: int
) -> None:
    task = dataset(torch.zeros(4, dtype=torch.int64), torch.arange(4))
    with pytest.raises(
        ValueError, match=rf"num_workers must be in 1 \.\. 4.*got {num_workers}"
    ):
        partition(task, num_workers, 0)


@given(num_samples=st.integers(12, 60), num_workers=st.integers(1, 12), skew=st.floats(0, 1))
def test_even_partitions_have_sizes_within_one(
    num_samples: int, num_workers: int, skew: float
) -> None:
    task = dataset(torch.arange(num_samples).square().remainder(NUM_CLASSES))
    for partition in (IID(), LabelSkew(skew)):
        sizes = [len(shard) for shard in partition(task, num_workers, 0)]
        assert max(sizes) - min(sizes) <= 1


def test_iid_gives_each_worker_about_the_same_classes() -> None:
    counts = class_counts(BALANCED, IID()(BALANCED, 4, seed=0))
    # Hypergeometric: 25 of each class on average, with a standard deviation of 4.1.
    assert ((counts - 25).abs() < 20).all()


@given(
    proportions=st.lists(st.floats(0.5, 20), min_size=1, max_size=10).map(tuple),
    seed=st.integers(0, 100),
)
def test_proportional_sizes_are_off_by_less_than_one_sample(
    proportions: tuple[float, ...], seed: int
) -> None:
    shards = Proportional(proportions)(BALANCED, len(proportions), seed)
    for shard, proportion in zip(shards, proportions, strict=True):
        assert abs(len(shard) - 1000 * proportion / sum(proportions)) <= 1 + 1e-9


def test_a_proportion_that_rounds_to_nothing_still_gets_one_sample() -> None:
    sizes = [len(shard) for shard in Proportional((1e-9, 1.0, 1e-9))(BALANCED, 3, 0)]
    assert sizes == [1, 998, 1]


def test_proportions_must_be_as_many_as_workers_finite_and_positive() -> None:
    with pytest.raises(ValueError, match="2 proportions for 3 workers; give one each"):
        Proportional((1.0, 2.0))(BALANCED, 3, 0)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(
            ValueError, match=f"proportions must be above 0 and finite, got {wrong}"
        ):
            Proportional((1.0, wrong))


def test_dirichlet_shares_have_the_variance_of_the_distribution() -> None:
    # One share of Dir(alpha, ..., alpha) over k workers has the mean 1/k and the variance
    # (1/k)(1 - 1/k) / (k alpha + 1). 100 samples a class, so rounding adds next to nothing.
    num_workers, alpha = 5, 0.5
    shares = torch.cat(
        [
            class_counts(BALANCED, Dirichlet(alpha)(BALANCED, num_workers, seed)) / 100
            for seed in range(60)
        ]
    )
    expected = 0.2 * 0.8 / (num_workers * alpha + 1)
    assert float(shares.mean()) == pytest.approx(0.2)
    assert float(shares.var()) == pytest.approx(expected, rel=0.1)


def test_small_alpha_gives_each_class_to_one_worker() -> None:
    counts = class_counts(BALANCED, Dirichlet(1e-6)(BALANCED, 3, seed=0))
    # All but the sample that a worker with nothing else may have got.
    assert (counts.max(0).values >= 98).all()


def test_large_alpha_shares_every_class_evenly() -> None:
    counts = class_counts(BALANCED, Dirichlet(1e8)(BALANCED, 4, seed=0))
    assert ((counts - 25).abs() <= 1).all()


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_alpha_must_be_finite_and_positive(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"alpha must be above 0 and finite, got {alpha}"):
        Dirichlet(alpha)


def test_full_label_skew_gives_one_class_to_each_of_as_many_workers() -> None:
    counts = class_counts(BALANCED, LabelSkew(1.0)(BALANCED, NUM_CLASSES, seed=0))
    assert torch.equal(counts, 100 * torch.eye(NUM_CLASSES, dtype=torch.int64))


@pytest.mark.parametrize("skew", [0.0, 0.3, 0.8])
def test_label_skew_leaves_the_rest_of_each_class_evenly_mixed(skew: float) -> None:
    counts = class_counts(BALANCED, LabelSkew(skew)(BALANCED, NUM_CLASSES, seed=0))
    # Of a worker's 100 samples, the share `skew` is of its own class, and a tenth of the rest.
    own = counts.diagonal().float() - 100 * skew
    rest = 100 * (1 - skew)
    assert float(own.mean()) == pytest.approx(rest / 10, abs=2.5)
    assert abs(float(own.sum() + counts.sum() - counts.diagonal().sum()) - 10 * rest) < 1e-3
    others = counts[~torch.eye(NUM_CLASSES, dtype=torch.bool)]
    assert others.max() < rest / 10 + 5 * (rest / 10) ** 0.5


@pytest.mark.parametrize("skew", [-0.1, 1.1, float("nan")])
def test_skew_must_be_a_fraction(skew: float) -> None:
    with pytest.raises(ValueError, match=rf"skew must be in \[0, 1\], got {skew}"):
        LabelSkew(skew)


def test_as_many_workers_as_subjects_have_one_each_in_order() -> None:
    subjects = torch.tensor([30, 7, 7, 30, 7, 11])
    task = dataset(torch.zeros(6, dtype=torch.int64), subjects)
    shards = BySubject()(task, 3, 0)
    assert [shard.tolist() for shard in shards] == [[1, 2, 4], [5], [0, 3]]


@given(sizes=st.lists(st.integers(1, 9), min_size=3, max_size=12), seed=st.integers(0, 9))
def test_fewer_workers_than_subjects_never_split_a_subject_and_stay_balanced(
    sizes: list[int], seed: int
) -> None:
    subjects = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    order = torch.randperm(len(subjects), generator=torch.Generator().manual_seed(seed))
    task = dataset(torch.zeros(len(subjects), dtype=torch.int64), subjects[order])
    shards = BySubject()(task, 3, seed)
    owners = [set(subjects[order][shard].tolist()) for shard in shards]
    assert sum(map(len, owners)) == len(sizes)
    # A shard grows only while it is the smallest, so it ends at most one subject above the
    # mean (Graham, "Bounds on multiprocessing timing anomalies", 1969).
    largest = max(len(shard) for shard in shards)
    assert largest <= sum(sizes) / 3 + max(sizes)


def test_more_workers_than_subjects_are_refused() -> None:
    task = dataset(torch.zeros(6, dtype=torch.int64), torch.tensor([1, 1, 1, 2, 2, 2]))
    with pytest.raises(ValueError, match="num_workers=3 is more than the 2 subjects"):
        BySubject()(task, 3, 0)


def test_a_data_set_without_subjects_cannot_be_shared_out_by_them() -> None:
    with pytest.raises(ValueError, match="'task' has no subjects"):
        BySubject()(BALANCED, 3, 0)
