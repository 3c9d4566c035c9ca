"""One worker of DoubleSqueeze, driven by hand; of three workers and five entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch
from tests.trained import trained_event

from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze, DoubleSqueezeState
from edgegossip.contract.protocol import (
    Effect,
    Rank,
    Received,
    Send,
    Started,
    TimerFired,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import complete

ONE = DoubleSqueeze(
    topology=complete(3), num_rounds=9, local_steps=3, outer_momentum=0.0, timeout=1.0
)
"""Worker 0 owns entries 0 and 3, worker 1 entries 1 and 4, and worker 2 entry 2."""


def after_training(algorithm: DoubleSqueeze = ONE) -> tuple[DoubleSqueezeState, list[Effect]]:
    state = algorithm.init(0, torch.zeros(5))
    algorithm.handle(state, Started(), 0.0)
    event = trained_event(torch.arange(1.0, 6.0), torch.zeros(5))
    return state, algorithm.handle(state, event, 0.0)


def hear(
    state: DoubleSqueezeState, sender: Rank, exchange: int, payload: Mapping[str, list[float]]
) -> dict[Rank, dict[str, list[float]]]:
    """The payloads that the worker sends when it hears this, by receiver."""
    tensors = {name: torch.tensor(values) for name, values in payload.items()}
    message = ONE.message("params", exchange, tensors)
    return sent(ONE.handle(state, Received(sender, message), 0.0))


def sent(effects: Iterable[Effect]) -> dict[Rank, dict[str, list[float]]]:
    """The payload for each receiver."""
    return {
        effect.receiver: {name: x.tolist() for name, x in effect.message.payload.items()}
        for effect in effects
        if isinstance(effect, Send) and effect.message.kind == "params"
    }


def one_that_is_back(exchange: int) -> tuple[DoubleSqueezeState, list[Effect]]:
    """It has caught up with the others at this exchange, with entries 0 to 4."""
    state = ONE.init(0, torch.zeros(5))
    ONE.handle(state, Started(has_rejoined=True), 0.0)
    effects: list[Effect] = []
    for sender in (1, 2):
        whole = {"params": torch.arange(5.0)}
        back = Received(sender, ONE.message("catch-up", exchange, whole))
        effects = ONE.handle(state, back, 0.0)
    return state, effects


def test_each_owner_hears_of_its_chunk_and_all_hear_of_the_own_one() -> None:
    state, effects = after_training()
    assert sent(effects) == {1: {"1.values": [2, 5]}, 2: {"2.values": [3, 0]}}
    assert hear(state, 1, 0, {"0.values": [4.0, 1.0]}) == {}
    told = hear(state, 2, 0, {"0.values": [1.0, 1.0]})
    assert told == {1: {"0.values": [2, 2]}, 2: {"0.values": [2, 2]}}
    hear(state, 1, 1, {"1.values": [7.0, 8.0]})
    hear(state, 2, 1, {"2.values": [9.0, 0.0]})
    assert state.params.tolist() == [2, 7, 9, 2, 8]
    assert not state.error.any()


def test_one_whose_copy_is_outdated_gets_the_whole_chunk() -> None:
    state, _ = after_training()
    hear(state, 1, 0, {"0.values": [4.0, 1.0], "0.request": []})
    told = hear(state, 2, 0, {"0.values": [1.0, 1.0]})
    assert told == {1: {"0.whole": [2, 2]}, 2: {"0.values": [2, 2]}}


def test_request_follows_a_message_that_is_missing_until_the_chunk_has_come() -> None:
    state, _ = after_training()
    for sender in (1, 2):
        hear(state, sender, 0, {"0.values": [0.0, 0.0]})
    hear(state, 1, 1, {"1.values": [0.0, 0.0]})
    ONE.handle(state, TimerFired("round"), 1.0)
    assert state.outdated == {2: None}
    event = trained_event(state.params, state.params)
    asked = sent(ONE.handle(state, event, 1.0))
    assert asked == {1: {"1.values": [0, 0]}, 2: {"2.values": [0, 0], "2.request": []}}
    for sender in (1, 2):
        hear(state, sender, 2, {"0.values": [0.0, 0.0]})
    hear(state, 1, 3, {"1.values": [0.0, 0.0]})
    hear(state, 2, 3, {"2.whole": [6.0, 0.0]})
    assert state.outdated == {}
    assert state.params[2] == 6


def test_next_worker_holds_the_chunk_of_one_that_is_lost() -> None:
    state, _ = after_training()
    ONE.handle(state, WorkerLost(2), 0.0)
    told = hear(state, 1, 0, {"0.values": [4.0, 1.0]})
    # Worker 2 may have combined what it got, and told some: from now on this copy counts.
    assert told == {1: {"0.values": [2.5, 2.5], "2.whole": [0, 0]}}
    hear(state, 1, 1, {"1.values": [0.0, 0.0]})
    event = trained_event(state.params + 1, state.params)
    assert sent(ONE.handle(state, event, 1.0)) == {1: {"1.values": [1, 1]}}
    told = hear(state, 1, 2, {"0.values": [3.0, 3.0], "2.values": [5.0, 0.0]})
    assert told == {1: {"0.values": [2, 2], "2.values": [3, 0]}}


def test_owner_that_takes_part_again_is_asked_for_its_chunk() -> None:
    state, _ = after_training()
    ONE.handle(state, WorkerLost(2), 0.0)
    hear(state, 1, 0, {"0.values": [4.0, 1.0]})
    ONE.handle(state, WorkerJoined(2), 0.0)
    hear(state, 1, 1, {"1.values": [0.0, 0.0]})
    event = trained_event(state.params, state.params)
    # It is back, but may be many rounds behind, and combines nothing until it has caught up.
    assert sent(ONE.handle(state, event, 1.0)) == {1: {"1.values": [0, 0]}, 2: {}}
    assert {*state.held} == {0, 2}
    whole = {"params": torch.zeros(5)}
    ONE.handle(state, Received(2, ONE.message("catch-up", 4, whole)), 1.0)
    hear(state, 1, 2, {"0.values": [0.0, 0.0], "2.values": [0.0, 0.0]})
    hear(state, 1, 3, {"1.values": [0.0, 0.0]})
    event = trained_event(state.params, state.params)
    assert sent(ONE.handle(state, event, 2.0))[2] == {"2.values": [0, 0], "2.request": []}
    assert [*state.held] == [0]


def test_only_the_holder_is_believed() -> None:
    state, _ = after_training()
    for sender in (1, 2):
        hear(state, sender, 0, {"0.values": [0.0, 0.0]})
    hear(state, 1, 1, {"1.values": [1.0, 1.0], "2.values": [9.0, 9.0], "0.whole": [9.0, 9.0]})
    hear(state, 2, 1, {"2.values": [1.0, 0.0]})
    assert state.params[[1, 2, 4]].tolist() == [1, 1, 1]
    assert state.params[[0, 3]].tolist() == torch.tensor([1 / 3, 4 / 3]).tolist()


def test_one_that_is_back_sends_its_chunk_to_all_and_asks_for_theirs() -> None:
    state, _ = one_that_is_back(4)
    event = trained_event(state.params + 1, state.params)
    asked = sent(ONE.handle(state, event, 0.0))
    assert asked == {
        1: {"1.values": [1, 1], "1.request": []},
        2: {"2.values": [1, 0], "2.request": []},
    }
    hear(state, 1, 4, {"0.values": [1.0, 1.0]})
    told = hear(state, 2, 4, {"0.values": [1.0, 1.0]})
    assert told == {1: {"0.whole": [1, 4]}, 2: {"0.whole": [1, 4]}}


def test_one_that_comes_back_between_the_exchanges_sends_its_chunk() -> None:
    _, effects = one_that_is_back(1)
    assert sent(effects) == {1: {"0.whole": [0, 3]}, 2: {"0.whole": [0, 3]}}


def test_one_that_goes_back_to_sound_parameters_drops_what_it_has_not_sent() -> None:
    state, _ = after_training()
    state.error = torch.ones(5)
    sound = torch.full((5,), 7.0)
    ONE.learn(state, trained_event(sound, sound, num_steps=0, has_gone_back=True))
    assert torch.equal(ONE.start(state), sound)


def test_one_that_skips_rounds_asks_for_all_chunks() -> None:
    state, _ = after_training()
    for sender in (1, 2):
        ahead = ONE.message("catch-up", 12, {"params": torch.arange(5.0)})
        ONE.handle(state, Received(sender, ahead), 0.0)
    assert state.round == 6
    assert torch.equal(ONE.start(state), torch.arange(5.0))
    asked = sent(ONE.handle(state, trained_event(state.params, state.params), 0.0))
    assert asked == {
        1: {"1.values": [0, 0], "1.request": []},
        2: {"2.values": [0, 0], "2.request": []},
    }


def test_one_that_is_back_and_hears_from_nobody_does_not_trust_its_copies() -> None:
    state = ONE.init(0, torch.zeros(5))
    ONE.handle(state, Started(has_rejoined=True), 0.0)
    ONE.handle(state, TimerFired("round"), 1.0)
    assert {1, 2} <= state.outdated.keys()


def test_update_of_an_earlier_life_does_not_hide_that_the_holder_has_changed() -> None:
    state, _ = after_training()
    hear(state, 2, 0, {"0.values": [0.0, 0.0]})
    hear(state, 2, 1, {"2.values": [5.0, 0.0]})  # what it does not know of when it is back
    ONE.handle(state, WorkerLost(2), 0.0)
    ONE.handle(state, WorkerJoined(2), 0.0)
    whole = {"params": torch.zeros(5)}
    ONE.handle(state, Received(2, ONE.message("catch-up", 1, whole)), 0.0)
    hear(state, 1, 0, {"0.values": [0.0, 0.0]})
    hear(state, 1, 1, {"1.values": [0.0, 0.0]})
    assert state.outdated == {2: None}


@pytest.mark.parametrize("payload", [{}, {"0.request": []}], ids=["nothing", "a request"])
def test_message_without_values_counts_for_nothing(payload: dict[str, list[float]]) -> None:
    state, _ = after_training()
    hear(state, 1, 0, payload)
    hear(state, 2, 0, {"0.values": [3.0, 0.0]})
    assert state.params.tolist() == [2, 0, 0, 2, 0]
