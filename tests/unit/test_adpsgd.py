"""One worker of AD-PSGD, driven by hand: two average at a time, and nobody waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.effects import kinds, only
from tests.round_worker import sends, trained

from edgegossip.algorithms.gossip.adpsgd import ADPSGD, ADPSGDState
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Message,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    Steps,
    TimerFired,
    Train,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import complete, directed_ring

# Worker 1 of three, who all know each other.

ALWAYS = ADPSGD(topology=complete(3), num_rounds=9)
PATIENT = ADPSGD(topology=complete(3), num_rounds=1, resend_after=4.0)


class Worker:
    """Worker 1, and what it answers."""

    def __init__(self, algorithm: ADPSGD = ALWAYS, value: float = 0.0) -> None:
        self.algorithm = algorithm
        self.state: ADPSGDState = algorithm.init(1, torch.full((2,), value))

    def on(self, event: Event, now: Seconds = 0.0) -> list[Effect]:
        return self.algorithm.handle(self.state, event, now)

    def trains_to(self, value: float, now: Seconds = 0.0) -> list[Effect]:
        return self.on(trained(value, self.state.params), now)

    def asks(self, partner: Rank, value: float) -> Message:
        """Make it train until it asks `partner`; give the request."""
        for _ in range(50):
            asked = [e for e in self.trains_to(value) if isinstance(e, Send)]
            if asked and asked[0].receiver == partner:
                return asked[0].message
            if asked:
                self.hears(asked[0].receiver, "decline", asked[0].message.round)
        raise AssertionError

    def hears(
        self, sender: Rank, kind: str, round: int = 1, value: float | None = None
    ) -> list[Effect]:
        name = "change" if kind == "average" else "params"
        payload = {} if value is None else {name: torch.full((2,), value)}
        return self.on(Received(sender, Message(kind, round, payload)))

    @property
    def value(self) -> float:
        return float(self.state.params[0])


def many(**arguments: Any) -> ADPSGD:  # noqa: ANN401
    return ADPSGD(**{"topology": complete(3), "num_rounds": 1000, **arguments})


def test_asks_a_neighbor_after_a_block_and_trains_on() -> None:
    worker = Worker(many(local_steps=3))
    assert only(Train, worker.on(Started())).work == Steps(3)
    request, train = worker.trains_to(3.0)
    assert isinstance(request, Send)
    assert request.receiver in (0, 2)
    assert request.message.payload["params"].tolist() == [3.0, 3.0]
    assert isinstance(train, Train)
    # One request at a time.
    assert kinds(worker.trains_to(4.0)) == ["Train"]


def test_partner_takes_the_average_and_answers_with_the_change() -> None:
    worker = Worker(value=1.0)
    [answer] = worker.hears(0, "request", 4, value=5.0)
    assert worker.value == 3.0
    assert isinstance(answer, Send)
    assert sends([answer]) == [(0, "average", 4)]
    assert answer.message.payload["change"].tolist() == [2.0, 2.0]


def test_worker_that_asked_moves_as_far_the_other_way_and_keeps_what_it_learned() -> None:
    worker = Worker(many())
    request = worker.asks(2, 5.0)
    worker.trains_to(6.0)
    worker.hears(2, "average", request.round, value=2.0)
    assert worker.value == 4.0  # the average, 3, and 1 that it has learned meanwhile


def test_training_under_way_is_added_to_the_average() -> None:
    worker = Worker(value=1.0)
    [train] = worker.on(Started())
    assert isinstance(train, Train)
    worker.hears(0, "request", 4, value=5.0)
    worker.on(trained(1.5, train.params))
    assert worker.value == 3.5


def test_lower_ranks_wait_for_its_own_answer_and_higher_ones_are_declined() -> None:
    worker = Worker(many())
    request = worker.asks(2, 5.0)
    assert worker.hears(0, "request", 7, value=9.0) == []
    assert sends(worker.hears(2, "request", 8, value=1.0)) == [(2, "decline", 8)]
    answers = worker.hears(2, "average", request.round, value=2.0)
    assert sends(answers) == [(0, "average", 7)]
    assert worker.value == 6.0  # of 3 and 9


def test_declined_request_changes_nothing_and_lets_it_ask_again() -> None:
    worker = Worker(many())
    request = worker.asks(2, 5.0)
    worker.hears(2, "decline", request.round)
    assert worker.value == 5.0
    assert kinds(worker.trains_to(5.0)) == ["Send", "Train"]


def test_lost_partner_is_given_up_and_those_who_wait_are_answered() -> None:
    worker = Worker(many())
    request = worker.asks(2, 5.0)
    worker.hears(0, "request", 7, value=9.0)
    assert sends(worker.on(WorkerLost(2))) == [(0, "average", 7)]
    assert worker.hears(2, "average", request.round, value=2.0) == []
    assert worker.value == 7.0


def test_lost_workers_are_not_asked_until_they_join_again() -> None:
    worker = Worker(many())
    worker.on(WorkerLost(0))
    worker.on(WorkerLost(2))
    assert kinds(worker.trains_to(1.0)) == ["Train"]
    worker.on(WorkerJoined(2))
    assert sends(worker.trains_to(1.0))[0][0] == 2


def test_lost_worker_does_not_wait_any_more() -> None:
    worker = Worker(many())
    request = worker.asks(2, 5.0)
    worker.hears(0, "request", 7, value=9.0)
    worker.on(WorkerLost(0))
    assert worker.hears(2, "average", request.round, value=2.0) == []
    assert worker.value == 3.0


# Repeating.


def test_request_is_repeated_until_it_is_answered_and_only_then_it_finishes() -> None:
    worker = Worker(PATIENT)
    request, timer = worker.trains_to(3.0, now=1.0)
    assert timer == SetTimer("resend", 5.0)
    assert worker.on(TimerFired("resend"), now=5.0) == [request, SetTimer("resend", 9.0)]
    assert isinstance(request, Send)
    answer = Received(request.receiver, Message("decline", request.message.round))
    assert worker.on(answer) == [Finish()]
    assert worker.on(TimerFired("resend"), now=9.0) == []


def test_without_repeating_it_finishes_at_once_and_still_takes_the_answer() -> None:
    worker = Worker(ADPSGD(topology=complete(3), num_rounds=1))
    request, finish = worker.trains_to(3.0)
    assert isinstance(request, Send)
    assert finish == Finish()
    worker.hears(request.receiver, "average", request.message.round, value=1.0)
    assert worker.value == 2.0


def test_repeated_request_gets_the_same_answer_and_moves_nobody_again() -> None:
    worker = Worker(many(resend_after=4.0), value=1.0)
    first = only(Send, worker.hears(0, "request", 4, value=5.0))
    again = only(Send, worker.hears(0, "request", 4, value=5.0))
    assert again.message is first.message
    assert worker.value == 3.0
    assert sends(worker.hears(0, "request", 6, value=5.0)) == [(0, "average", 6)]
    # It was long under way, or its sender has begun anew and would ask for ever.
    assert sends(worker.hears(0, "request", 4, value=5.0)) == [(0, "decline", 4)]
    assert worker.value == 4.0


def test_answer_that_comes_twice_counts_once() -> None:
    worker = Worker(many(resend_after=4.0))
    request = worker.asks(2, 5.0)
    worker.hears(2, "average", request.round, value=2.0)
    worker.hears(2, "average", request.round, value=2.0)
    assert worker.value == 3.0


def test_neighbor_that_has_restarted_counts_anew() -> None:
    worker = Worker(many(resend_after=4.0), value=1.0)
    worker.hears(0, "request", 4, value=5.0)
    worker.on(WorkerLost(0))
    worker.on(WorkerJoined(0, has_restarted=True))
    assert sends(worker.hears(0, "request", 1, value=5.0)) == [(0, "average", 1)]


# Coming back.


def test_neighbor_that_has_restarted_is_sent_a_model() -> None:
    worker = Worker(value=3.0)
    [model] = worker.on(WorkerJoined(0, has_restarted=True))
    assert isinstance(model, Send)
    assert sends([model]) == [(0, "model", 0)]
    assert model.message.payload["params"].tolist() == [3.0, 3.0]
    assert worker.on(WorkerJoined(0)) == []


def test_worker_that_comes_back_gives_nothing_before_it_has_taken_over_a_model() -> None:
    worker = Worker(many())
    worker.on(Started(has_rejoined=True))
    assert kinds(worker.trains_to(1.0)) == ["Train"]
    assert worker.on(WorkerJoined(0, has_restarted=True)) == []
    worker.hears(2, "model", 40, value=7.0)
    assert worker.value == 7.0
    worker.hears(0, "model", 41, value=9.0)
    assert worker.value == 7.0
    assert kinds(worker.trains_to(7.0)) == ["Send", "Train"]


def test_what_was_learned_from_initial_parameters_is_not_added_to_a_model() -> None:
    worker = Worker(many())
    worker.on(Started(has_rejoined=True))
    initial = worker.state.params
    worker.hears(2, "model", 40, value=10.0)
    worker.on(trained(9.0, initial))
    assert worker.value == 10.0
    worker.trains_to(12.0)
    assert worker.value == 12.0


def test_request_brings_a_model_to_one_that_has_none() -> None:
    worker = Worker(many())
    worker.on(Started(has_rejoined=True))
    assert sends(worker.hears(2, "request", 40, value=7.0)) == [(2, "decline", 40)]
    assert worker.value == 7.0
    assert sends(worker.hears(2, "request", 41, value=9.0)) == [(2, "average", 41)]


@pytest.mark.parametrize("is_lost_before", [True, False])
def test_worker_that_nobody_can_send_a_model_goes_on_by_itself(is_lost_before: bool) -> None:
    worker = Worker(many())
    events: list[Event] = [WorkerLost(0), WorkerLost(2)]
    started = Started(has_rejoined=True)
    for event in [*events, started] if is_lost_before else [started, *events]:
        worker.on(event)
    worker.on(WorkerJoined(2))
    assert kinds(worker.trains_to(1.0)) == ["Send", "Train"]


# Numbers.


def test_lost_answer_takes_its_change_out_of_the_sum() -> None:
    worker, partner = Worker(many(), value=0.0), Worker(many(), value=1.0)
    partner.state = many().init(2, torch.full((2,), 1.0))
    request = worker.asks(2, 5.0)
    partner.on(Received(1, request))
    assert worker.value + partner.value == 5 + 1 + 2


def test_probability_is_the_share_of_blocks_with_a_request() -> None:
    worker = Worker(many(exchange_probability=0.3))
    num_requests = 0
    for _ in range(1000):
        for receiver, _, round in sends(worker.trains_to(1.0)):
            num_requests += 1
            worker.hears(receiver, "decline", round)
    # Five standard deviations of a binomial: 0.07.
    assert num_requests / 1000 == pytest.approx(0.3, abs=0.07)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": directed_ring(4)}, "ADPSGD needs an undirected topology"),
        ({"exchange_probability": 1.5}, r"exchange_probability must be in \[0, 1\], got 1.5"),
        ({"num_rounds": 0}, "num_rounds must be at least 1, got 0"),
        ({"local_steps": 0}, "local_steps must be at least 1, got 0"),
        ({"resend_after": 0.0}, "resend_after must be above 0 or None, got 0.0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        many(**arguments)
