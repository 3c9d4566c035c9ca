"""EdgeGossip's correction: whose data averaged models lean towards."""

from __future__ import annotations

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.worlds import NUM_PARAMS, TARGETS, make_world

from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.balance.edge_gossip import EdgeGossip
from edgegossip.core.topology import complete
from edgegossip.sim.platform import Platform

SPEEDS = torch.tensor([8.0, 4.0, 2.0, 2.0, 1.0])
SHARES = SPEEDS / SPEEDS.max()
SIZE = 160


def first_step(
    correction: float, speeds: torch.Tensor = SPEEDS, spread: str = "exact"
) -> torch.Tensor:
    """Where all are after one epoch from 0 in small steps, over the length of these."""
    lr = 1e-5
    algorithm = EdgeGossip(
        inner=EpochGossip(topology=complete(NUM_WORKERS), num_rounds=1),
        correction=correction,
        spread=spread,  # type: ignore[arg-type]
    )
    platforms = [Platform(throughput=speed) for speed in speeds.tolist()]
    world = make_world(algorithm, platforms=platforms, size=SIZE, lr=lr)
    assert world.run()
    return world.estimates()[0] / (lr * SIZE)


@pytest.mark.parametrize("correction", [0.0, 0.5, 1.0])
def test_each_target_counts_as_the_exponent_says(correction: float) -> None:
    weights = SHARES * (SHARES.mean() / SHARES) ** correction
    expected = (weights[:, None] * TARGETS[:NUM_WORKERS]).mean(0)
    torch.testing.assert_close(first_step(correction), expected, rtol=0.02, atol=0.02)


def test_fully_corrected_all_data_count_alike_and_together_as_much_as_before() -> None:
    expected = SHARES.mean() * TARGETS[:NUM_WORKERS].mean(0)
    torch.testing.assert_close(first_step(1.0), expected, rtol=0.02, atol=0.02)


def test_on_equal_platforms_nothing_changes_to_the_last_bit() -> None:
    equal = torch.full((NUM_WORKERS,), 2.0)
    assert torch.equal(first_step(0.5, equal), first_step(0.0, equal))


def test_who_knows_only_the_fastest_corrects_nothing() -> None:
    assert first_step(0.5, spread="gossip").shape == (NUM_PARAMS,)
    assert torch.equal(first_step(0.5, spread="gossip"), first_step(0.0, spread="gossip"))
