"""One worker alone: its rounds, without a word."""

from __future__ import annotations

import pytest
import torch
from tests.stage_workers import PARAMS
from tests.trained import trained_event

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.contract.protocol import Finish, Started, Train, WorkerLost


def test_one_alone_trains_its_rounds_and_says_nothing() -> None:
    algorithm = Alone(num_rounds=2, local_steps=3)
    state = algorithm.init(0, PARAMS)
    (request,) = algorithm.handle(state, Started(num_samples=4), 0.0)
    assert isinstance(request, Train)
    assert request.work.num_steps == 3  # type: ignore[union-attr]
    (request,) = algorithm.handle(state, trained_event(PARAMS + 1, PARAMS), 1.0)
    assert isinstance(request, Train)
    assert torch.equal(request.params, PARAMS + 1)
    assert algorithm.handle(state, WorkerLost(1), 1.0) == []
    assert algorithm.handle(state, trained_event(PARAMS + 2, PARAMS), 2.0) == [Finish()]
    assert state.round == 2
    assert algorithm.schema(PARAMS) == {}


@pytest.mark.parametrize("name", ["num_rounds", "local_steps"])
def test_one_alone_needs_something_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        Alone(**{"num_rounds": 1, name: 0})
