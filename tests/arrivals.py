"""Whether what arrives during training counts, for algorithms that do not wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tests.trained import trained_event
from tests.worlds import NUM_PARAMS
from torch import Tensor

from edgegossip.contract.asynchronous import Asynchronous
from edgegossip.contract.protocol import Message, Received, Send, Started

START = torch.zeros(NUM_PARAMS)


def require_that_arrivals_count(algorithm: Asynchronous[Any]) -> None:
    """Fail if worker 0 ends a block with the same model whether or not it heard of worker 1."""
    message = _message_to_0(algorithm)
    assert not torch.equal(_after_a_block(algorithm), _after_a_block(algorithm, message))


def _after_a_block(algorithm: Asynchronous[Any], *arriving: Message) -> Tensor:
    state = algorithm.init(0, START)
    algorithm.handle(state, Started(num_samples=1), 0.0)
    for message in arriving:
        algorithm.handle(state, Received(1, message), 0.5)
    algorithm.handle(state, trained_event(START + 1, START), 1.0)
    estimate: Tensor = state.estimate
    return estimate


def _message_to_0(algorithm: Asynchronous[Any]) -> Message:
    """The first one that worker 1 sends it, with another model than its own."""
    eager = replace(algorithm, exchange_probability=1.0)
    state = eager.init(1, START)
    eager.handle(state, Started(num_samples=1), 0.0)
    for _ in range(100):
        trained = trained_event(state.params + 3, state.params)
        for effect in eager.handle(state, trained, 1.0):
            if isinstance(effect, Send) and effect.receiver == 0:
                return effect.message
    raise AssertionError("worker 1 sends nothing to worker 0")
