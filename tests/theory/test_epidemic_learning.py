"""Epidemic learning: what one-way messages to random workers do to the mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.algorithms import MATCHINGS
from tests.tiers import thorough
from tests.worlds import INITIAL, final_params, make_world, mix_only

from edgegossip.algorithms.gossip.epidemic_learning import EpidemicLearning
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.mixing import Uniform, mixing_matrix
from edgegossip.contract.topology import (
    Topology,
    random_one_peer,
    random_receivers,
    ring,
    star,
)


@pytest.mark.parametrize("topology", [ring(5), MATCHINGS, star(5)], ids=repr)
def test_where_neighbors_answer_it_is_gossip_with_uniform_weights(topology: Topology) -> None:
    arguments: dict[str, Any] = {"topology": topology, "num_rounds": 6, "local_steps": 2}
    torch.testing.assert_close(
        final_params(make_world(EpidemicLearning(**arguments))),
        final_params(make_world(Gossip(**arguments, mixing=Uniform()))),
    )


def test_a_round_multiplies_by_the_uniform_weights_of_the_round() -> None:
    topology = random_receivers(8, num_receivers=2, period=5, seed=0)
    expected = INITIAL[:8].double()
    for round in range(5):
        expected = mixing_matrix(topology, Uniform(), round) @ expected
    after = mix_only(EpidemicLearning(topology=topology, num_rounds=5), INITIAL[:8])
    torch.testing.assert_close(after, expected.float())


def test_equal_numbers_of_models_keep_the_mean() -> None:
    topology = random_one_peer(8, period=12, seed=0)
    after = mix_only(EpidemicLearning(topology=topology, num_rounds=12), INITIAL[:8])
    torch.testing.assert_close(after.mean(0), INITIAL[:8].mean(0))
    assert consensus_distance(after) < 0.05 * consensus_distance(INITIAL[:8])


@thorough
def test_unequal_numbers_keep_it_in_expectation_only() -> None:
    """Each column of W then adds up to 1 on average over the drawn rounds."""
    topology = random_receivers(6, num_receivers=2, period=1500, seed=0)
    columns = torch.stack(
        [mixing_matrix(topology, Uniform(), round).sum(0) for round in range(1500)]
    )
    assert columns[0].max() > 1.05
    torch.testing.assert_close(columns.mean(0), torch.ones(6).double(), atol=0.02, rtol=0)
