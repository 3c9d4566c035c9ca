"""A server's worker: settings that it refuses, and training that goes back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.effects import only
from tests.trained import trained_event

from edgegossip.algorithms.server.methods import ASP, BSP
from edgegossip.contract.protocol import Message, Received, Send, Started, Train


@pytest.mark.parametrize(
    "wrong", [{"rate_ratio": 0.0}, {"rate_ratio": math.inf}, {"resend_after": 0.0}]
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        BSP(num_workers=3, num_rounds=2, **wrong)


def test_worker_whose_training_has_gone_back_goes_on_from_the_model_that_it_asks_for() -> None:
    algorithm = ASP(num_workers=2, num_rounds=5)
    sound, model = torch.ones(3), torch.full((3,), 2.0)
    state = algorithm.init(1, torch.zeros(3))
    algorithm.handle(state, Started(), 0.0)
    gone_back = trained_event(sound, sound, num_steps=0, has_gone_back=True)
    (pull,) = algorithm.handle(state, gone_back, 1.0)
    assert isinstance(pull, Send)
    assert (pull.receiver, pull.message.kind) == (0, "pull")
    assert torch.equal(state.params, sound)
    answer = Message("params", 1, {"params": model, "counts": torch.tensor([1, 1])})
    train = only(Train, algorithm.handle(state, Received(0, answer), 2.0))
    assert torch.equal(train.params, model)
