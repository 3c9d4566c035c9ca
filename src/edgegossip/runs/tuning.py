"""Trials of settings: their seeds, the data that measures them, and names of folders."""

from __future__ import annotations

from dataclasses import replace

from edgegossip.data.dataset import Dataset
from edgegossip.data.hold_out import hold_out
from edgegossip.data.local import Local

TUNING_SEED = 100
"""Seed of trials; results use other seeds."""


def without_test_data(dataset: Dataset, share: float) -> Dataset:
    """Replace the test samples with held-out training samples; a validation split stays.

    `Local` data is unchanged, because reports never measure its test samples.
    """
    if isinstance(dataset, Local):
        return dataset
    held = hold_out(replace(dataset, validation=None), share, seed=TUNING_SEED)
    assert held.validation is not None
    return replace(held, test=held.validation, validation=dataset.validation)


def check_seeds(seeds: tuple[int, ...]) -> None:
    """Validate the seeds of repetitions.

    Raises:
        ValueError: If there is no seed, or a duplicate.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be one or more, all different, got {seeds}")


def slug(name: str) -> str:
    """Turn a name into a part of a path.

    >>> slug("lr = 0.1, s = 40")
    'lr-0.1-s-40'
    """
    return name.replace(", ", "-").replace(" = ", "-").replace(" ", "-")
