"""Partitions of the training samples among the workers.

A partition is called with a data set, a number of workers and a seed. It returns, for each
rank, the sorted indices of that worker's training samples, its *shard* (int64). Shards never
overlap (except those of `Shared`), together cover all samples, and are never empty. The same
arguments always give the same shards. More workers than samples are a `ValueError`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgegossip.contract.protocol import Rank
from edgegossip.contract.randomness import derive_seed, generator
from edgegossip.contract.ranges import check_range, check_ranges
from edgegossip.data.dataset import Dataset

Partition: TypeAlias = Callable[[Dataset, int, int], list[Tensor]]
"""(dataset, num_workers, seed) -> the shard of each rank."""


def is_skewed(partition: Partition) -> bool:
    """Whether workers see different mixes of classes or people.

    A custom partition can set an attribute `is_skewed`; the default is False.

    >>> is_skewed(IID()), is_skewed(LabelSkew(0.8)), is_skewed(LabelSkew(0.0))
    (False, True, False)
    """
    return bool(getattr(partition, "is_skewed", False))


@dataclass(frozen=True)
class IID:
    """Deal the shuffled samples evenly: shard sizes differ by at most one."""

    def __call__(self, dataset: Dataset, num_workers: int, seed: int) -> list[Tensor]:
        return _shards(_shuffled(dataset, num_workers, seed) % num_workers, num_workers)


@dataclass(frozen=True)
class Proportional:
    """Deal the shuffled samples in given proportions, for example more to faster workers.

    Each size deviates from its exact share by less than one sample, except that a worker whose
    share rounds to 0 takes one sample from the largest shard.

    Args:
        proportions: One number above 0 for each worker; only their ratios matter.

    Raises:
        ValueError: If a proportion is not above 0 and finite; when called, if their number is
            not that of the workers.
    """

    proportions: tuple[float, ...]

    def __post_init__(self) -> None:
        for proportion in self.proportions:
            check_range("proportions", proportion, "above 0 and finite")

    def __call__(self, dataset: Dataset, num_workers: int, seed: int) -> list[Tensor]:
        order = _shuffled(dataset, num_workers, seed)
        if len(self.proportions) != num_workers:
            raise ValueError(
                f"{len(self.proportions)} proportions for {num_workers} workers; give one each"
            )
        owners = torch.empty_like(order)
        owners[order] = _deal(len(order), np.array(self.proportions))
        return _shards(owners, num_workers)


@dataclass(frozen=True)
class Shared:
    """Let all workers read all samples, and claim them in units as the run goes on.

    Each epoch divides the samples, in a new random order, into units. `ClaimedWork` lets the
    workers agree on who trains on which units, so that each sample is visited once per epoch,
    by a worker that has time for it. Other algorithms do not train on shared data.

    Args:
        units: Samples per unit, at least 2. The last unit may have fewer. Whole batches fit if
            this is a multiple of the batch size; a slow worker delays the end of an epoch by up
            to the time that it takes for one unit.

    Raises:
        ValueError: If `units` is out of range.
    """

    units: int = 256

    def __post_init__(self) -> None:
        check_ranges(self, units="at least 2")

    def __call__(self, dataset: Dataset, num_workers: int, seed: int) -> list[Tensor]:
        _require_enough(dataset, num_workers)
        return [torch.arange(len(dataset.train))] * num_workers


def units_of(num_samples: int, unit_size: int, seed: int, epoch: int) -> list[Tensor]:
    """Divide the samples of an epoch into units, in the order that `seed` draws for it.

    A single sample at the end joins the last unit, because no batch may consist of one sample.

    >>> [unit.tolist() for unit in units_of(7, unit_size=3, seed=0, epoch=1)]
    [[4, 3, 1], [0, 2, 5, 6]]
    """
    order = torch.randperm(num_samples, generator=generator(seed, "units", epoch))
    return list(torch.split(order, unit_sizes(num_samples, unit_size)))


def unit_sizes(num_samples: int, unit_size: int) -> list[int]:
    """Number of samples of each unit of an epoch.

    >>> unit_sizes(8, unit_size=3), unit_sizes(7, unit_size=3)
    ([3, 3, 2], [3, 4])
    """
    num_whole, rest = divmod(num_samples, unit_size)
    if rest == 1 and num_whole:
        return [unit_size] * (num_whole - 1) + [unit_size + 1]
    return [unit_size] * num_whole + [rest] * (rest > 0)


@dataclass(frozen=True)
class Dirichlet:
    r"""Deal each class in random proportions, so shards have few classes and uneven sizes.

    For each class :math:`c`, the workers' shares are

    .. math:: q_c \sim \mathrm{Dir}(\alpha, \ldots, \alpha)

    rounded to whole samples. A worker without samples takes the first sample of the largest
    shard, so no shard is empty.

    Args:
        alpha: Concentration, above 0: near 0 each class goes to one worker, 0.1 is strongly
            skewed, 100 nearly even.

    Raises:
        ValueError: If `alpha` is out of range; when called, if the data has no classes.

    References:
        Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML
        2019, arXiv:1905.12022. Hsu, Qi and Brown, arXiv:1909.06335, instead draw each worker's
        mix of classes, with shards of equal size.
    """

    alpha: float

    is_skewed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ranges(self, alpha="above 0 and finite")

    def __call__(self, dataset: Dataset, num_workers: int, seed: int) -> list[Tensor]:
        order = _shuffled(dataset, num_workers, seed)
        # NumPy's generator stays exact for tiny alpha, where gamma draws in float32 are all 0.
        draws = np.random.default_rng(derive_seed(seed, "partition", "dirichlet"))
        owners = torch.empty_like(order)
        for members in _by_label(dataset, order):
            shares = draws.dirichlet(np.full(num_workers, self.alpha))
            owners[members] = _deal(len(members), shares)
        return _shards(owners, num_workers)


@dataclass(frozen=True)
class LabelSkew:
    """Deal a fraction of every class in blocks sorted by label, and the rest evenly.

    Shard sizes differ by at most one. A skew of 0 is like `IID`. With a skew of 1, each worker
    sees a block of the samples sorted by label; with as many workers as classes of equal size,
    the block is one class.

    Args:
        skew: Fraction to sort, in [0, 1].

    Raises:
        ValueError: If `skew` is out of range; when called, if the data has no classes.

    References:
        `skew_sort` in the code of Aketi, Singh and Rabaey, "Sparse-Push", arXiv:2102.05715, and
        of later papers, which use 0.8 for CIFAR-10.
    """

    skew: float

    def __post_init__(self) -> None:
        check_ranges(self, skew="in [0, 1]")

    @property
    def is_skewed(self) -> bool:
        return self.skew > 0

    def __call__(self, dataset: Dataset, num_workers: int, seed: int) -> list[Tensor]:
        order = _shuffled(dataset, num_workers, seed)
        is_sorted = torch.zeros(len(order), dtype=torch.bool)
        blocks = []
        for members in _by_label(dataset, order):
            blocks.append(members[: round(self.skew * len(members))])
            is_sorted[blocks[-1]] = True
        by_label = torch.cat(blocks)
        sizes = _even_sizes(len(by_label), num_workers)
        owners = torch.empty_like(order)
        ranks = torch.arange(num_workers)
        owners[by_label] = ranks.repeat_interleave(sizes)
        # The rest fills each shard up to its even size.
        rest = _even_sizes(len(order), num_workers) - sizes
        owners[order[~is_sorted[order]]] = ranks.repeat_interleave(rest)
        return _shards(owners, num_workers)


@dataclass(frozen=True)
class BySubject:
    """Keep the samples of each person or device together: the natural shards of a data set.

    With as many workers as subjects, each worker has one subject, in order. With fewer workers,
    subjects are assigned, largest first, to the smallest shard so far. The seed does not
    matter.

    Raises:
        ValueError: When called, if the data has no subjects, or fewer than workers.
    """

    is_skewed: ClassVar[bool] = True

    def __call__(self, dataset: Dataset, num_workers: int, seed: int) -> list[Tensor]:
        _require_enough(dataset, num_workers)
        if dataset.subjects is None:
            raise ValueError(f"{dataset.name!r} has no subjects; use Dirichlet")
        _, subject_of, counts = np.unique(
            dataset.subjects.numpy(), return_inverse=True, return_counts=True
        )
        if num_workers > len(counts):
            raise ValueError(
                f"num_workers={num_workers} is more than the {len(counts)} subjects of "
                f"{dataset.name!r}; use at most {len(counts)} workers"
            )
        return _shards(torch.from_numpy(_group(counts, num_workers)[subject_of]), num_workers)


def _group(counts: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    """Assign subjects to groups of nearly equal size, ordered by their first subject.

    >>> _group(np.array([1, 5, 2, 2]), 2).tolist()
    [0, 1, 0, 0]
    """
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    smallest_first = [(0, group) for group in range(num_groups)]
    for subject in np.argsort(-counts, kind="stable").tolist():
        size, group = heapq.heappop(smallest_first)
        groups[group].append(subject)
        heapq.heappush(smallest_first, (size + int(counts[subject]), group))
    owners = np.empty_like(counts)
    for group, members in enumerate(sorted(groups, key=min)):
        owners[members] = group
    return owners


def _require_enough(dataset: Dataset, num_workers: int) -> None:
    num_samples = len(dataset.train)
    if not 1 <= num_workers <= num_samples:
        raise ValueError(
            f"num_workers must be in 1 .. {num_samples}, the training samples of "
            f"{dataset.name!r}, got {num_workers}"
        )


def _shuffled(dataset: Dataset, num_workers: int, seed: int) -> Tensor:
    """The training samples in random order, int64 [num_samples]."""
    _require_enough(dataset, num_workers)
    return torch.randperm(len(dataset.train), generator=generator(seed, "partition"))


def _by_label(dataset: Dataset, order: Tensor) -> tuple[Tensor, ...]:
    """The samples of each class, in the given order."""
    if not dataset.num_classes:
        raise ValueError(f"{dataset.name!r} has no classes; use IID, Proportional or BySubject")
    labels = dataset.train.labels
    by_label = order[labels[order].argsort(stable=True)]
    return torch.split(by_label, labels.bincount(minlength=dataset.num_classes).tolist())


def _even_sizes(num_samples: int, num_workers: int) -> Tensor:
    """Sizes [num_workers] that differ by at most one.

    >>> _even_sizes(8, 3)
    tensor([3, 3, 2])
    """
    return num_samples // num_workers + (torch.arange(num_workers) < num_samples % num_workers)


def _deal(num_samples: int, weights: NDArray[np.float64]) -> Tensor:
    """The owner of each sample, in blocks proportional to the owners' weights.

    >>> _deal(5, np.array([1.0, 3.0]))
    tensor([0, 1, 1, 1, 1])
    """
    # Rounding the ends of the blocks, not their lengths, keeps the sum exact.
    ends = np.round(np.cumsum(weights) / np.sum(weights) * num_samples).astype(np.int64)
    ends[-1] = num_samples
    sizes = torch.from_numpy(np.diff(ends, prepend=0))
    return torch.arange(len(weights)).repeat_interleave(sizes)


def _shards(owners: Tensor, num_workers: int) -> list[Tensor]:
    """The samples of each owner, sorted; an empty shard gets a sample of the largest shard."""
    sizes = owners.bincount(minlength=num_workers)
    for rank in (sizes == 0).nonzero().flatten().tolist():
        largest = int(sizes.argmax())
        owners[(owners == largest).nonzero()[0]] = rank
        sizes[largest] -= 1
        sizes[rank] = 1
    return list(torch.split(owners.argsort(stable=True), sizes.tolist()))


def deal(
    dataset: Dataset, ranks: Sequence[Rank], partition: Partition, seed: int
) -> dict[Rank, Tensor]:
    """Divide the training samples among workers, and check the partition's shards.

    Args:
        dataset: The data set.
        ranks: The workers that have data, in order.
        partition: Makes the shards.
        seed: Seed of the run.

    Returns:
        Indices [n] of the training samples of each of these workers.

    Raises:
        ValueError: If the number of shards is not that of the workers, or a shard has anything
            but indices of training samples.
    """
    shards = [*partition(dataset, len(ranks), seed)]
    if len(shards) != len(ranks):
        raise ValueError(
            f"partition made {len(shards)} shards for {len(ranks)} workers; return one "
            "for each worker"
        )
    num_samples = len(dataset.train)
    for rank, shard in zip(ranks, shards, strict=True):
        if not _are_indices(shard, num_samples):
            raise ValueError(
                f"partition gave worker {rank} {shard!r:.80}; return indices of training "
                f"samples, int64 [n] in 0 .. {num_samples - 1}"
            )
    return dict(zip(ranks, shards, strict=True))


def _are_indices(shard: object, num_samples: int) -> bool:
    if not isinstance(shard, Tensor) or shard.ndim != 1:
        return False
    if shard.dtype not in (torch.int64, torch.int32):
        return False
    return not len(shard) or bool(shard.min() >= 0 and shard.max() < num_samples)
