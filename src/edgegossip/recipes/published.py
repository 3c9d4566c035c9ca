"""The EdgeGossip paper's system as one setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.errors import unknown_name
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.machines import profile
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.aggregation import aggregator
from edgegossip.training.sampling.selection import (
    Ranked,
    RankedInBatches,
    RankedPerClass,
    RankedShuffled,
    Selection,
)

Reading: TypeAlias = Literal["shuffled", "literal", "in-batches", "per-class"]

READINGS: Mapping[Reading, Selection] = {
    "shuffled": RankedShuffled(),
    "literal": Ranked(),
    "in-batches": RankedInBatches(),
    "per-class": RankedPerClass(),
}
"""Readings of Algorithm 2; see `as_published`."""

BALANCING: Mapping[str, Any] = {
    "block_share": 1.0,
    "correction": 0.0,
    "on_failure": "halt",
}
"""Settings of `EdgeGossip` in which our defaults differ from the paper."""


def as_published(
    experiment: Experiment,
    reading: Reading = "shuffled",
    *,
    technique: str = "hash-kmeans",
    ratio: float = 10.0,
) -> Experiment:
    """Run `experiment` with the whole system of the EdgeGossip paper around its algorithm.

    Args:
        experiment: An experiment with the base algorithm, such as `EpochGossip`. Its choice of
            samples is replaced, and its profiles are kept.
        reading: Reading of Algorithm 2.
        technique: Aggregation technique; the paper selects the first three of `aggregator`.
        ratio: Samples per aggregated point.

    Raises:
        ValueError: If `reading` or `technique` is unknown, `ratio` is below 1, or the
            algorithm contains an `EdgeGossip`.
    """
    if experiment.algorithm.traits.is_balanced:
        raise ValueError(
            f"as_published puts its own EdgeGossip around the algorithm, but "
            f"{experiment.algorithm!r:.60} is balanced already; give the algorithm within it"
        )
    profiles = {rank: profile(p, seed=rank) for rank, p in enumerate(experiment.platforms)}
    return replace(
        experiment,
        task=replace(
            experiment.task, accuracy_aware=published_samples(reading, technique, ratio)
        ),
        algorithm=EdgeGossip(inner=experiment.algorithm, **BALANCING),
        profiles=profiles | dict(experiment.profiles),
    )


def published_samples(
    reading: Reading, technique: str = "hash-kmeans", ratio: float = 10.0
) -> AccuracyAware:
    """Algorithm 2 in a `reading`, with a look at all aggregated points before each epoch.

    Args:
        reading: As in `as_published`.
        technique: As in `as_published`.
        ratio: As in `as_published`.

    Raises:
        ValueError: As in `as_published`.
    """
    if reading not in READINGS:
        raise ValueError(unknown_name("reading", reading, READINGS))
    return AccuracyAware(
        selection=READINGS[reading], aggregator=aggregator(technique, ratio), look_share=None
    )
