"""Validation splits from training data, for algorithms that tune themselves."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from edgegossip.contract.randomness import generator
from edgegossip.contract.ranges import check_range
from edgegossip.data.dataset import ArraySplit, Dataset, JoinedSplit, Split


def hold_out(
    dataset: Dataset, share: float = 0.1, *, seed: int = 0, by_subject: bool = False
) -> Dataset:
    """Move a share of the training samples to a validation split.

    Held-out samples are not trained on, so hold out none for an algorithm that never evaluates.
    The same arguments always hold out the same samples, and all workers of a network must use
    the same arguments. `mean` and `std` still include the held-out samples.

    Args:
        dataset: Data set without a validation split.
        share: Share of the training samples to hold out, in (0, 1). Each class deviates from
            its exact share by less than one sample.
        seed: Seed of the stream ``(seed, "validation")``.
        by_subject: Hold out whole subjects instead, `share` of them, at least one. Validation
            then uses people absent from training, as does such a data set's test split.

    Raises:
        ValueError: If `share` is out of range or leaves a split empty, if there is already a
            validation split, or if subjects are required but unknown.

    >>> split = ArraySplit(torch.rand(20, 2), torch.tensor([0, 1]).repeat(10))
    >>> data = hold_out(Dataset("points", split, split, num_classes=2, input_shape=(2,)))
    >>> len(data.train), sorted(data.validation.labels.tolist())
    (18, [0, 1])
    """
    check_range("share", share, "in (0, 1)")
    if dataset.validation is not None:
        raise ValueError(f"{dataset.name!r} has a validation split; hold out only once")
    drawn = _subjects(dataset, share, seed) if by_subject else _stratified(dataset, share, seed)
    kept, held = (~drawn).nonzero().flatten(), drawn.nonzero().flatten()
    if not len(kept) or not len(held):
        raise ValueError(
            f"share={share} holds out {len(held)} of {len(drawn)} training samples; both "
            "splits need at least 1"
        )
    return dataclasses.replace(
        dataset,
        train=some_of(dataset.train, kept),
        validation=some_of(dataset.train, held),
        subjects=None if dataset.subjects is None else dataset.subjects[kept],
    )


def _stratified(dataset: Dataset, share: float, seed: int) -> Tensor:
    """Draw samples at equal distances from a list ordered by class and shuffled within each
    class: bool [num_train].
    """
    num_samples, labels = len(dataset.train), dataset.train.labels
    order = torch.randperm(num_samples, generator=generator(seed, "validation"))
    by_class = order[labels[order].argsort(stable=True)]
    # Number of samples drawn up to each place.
    counts = (torch.arange(num_samples + 1, dtype=torch.float64) * share).round()
    drawn = torch.empty(num_samples, dtype=torch.bool)
    drawn[by_class] = counts.diff() > 0
    return drawn


def _subjects(dataset: Dataset, share: float, seed: int) -> Tensor:
    """Draw all samples of some subjects, bool [num_train]."""
    if dataset.subjects is None:
        raise ValueError(f"{dataset.name!r} has no subjects")
    subjects = torch.unique(dataset.subjects)
    order = torch.randperm(len(subjects), generator=generator(seed, "validation"))
    chosen = order[: max(1, round(share * len(subjects)))]
    return torch.isin(dataset.subjects, subjects[chosen])


def some_of(split: Split, indices: Tensor) -> Split:
    """Take some samples of a split, int64 indices [n]."""
    if isinstance(split, ArraySplit) and not split.is_mapped:
        some = split.batch(indices)
        x, y = (some, None) if split.y is None else some
        return ArraySplit(x, y, num_workers=split.num_workers)
    return JoinedSplit((split, indices))
