"""One worker of GoSGD, driven by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.trained import trained_event

from edgegossip.algorithms.gossip.gosgd import GoSGD, GoSGDState
from edgegossip.contract.protocol import (
    Finish,
    Message,
    Received,
    Send,
    Started,
    Steps,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import complete, ring

ALWAYS = GoSGD(topology=complete(4), num_rounds=5, exchange_probability=1.0)
NEVER = GoSGD(topology=complete(4), num_rounds=5, exchange_probability=0.0)


def fresh(algorithm: GoSGD, rank: int = 0) -> GoSGDState:
    return algorithm.init(rank, torch.zeros(2))


def trained(value: float) -> Trained:
    return trained_event(torch.full((2,), value), torch.zeros(2))


def push(sender: int, value: float, weight: float, round: int = 0) -> Received:
    payload = {"params": torch.full((2,), value)}
    return Received(sender, Message("push", round, payload, {"weight": weight}))


def pushes(algorithm: GoSGD, state: GoSGDState, count: int) -> list[Send]:
    effects = [
        effect for _ in range(count) for effect in algorithm.handle(state, trained(1.0), 0)
    ]
    return [effect for effect in effects if isinstance(effect, Send)]


def test_trains_at_once_with_an_equal_share_of_the_weight() -> None:
    algorithm = GoSGD(topology=complete(4), num_rounds=5, local_steps=3)
    state = fresh(algorithm)
    [train] = algorithm.handle(state, Started(), 0.0)
    assert isinstance(train, Train)
    assert train.work == Steps(3)
    assert state.weight == 0.25


def test_push_halves_the_weight_and_sends_the_other_half_with_the_parameters() -> None:
    state = fresh(ALWAYS)
    send, train = ALWAYS.handle(state, trained(3.0), 0.0)
    assert isinstance(send, Send)
    assert isinstance(train, Train)
    assert state.weight == send.message.numbers["weight"] == 0.125
    assert send.message.payload["params"].tolist() == [3.0, 3.0]
    assert send.receiver in (1, 2, 3)


def test_received_model_is_merged_by_weight() -> None:
    state = fresh(NEVER)
    NEVER.handle(state, push(2, value=9.0, weight=0.5), 0.0)
    NEVER.handle(state, trained(3.0), 0.0)
    assert state.weight == 0.75
    assert state.params.tolist() == pytest.approx([7.0, 7.0])


def test_message_waits_until_the_step_is_done() -> None:
    state = fresh(NEVER)
    NEVER.handle(state, Started(), 0.0)
    assert NEVER.handle(state, push(2, value=9.0, weight=0.5), 0.0) == []
    assert state.params.tolist() == [0.0, 0.0]
    assert state.weight == 0.25


def test_messages_that_wait_together_are_merged_in_rank_order() -> None:
    def merge(order: list[int]) -> torch.Tensor:
        state = fresh(NEVER)
        for sender in order:
            NEVER.handle(state, push(sender, 0.7**sender * 1e3, weight=0.1 * sender), 0.0)
        NEVER.handle(state, trained(0.1), 0.0)
        return state.params

    assert torch.equal(merge([1, 2, 3]), merge([3, 1, 2]))


def test_sends_what_it_had_before_it_merges() -> None:
    state = fresh(ALWAYS)
    ALWAYS.handle(state, push(2, value=9.0, weight=0.5), 0.0)
    send = ALWAYS.handle(state, trained(3.0), 0.0)[0]
    assert isinstance(send, Send)
    assert send.message.payload["params"].tolist() == [3.0, 3.0]
    assert send.message.numbers["weight"] == 0.125


def test_finishes_after_its_rounds_and_merges_at_once_what_still_arrives() -> None:
    algorithm = GoSGD(topology=complete(4), num_rounds=1, exchange_probability=0.0)
    state = fresh(algorithm)
    assert algorithm.handle(state, trained(3.0), 0.0) == [Finish()]
    assert algorithm.handle(state, push(2, value=9.0, weight=0.25), 0.0) == []
    assert state.params.tolist() == pytest.approx([6.0, 6.0])
    assert state.queue == []


def test_probability_is_the_share_of_steps_with_a_push() -> None:
    algorithm = GoSGD(topology=complete(4), num_rounds=2000, exchange_probability=0.3)
    # Five standard deviations of a binomial: 0.05.
    assert len(pushes(algorithm, fresh(algorithm), 2000)) / 2000 == pytest.approx(0.3, abs=0.05)


def test_receivers_are_drawn_evenly_among_the_neighbors() -> None:
    algorithm = GoSGD(topology=ring(5), num_rounds=1000, exchange_probability=1.0)
    receivers = [send.receiver for send in pushes(algorithm, fresh(algorithm), 1000)]
    assert set(receivers) == {1, 4}
    assert receivers.count(1) / 1000 == pytest.approx(0.5, abs=0.08)


def test_other_seeds_push_to_others() -> None:
    def receivers(seed: int) -> list[int]:
        algorithm = GoSGD(
            topology=complete(4), num_rounds=20, exchange_probability=1.0, seed=seed
        )
        return [send.receiver for send in pushes(algorithm, fresh(algorithm), 20)]

    assert receivers(0) == receivers(0) != receivers(1)


def test_no_worker_ever_claims_more_than_all_the_weight() -> None:
    state = fresh(ALWAYS)
    for sender in (1, 2, 3):
        ALWAYS.handle(state, push(sender, 5.0, 1.0), 0)
    [sent] = pushes(ALWAYS, state, 1)
    assert sent.message.numbers == {"weight": 0.125}
    assert state.weight == 1.0


def test_what_one_that_has_lied_has_sent_and_is_not_merged_is_forgotten() -> None:
    state = fresh(NEVER)
    for sender in (1, 2):
        NEVER.handle(state, push(sender, 5.0, 0.25), 0)
    NEVER.handle(state, WorkerLost(1, has_lied=True), 0)
    assert [sender for sender, _ in state.queue] == [2]
    NEVER.handle(state, WorkerLost(2), 0)
    assert [sender for sender, _ in state.queue] == [2]


def test_lost_workers_are_not_pushed_to_until_they_join_again() -> None:
    state = fresh(GoSGD(topology=complete(3), num_rounds=99, exchange_probability=1.0))
    algorithm = GoSGD(topology=complete(3), num_rounds=99, exchange_probability=1.0)
    algorithm.handle(state, WorkerLost(1), 0.0)
    assert {send.receiver for send in pushes(algorithm, state, 20)} == {2}
    algorithm.handle(state, WorkerJoined(1), 0.0)
    assert {send.receiver for send in pushes(algorithm, state, 20)} == {1, 2}


def test_worker_with_nobody_to_push_to_keeps_its_weight() -> None:
    algorithm = GoSGD(topology=complete(2), num_rounds=9, exchange_probability=1.0)
    state = fresh(algorithm)
    algorithm.handle(state, WorkerLost(1), 0.0)
    assert pushes(algorithm, state, 3) == []
    assert state.weight == 0.5


def test_worker_that_comes_back_takes_over_the_first_parameters_it_is_sent() -> None:
    state = fresh(NEVER)
    NEVER.handle(state, Started(has_rejoined=True), 0.0)
    assert state.weight == 0.0
    NEVER.handle(state, push(2, value=0.1, weight=1e-3), 0.0)
    NEVER.handle(state, trained(3.0), 0.0)
    assert torch.equal(state.params, torch.full((2,), 0.1))
    assert state.weight == 1e-3


def test_two_workers_without_weight_leave_each_other_as_they_are() -> None:
    state = fresh(ALWAYS)
    ALWAYS.handle(state, Started(has_rejoined=True), 0.0)
    ALWAYS.handle(state, push(2, value=9.0, weight=0.0), 0.0)
    send = ALWAYS.handle(state, trained(3.0), 0.0)[0]
    assert isinstance(send, Send)
    assert send.message.numbers["weight"] == 0.0
    assert state.params.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exchange_probability": 1.5}, r"exchange_probability must be in \[0, 1\], got 1.5"),
        ({"exchange_probability": -0.1}, r"exchange_probability must be in \[0, 1\], got -0.1"),
        ({"num_rounds": 0}, r"num_rounds must be at least 1, got 0"),
        ({"num_rounds": 1.5}, r"num_rounds must be a whole number, got 1.5"),
        ({"local_steps": 0}, r"local_steps must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GoSGD(**{"topology": complete(4), "num_rounds": 1, **arguments})


def test_pushes_come_from_any_round_of_the_run() -> None:
    schema = GoSGD(topology=ring(3), num_rounds=9).schema(torch.zeros(2))
    assert schema["push"].max_round == 9


def test_a_push_with_more_than_half_of_all_weight_is_refused() -> None:
    push = GoSGD(topology=ring(3), num_rounds=9).schema(torch.zeros(2))["push"]
    params = {"params": torch.zeros(2)}
    assert push.bad_values(params, {"weight": 0.5}) is None
    assert push.bad_values(params, {"weight": 0.75}) is not None


def test_joined_pushes_have_the_effect_of_both() -> None:
    older, newer = push(1, 2.0, 0.1, round=3).message, push(1, 6.0, 0.3, round=4).message
    joined = NEVER.joined(older, newer)
    assert joined is not None
    assert (joined.kind, joined.round) == ("push", 4)
    states = [fresh(NEVER), fresh(NEVER)]
    for state, messages in zip(states, ([older, newer], [joined]), strict=True):
        for message in messages:
            NEVER.handle(state, Received(1, message), 0.0)
        NEVER.handle(state, trained(1.0), 0.0)
    one, other = states
    assert one.weight == pytest.approx(other.weight) == pytest.approx(0.65)
    assert torch.allclose(one.params, other.params)


def test_of_pushes_without_weight_one_is_enough() -> None:
    older, newer = push(1, 2.0, 0.0).message, push(1, 6.0, 0.0).message
    assert NEVER.joined(older, newer) is newer
    weighty = push(1, 6.0, 0.1).message
    joined = NEVER.joined(older, weighty)
    assert joined is not None
    assert joined.numbers == {"weight": 0.1}
    assert torch.equal(joined.payload["params"], weighty.payload["params"])


@pytest.mark.parametrize(
    ("weight", "changes"),
    [
        (0.4, {}),
        (0.1, {"kind": "final"}),
        (0.1, {"numbers": {"weight": 0.1, "claim": 1.0}}),
        (0.1, {"payload": {"params": torch.zeros(2), "moments": torch.zeros(2)}}),
    ],
)
def test_what_is_no_push_or_too_heavy_is_not_joined(
    weight: float, changes: dict[str, Any]
) -> None:
    older, newer = push(1, 2.0, weight).message, replace(push(1, 6.0, 0.2).message, **changes)
    assert NEVER.joined(older, newer) is None
