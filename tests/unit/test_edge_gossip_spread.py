"""One balanced worker that passes on forecasts by gossip, driven by hand."""

from __future__ import annotations

from typing import Any

import torch
from tests.balanced_worker import INNER, Worker, sends
from tests.effects import asked, only

from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.protocol import Epochs, Message, Predict, Received, Send, Train


def gossiping(inner: Any = INNER, **settings: Any) -> Worker:  # noqa: ANN401
    return Worker(EdgeGossip(inner=inner, spread="gossip", block_share=1.0, **settings))


def params_message(seconds: float | None = None, age: int = 0) -> Message:
    known = {} if seconds is None else {"fastest_seconds": seconds, "fastest_age": age}
    return Message("params", 0, {"params": torch.ones(2)}, known)


def test_gossip_sends_no_messages_of_its_own_and_waits_for_none() -> None:
    worker = gossiping()
    worker.starts()
    [train] = worker.expects(20.0)
    assert isinstance(train, Train)
    assert asked(train) == (Epochs(1.0), 1.0)


def test_gossip_takes_the_fastest_from_what_it_hears() -> None:
    worker = gossiping()
    worker.starts()
    train = only(Train, worker.expects(20.0))
    effects = worker.trains(train, 100.0)
    for effect in effects:
        assert isinstance(effect, Send)
        assert effect.message.numbers == {"fastest_seconds": 5.0, "fastest_age": 0}
    worker.on(Received(1, params_message(2.0, age=1)))
    assert worker.on(Received(2, params_message())) == [Predict()]
    assert asked(only(Train, worker.expects(20.0))) == (Epochs(1.0), 0.4)
    assert worker.state.fastest.age == 2


def test_gossip_leaves_the_inner_algorithm_its_messages() -> None:
    worker = gossiping()
    worker.starts()
    worker.on(Received(1, params_message(2.0)))
    assert set(worker.state.inner.inbox[0][1]) == {"params"}


def test_gossip_with_a_worker_without_data_stops_nobody() -> None:
    worker = gossiping()
    worker.cost = 0.0
    worker.starts()
    effects = worker.expects(20.0)
    # It passes on untrained parameters, and does not claim to be the fastest.
    assert sends(effects) == [(1, "params"), (2, "params")]
    for effect in effects:
        assert isinstance(effect, Send)
        assert not effect.message.numbers


def test_gossip_lets_a_failed_platform_pass_on_untrained() -> None:
    worker = gossiping()
    worker.starts()
    assert sends(worker.expects(1e-9)) == [(1, "params"), (2, "params")]
