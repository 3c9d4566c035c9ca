"""The controls that replace a part of EdgeGossip."""

from __future__ import annotations

import torch
from studies.ablations import RUNS, HeldOutGauge, HeldOutSamples, OwnGauge, held_out

from edgegossip.training.sampling.division import KMeans
from edgegossip.training.sampling.reduction import Fingerprint
from edgegossip.training.sampling.selection import Candidates

LABELS = torch.tensor([1, 0, 1] * 40)
RANDOM = torch.Generator().manual_seed(0)


def candidates(point_losses: float, sample_losses: float) -> Candidates:
    aggregator = HeldOutSamples(reduction=Fingerprint(), division=KMeans())
    found = aggregator.fit(torch.arange(120.0)[:, None], LABELS)
    assert len(found.x) == aggregator.num_subsets(LABELS)
    points = torch.full((len(found.x),), point_losses)
    return Candidates(
        losses=points,
        is_newest=torch.ones_like(points).bool(),
        labels=found.y,
        subset_of=found.subset_of,
        num_visits=torch.zeros(120, dtype=torch.int64),
        sample_losses=torch.full((120,), sample_losses),
    )


def test_a_twentieth_of_each_class_is_held_out() -> None:
    chosen = held_out(LABELS)
    assert [int((chosen & (label == LABELS)).sum()) for label in (0, 1)] == [2, 4]


def test_held_out_samples_are_points_of_their_own() -> None:
    found = HeldOutSamples(reduction=Fingerprint(), division=KMeans()).fit(
        torch.arange(120.0)[:, None], LABELS
    )
    assert set(found.x[:, 0].tolist()) == set(held_out(LABELS).nonzero()[:, 0].tolist())
    assert torch.equal(found.y[found.subset_of], LABELS)  # all have a point of their class


def test_the_held_out_gauge_trains_on_no_sample_that_it_measures() -> None:
    for losses in (0.01, 5.0):  # recognized, so that it focuses; and not
        choice = HeldOutGauge().choose(candidates(losses, 1.0), 120, RANDOM)
        assert len(choice.order) == 120
        assert not held_out(LABELS)[choice.order].any()


def test_held_out_samples_decide_on_the_focus() -> None:
    focus = [
        HeldOutGauge().choose(candidates(losses, 1.0), 60, RANDOM).focus
        for losses in (0.01, 5.0)
    ]
    assert focus[0] > 0.99
    assert focus[1] == 0.0


def test_without_points_the_samples_own_losses_decide() -> None:
    assert OwnGauge().focus(candidates(5.0, 0.01)) > 0.99
    assert OwnGauge().focus(candidates(0.01, 5.0)) == 0.0
    assert not OwnGauge().needs_losses


def test_only_the_choice_of_samples_alone_waits() -> None:
    assert [name for name, run in RUNS.items() if run.waits] == ["epoch-gossip-focused"]
