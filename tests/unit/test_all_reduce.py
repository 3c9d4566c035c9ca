"""One worker of AllReduce, driven by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from tests.algorithms import NUM_ROUNDS, NUM_WORKERS, SYNCHRONOUS
from tests.trained import trained_event
from tests.worlds import INITIAL, NUM_PARAMS, Recorder, final_params, make_world, mix_only
from torch import Tensor

from edgegossip.algorithms.gossip.all_reduce import AllReduce, AllReduceState
from edgegossip.contract.protocol import (
    Effect,
    Received,
    Send,
    Started,
    Steps,
    Train,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import Topology, complete, ring, star

ALGORITHM = AllReduce(topology=complete(3), num_rounds=2)


def after_training() -> tuple[AllReduceState, list[Effect]]:
    state = ALGORITHM.init(0, torch.zeros(5))
    ALGORITHM.handle(state, Started(), 0.0)
    params = torch.arange(5.0)
    event = trained_event(params, torch.zeros(5))
    return state, ALGORITHM.handle(state, event, 0.0)


def chunk(sender: int, exchange: int, *values: float) -> Received:
    payload = {"chunk": torch.tensor(values)}
    return Received(sender, ALGORITHM.message("params", exchange, payload))


def chunks(effects: list[Effect]) -> Mapping[int, Tensor]:
    """The payload for each receiver."""
    return {
        effect.receiver: effect.message.payload["chunk"]
        for effect in effects
        if isinstance(effect, Send)
    }


def test_trains_its_local_steps_first() -> None:
    algorithm = AllReduce(topology=complete(3), num_rounds=1, local_steps=4)
    [train] = algorithm.handle(algorithm.init(0, torch.zeros(5)), Started(), 0.0)
    assert isinstance(train, Train)
    assert train.work == Steps(4)


def test_each_owner_is_sent_its_chunk_first() -> None:
    _, effects = after_training()
    sent = chunks(effects)
    assert {receiver: c.tolist() for receiver, c in sent.items()} == {1: [2, 3], 2: [4]}


def test_owner_averages_its_chunk_and_sends_it_to_all() -> None:
    state, _ = after_training()
    assert ALGORITHM.handle(state, chunk(2, 0, 6.0, 7.0), 0.0) == []
    sent = chunks(ALGORITHM.handle(state, chunk(1, 0, 3.0, 1.0), 0.0))
    assert {receiver: c.tolist() for receiver, c in sent.items()} == {1: [3, 3], 2: [3, 3]}


def test_averages_of_the_others_end_the_round() -> None:
    state, _ = after_training()
    for event in (chunk(1, 0, 3.0, 1.0), chunk(2, 0, 6.0, 7.0), chunk(1, 1, 8.0, 8.0)):
        ALGORITHM.handle(state, event, 0.0)
    [train] = ALGORITHM.handle(state, chunk(2, 1, 9.0), 0.0)
    assert isinstance(train, Train)
    assert train.params.tolist() == [3, 3, 8, 8, 9]


def test_next_worker_averages_the_chunk_of_a_lost_one() -> None:
    state, _ = after_training()
    ALGORITHM.handle(state, WorkerLost(2), 0.0)
    both = {"chunk": torch.tensor([3.0, 1.0]), "2.chunk": torch.tensor([6.0])}
    message = ALGORITHM.message("params", 0, both)
    assert ALGORITHM.schema(torch.zeros(5))["params"].mismatch(both) is None
    [send] = ALGORITHM.handle(state, Received(1, message), 0.0)
    assert isinstance(send, Send)
    sent = {name: values.tolist() for name, values in send.message.payload.items()}
    assert sent == {"chunk": [1.5, 1.0], "2.chunk": [5.0]}
    ALGORITHM.handle(state, chunk(1, 1, 8.0, 8.0), 0.0)
    assert state.params.tolist() == [1.5, 1, 8, 8, 5]


def test_next_worker_averages_the_chunk_of_one_that_is_back_but_takes_no_part_yet() -> None:
    state, _ = after_training()
    ALGORITHM.handle(state, WorkerLost(2), 0.0)
    ALGORITHM.handle(state, WorkerJoined(2), 0.0)
    both = {"chunk": torch.tensor([3.0, 1.0]), "2.chunk": torch.tensor([6.0])}
    message = ALGORITHM.message("params", 0, both)
    sent = ALGORITHM.handle(state, Received(1, message), 0.0)
    [payload] = [e.message.payload for e in sent if isinstance(e, Send) and e.receiver == 1]
    averages = {name: values.tolist() for name, values in payload.items()}
    assert averages == {"chunk": [1.5, 1.0], "2.chunk": [5.0]}
    # From the exchange on in which it continues, its chunk is its own again.
    whole = {"params": torch.zeros(5)}
    ALGORITHM.handle(state, Received(2, ALGORITHM.message("catch-up", 2, whole)), 0.0)
    assert ALGORITHM.holder(state, 2) == 0
    ALGORITHM.handle(state, chunk(1, 1, 8.0, 8.0), 0.0)
    assert state.exchange == 2
    assert ALGORITHM.holder(state, 2) == 2


def test_chunk_of_a_lost_worker_goes_to_the_next_and_is_taken_from_it() -> None:
    algorithm = AllReduce(topology=complete(3), num_rounds=2)
    state = algorithm.init(0, torch.zeros(5))
    algorithm.handle(state, Started(), 0.0)
    algorithm.handle(state, WorkerLost(1), 0.0)
    effects = algorithm.handle(state, trained_event(torch.arange(5.0), torch.zeros(5)), 0.0)
    [send] = [each for each in effects if isinstance(each, Send)]
    sent = {name: values.tolist() for name, values in send.message.payload.items()}
    assert sent == {"chunk": [4.0], "1.chunk": [2.0, 3.0]}
    algorithm.handle(state, chunk(2, 0, 3.0, 1.0), 0.0)
    averages = {"chunk": torch.tensor([9.0]), "1.chunk": torch.tensor([7.0, 8.0])}
    algorithm.handle(state, Received(2, algorithm.message("params", 1, averages)), 0.0)
    assert state.params.tolist() == [1.5, 1, 7, 8, 9]


def test_chunk_that_nobody_else_has_sent_stays_as_it_is() -> None:
    state, _ = after_training()
    ALGORITHM.handle(state, WorkerLost(2), 0.0)
    ALGORITHM.handle(state, chunk(1, 0, 3.0, 1.0), 0.0)
    ALGORITHM.handle(state, chunk(1, 1, 8.0, 8.0), 0.0)
    assert state.params.tolist() == [1.5, 1, 8, 8, 4]


def test_one_that_comes_back_between_the_exchanges_passes_on_no_average() -> None:
    state = ALGORITHM.init(0, torch.zeros(5))
    ALGORITHM.handle(state, Started(has_rejoined=True), 0.0)
    whole = {"params": torch.arange(5.0)}
    for sender in (1, 2):
        back = Received(sender, ALGORITHM.message("catch-up", 1, whole))
        effects = ALGORITHM.handle(state, back, 0.0)
    pushes = [e for e in effects if isinstance(e, Send) and e.message.kind == "params"]
    assert [push.message.numbers for push in pushes] == [{"exchange": 1}] * 2
    assert [push.message.payload["chunk"].numel() for push in pushes] == [0, 0]


def test_chunks_that_do_not_fit_are_worth_as_much_as_none() -> None:
    state, _ = after_training()
    for event in (
        chunk(1, 0, 3.0, 1.0),
        chunk(2, 0, 6.0),  # the own chunk has two parameters
        chunk(1, 1),
        chunk(2, 1, 9.0, 9.0),  # that of worker 2 has one
    ):
        ALGORITHM.handle(state, event, 0.0)
    assert (state.round, state.exchange) == (1, 2)
    assert state.params.tolist() == [1.5, 1, 2, 3, 4]


def test_each_worker_sends_the_least_that_is_possible() -> None:
    recorder = Recorder()
    make_world(SYNCHRONOUS["all-reduce"], observer=recorder).run()
    num_values = sum(message.payload["chunk"].numel() for message, _ in recorder.messages)
    # 2 (n - 1) / n vectors for each of n workers in each round.
    assert num_values == NUM_ROUNDS * 2 * (NUM_WORKERS - 1) * NUM_PARAMS


@pytest.mark.parametrize("num_params", [1, 3, 7])
def test_all_end_with_the_same_bits_even_with_fewer_parameters_than_workers(
    num_params: int,
) -> None:
    initial = INITIAL[:NUM_WORKERS, :num_params]
    after = mix_only(SYNCHRONOUS["all-reduce"], initial)
    assert all(torch.equal(row, after[0]) for row in after)
    torch.testing.assert_close(after[0], initial.mean(0))


def test_all_end_with_the_same_bits_after_training() -> None:
    after = final_params(make_world(SYNCHRONOUS["all-reduce"]))
    assert all(torch.equal(row, after[0]) for row in after)


@pytest.mark.parametrize("topology", [ring(4), star(3)], ids=repr)
def test_other_topologies_than_the_complete_one_are_refused(topology: Topology) -> None:
    with pytest.raises(ValueError, match=r"complete topology: complete\(num_workers\)"):
        AllReduce(topology=topology, num_rounds=1)


def test_local_steps_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="local_steps must be at least 1, got 0"):
        AllReduce(topology=complete(3), num_rounds=1, local_steps=0)
