"""SparseLoCo against its rule: a decaying memory that does not affect training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.algorithms import NUM_ROUNDS, NUM_WORKERS
from tests.trained import trained_event
from tests.worlds import TARGETS, UNEVEN, final_params, make_world
from torch import Tensor

from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.sparseloco import SparseLoCo
from edgegossip.compression.compressor import Identity, PerChunk
from edgegossip.compression.sparse import TopK
from edgegossip.contract.protocol import Started, Train
from edgegossip.contract.topology import Topology, complete, directed_ring

OPTIMA = TARGETS[:NUM_WORKERS]


def sparseloco(topology: Topology | None = None, **arguments: Any) -> SparseLoCo:  # noqa: ANN401
    settings: dict[str, Any] = {"num_rounds": NUM_ROUNDS, "local_steps": 3}
    settings |= {"compressor": PerChunk(TopK(keep_ratio=0.3), chunk_size=3)}
    return SparseLoCo(topology=topology or complete(NUM_WORKERS), **settings | arguments)


def by_the_paper(algorithm: SparseLoCo, lr: float) -> Tensor:
    """The shared model and the paper's steps, with pseudo-gradients of the paper's sign."""
    theta = torch.zeros(OPTIMA.shape[1])
    error = torch.zeros_like(OPTIMA)
    for _ in range(algorithm.num_rounds):
        gradients = (1 - (1 - lr) ** algorithm.local_steps) * (theta - OPTIMA)
        error = algorithm.error_decay * error + gradients
        sent = torch.stack(
            [
                algorithm.compressor.decompress(algorithm.compressor.compress(each), len(theta))
                for each in error
            ]
        )
        error = error - sent
        theta = theta - algorithm.outer_lr * sent.mean(0)
    return theta


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("outer_lr", [1.0, 0.6])
def test_rounds_are_those_of_the_paper(decay: float, outer_lr: float) -> None:
    algorithm = sparseloco(error_decay=decay, outer_lr=outer_lr)
    after = final_params(make_world(algorithm, lr=0.1, platforms=UNEVEN))
    expected = by_the_paper(algorithm, lr=0.1)
    torch.testing.assert_close(after, expected.expand_as(after))


def test_the_decay_and_the_start_of_training_differ_from_diloco() -> None:
    arguments: dict[str, Any] = {"topology": complete(NUM_WORKERS), "num_rounds": NUM_ROUNDS}
    arguments |= {"local_steps": 3, "compressor": TopK(keep_ratio=0.3), "outer_momentum": 0.0}
    diloco = final_params(make_world(DiLoCo(**arguments)))
    one = final_params(make_world(SparseLoCo(**arguments, error_decay=1.0)))
    other = final_params(make_world(SparseLoCo(**arguments, error_decay=0.5)))
    assert (one - diloco).norm() > 0.01
    assert (one - other).norm() > 0.01


def test_without_compression_it_is_diloco_without_momentum() -> None:
    arguments: dict[str, Any] = {"compressor": Identity(), "num_rounds": NUM_ROUNDS}
    arguments |= {"topology": directed_ring(NUM_WORKERS), "local_steps": 3}
    one = SparseLoCo(**arguments)
    other = DiLoCo(**arguments, outer_momentum=0.0)
    assert torch.equal(final_params(make_world(one)), final_params(make_world(other)))


def test_training_starts_from_the_shared_model() -> None:
    algorithm = sparseloco(complete(1), compressor=TopK(0.4))
    state = algorithm.init(0, torch.zeros(5))
    algorithm.handle(state, Started(), 0.0)
    after = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    [train] = algorithm.handle(state, trained_event(after, torch.zeros(5)), 0.0)
    assert isinstance(train, Train)
    assert torch.equal(train.params, torch.tensor([0.0, 0.0, 0.0, 4.0, 5.0]))
    assert torch.equal(state.error, torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0]))


@pytest.mark.parametrize("decay", [-0.1, 1.1])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"error_decay must be in \[0, 1\], got"):
        sparseloco(error_decay=decay)
