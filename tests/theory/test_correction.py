"""EdgeGossip's correction: whose data averaged models lean towards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.trained import trained_event
from tests.worlds import TARGETS, make_world

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.wrappers.edge_gossip.balancer import Balancer
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.edge_gossip.plan import Correction, EpochPlan
from edgegossip.contract.protocol import Epochs, Train
from edgegossip.contract.topology import complete
from edgegossip.sim.platform import Platform

SPEEDS = torch.tensor([8.0, 4.0, 2.0, 2.0, 1.0])
SHARES = SPEEDS / SPEEDS.max()
SIZE = 160


def after_epochs(
    correction: float,
    speeds: torch.Tensor = SPEEDS,
    num_rounds: int = 1,
    **settings: Any,  # noqa: ANN401
) -> torch.Tensor:
    """Where all are after epochs of small steps from 0, over the length of one."""
    lr = 1e-5
    inner = EpochGossip(topology=complete(NUM_WORKERS), num_rounds=num_rounds)
    settings = {"max_mean_factor": math.inf, **settings}
    algorithm = EdgeGossip(inner=inner, correction=correction, **settings)
    platforms = [Platform(throughput=speed) for speed in speeds.tolist()]
    world = make_world(algorithm, platforms=platforms, size=SIZE, lr=lr)
    assert world.run()
    return world.estimates()[0] / (lr * SIZE)


@pytest.mark.parametrize("max_keep_ratio", [1.0, 0.5])
@pytest.mark.parametrize("correction", [0.0, 0.5, 1.0])
def test_each_target_counts_as_the_exponent_says(
    correction: float, max_keep_ratio: float
) -> None:
    weights = SHARES * (SHARES.mean() / SHARES) ** correction
    expected = max_keep_ratio * (weights[:, None] * TARGETS[:NUM_WORKERS]).mean(0)
    after = after_epochs(correction, max_keep_ratio=max_keep_ratio)
    torch.testing.assert_close(after, expected, rtol=0.02, atol=0.02)


def test_on_equal_platforms_nothing_changes_to_the_last_bit() -> None:
    equal = torch.full((NUM_WORKERS,), 2.0)
    assert torch.equal(after_epochs(0.5, equal), after_epochs(0.0, equal))


def test_who_knows_only_the_fastest_corrects_nothing() -> None:
    three = [after_epochs(beta, num_rounds=3, spread="gossip") for beta in (0.5, 0.0)]
    assert torch.equal(*three)
    whole = 3 * TARGETS[:NUM_WORKERS].mean(0)
    assert not torch.allclose(three[0], whole, rtol=0.02), "shares were never cut"


@pytest.mark.parametrize(("focus", "factor"), [(0.0, 2.0), (0.5, 2.0**0.5), (1.0, 1.0)])
def test_passes_over_the_most_important_data_count_for_more_than_their_share(
    focus: float, factor: float
) -> None:
    plan = EpochPlan.begin(
        Train(torch.zeros(1), Epochs()),
        keep_ratio=0.25,
        epoch_cost=8.0,
        throughput=1.0,
        block_share=1.0,
        now=0.0,
        correction=Correction(mean_keep_ratio=0.5, exponent=1.0),
    )
    metrics = {"focus": focus}
    plan.account(trained_event(torch.ones(1), torch.zeros(1), num_samples=2, metrics=metrics))
    assert plan.result(now=2.0).params.item() == pytest.approx(factor)


@pytest.mark.parametrize("spread", [2.0, 8.0, 64.0, 1e6])
@pytest.mark.parametrize("correction", [0.0, 0.5, 1.0])
def test_the_stable_exponent_is_the_largest_within_the_limit(
    spread: float, correction: float
) -> None:
    speeds = [spread, spread / 2, 2.0, 1.0]
    shares = Balancer().balance(speeds, num_samples=[1000] * 4)
    factors = shares.mean_keep_ratio / shares.keep_ratios

    def mean_factor(exponent: float) -> float:
        return float((factors**exponent).mean())

    found = shares.stable_correction(correction, max_mean_factor=1.3)
    assert mean_factor(found) <= 1.3
    assert found == correction or mean_factor(1.001 * found) > 1.3


@pytest.mark.parametrize(("limit", "is_stable"), [(1.3, True), (math.inf, False)])
def test_the_limit_keeps_workers_of_very_different_speed_from_diverging(
    limit: float, is_stable: bool
) -> None:
    # Each pass ends in the worker's own minimum, so a mean factor above 2 leads further away
    # from the mean of the minima with each epoch.
    inner = EpochGossip(topology=complete(NUM_WORKERS), num_rounds=12)
    algorithm = EdgeGossip(inner=inner, correction=1.0, max_mean_factor=limit)
    platforms = [Platform(throughput=speed) for speed in (64.0, 2.0, 1.0, 1.0, 1.0)]
    world = make_world(algorithm, platforms=platforms, size=640, lr=0.5)
    assert world.run()
    assert bool((world.estimates()[0].abs() < 10).all()) is is_stable
