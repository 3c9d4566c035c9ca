"""Consensus distance, staleness and payload size."""

from __future__ import annotations

import pytest
import torch

from edgegossip.contract.metrics import consensus_distance, payload_num_bytes, staleness
from edgegossip.contract.randomness import generator


def test_consensus_distance_is_the_root_of_the_mean_squared_distance_to_the_mean() -> None:
    params = torch.randn(5, 7, generator=generator(0, "params"), dtype=torch.float64)
    distances = [float((row - params.mean(dim=0)).norm()) for row in params]
    expected = (sum(distance**2 for distance in distances) / 5) ** 0.5
    assert consensus_distance(params) == pytest.approx(expected, rel=1e-12)


def test_workers_that_agree_have_distance_exactly_zero() -> None:
    row = torch.randn(100, generator=generator(0, "row"))
    assert consensus_distance(row.expand(7, -1)) == 0.0


def test_small_disagreement_of_large_params_is_not_lost() -> None:
    params = torch.full((2, 1), 1e4) + torch.tensor([[0.0], [2**-10]])
    assert consensus_distance(params) == 2**-11


@pytest.mark.parametrize("params", [torch.zeros(3), torch.zeros(0, 3)])
def test_params_that_are_not_one_row_per_worker_are_refused(params: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be \[num_workers, num_params\], got shape"):
        consensus_distance(params)


def test_message_from_an_earlier_round_is_stale() -> None:
    assert staleness(receiver_round=7, message_round=3) == 4


def test_message_from_a_later_round_is_not_stale() -> None:
    assert staleness(receiver_round=3, message_round=7) == 0


def test_payload_counts_the_bytes_of_every_tensor() -> None:
    payload = {
        "values": torch.zeros(2, 3, dtype=torch.float16),
        "indices": torch.zeros(5, dtype=torch.int32),
        "weight": torch.tensor(1.0, dtype=torch.float64),
    }
    assert payload_num_bytes(payload) == 2 * 3 * 2 + 5 * 4 + 8
    assert payload_num_bytes({}) == 0
