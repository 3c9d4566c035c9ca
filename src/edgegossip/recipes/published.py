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
    r"""Run `experiment` with the whole system of the EdgeGossip paper around its algorithm.

    - Aggregated points: hash and k-means, 10 samples per point.
    - The predictor starts from a profile of each platform.
    - Algorithm 1 before each epoch, once, without a correction. It halts the run with a
      `PlatformError` if more than 10 % of the platforms have failed.
    - Algorithm 2, from the losses of all aggregated points.

    Algorithm 2 has four readings, from the most to the least literal:

    - "literal" (`Ranked`): whole subsets by descending loss; a batch is one subset after the
      other, so batches lack most classes.
    - "shuffled" (`RankedShuffled`): the same samples in random order, as a shuffling
      ``DataLoader`` over the chosen subsets gives them.
    - "in-batches" (`RankedInBatches`): the ranking is within mini-batches of aggregated points,
      as in SlimML, the authors' earlier system.
    - "per-class" (`RankedPerClass`): the ranking is within each class, not over all classes.

    Args:
        experiment: An experiment with the base algorithm, such as `EpochGossip`. Its choice of
            samples is replaced, and its profiles are kept.
        reading: Reading of Algorithm 2.
        technique: Aggregation technique; the paper selects the first three of `aggregator`.
        ratio: Samples per aggregated point.

    Raises:
        ValueError: If `reading` or `technique` is unknown, `ratio` is below 1, or the
            algorithm contains an `EdgeGossip`.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 32(7), 2021, doi:10.1109/TPDS.2020.3046440.
        Departures that remain. *Balancer*: each worker computes its own share, from forecasts
        that go from worker to worker; in the paper they go through Redis, which here only
        stores what the monitor measures, and nothing reads it. :math:`|X_i|` is the cost of an
        epoch in samples, where the look at an aggregated point costs a third of a sample, so a
        worker ends its look and its training together with the others. Failures are counted
        after, not within, the loop over the platforms. *Predictor*: the paper names no
        regression; ours is a Gaussian process on the logarithm of the slow-down. Simulated
        profiles are measured free of charge. *Aggregation*: the fingerprint has ten real values
        instead of ten bits. "isvd-lsh" has the authors' earlier number of factors, and buckets
        of equal size by medians; "isvd-lsh-printed" has the printed number and random
        hyperplanes. Steps of the incremental SVD are summed over blocks of points. Singular
        values are those of gray pictures. *Algorithm 2*: the number of samples is exact, where
        the paper's loop overshoots by up to a batch; batches have the task's size, where the
        paper's have whole subsets (except in "literal"); a single left-over sample joins the
        batch before it. *Virtual time*: aggregation and looks are charged by models of their
        operations, not measured.
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
