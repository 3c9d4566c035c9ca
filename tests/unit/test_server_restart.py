"""A parameter server that has lost its memory finds its model again, and not every lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from edgegossip.algorithms.server.adacomm import ADACOMM, ADACOMMServerState
from edgegossip.algorithms.server.adsp import ADSP, SearchingServerState, TimedCommitterState
from edgegossip.algorithms.server.methods import ASP, BSP
from edgegossip.algorithms.server.parameter_server import (
    CommitState,
    ParameterServer,
    ServerState,
)
from edgegossip.algorithms.server.worker import CommitterState
from edgegossip.contract.protocol import (
    Effect,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Message,
    Rank,
    Received,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Trained,
    WorkerJoined,
    WorkerLost,
)

MODEL = torch.zeros(3)
NEWER = torch.full((3,), 2.0)
OLDER = torch.full((3,), 1.0)


def restarted(algorithm: ParameterServer, *lost: Rank) -> ServerState:
    """A server that has restarted when it is 10 s."""
    state = algorithm.init(0, MODEL)
    for rank in lost:
        algorithm.handle(state, WorkerLost(rank), 10.0)
    algorithm.handle(state, Started(has_rejoined=True), 10.0)
    assert isinstance(state, ServerState)
    return state


def hear(
    algorithm: ParameterServer,
    state: CommitState,
    sender: Rank,
    message: Message,
) -> list[Effect]:
    return algorithm.handle(state, Received(sender, message), 11.0)


def copy(
    *counts: int,
    number: int,
    params: torch.Tensor = NEWER,
    round: int = 0,
    memory: Mapping[str, float] | None = None,
) -> Message:
    payload = {"params": params, "counts": torch.tensor(counts)}
    return Message("copy", round, payload, {**(memory or {}), "number": number})


def commit(number: int, round: int = 0, update: float = 1.0, version: int = 0) -> Message:
    numbers = {"number": number, "num_steps": 1, "num_trained": 3, "version": version}
    return Message("commit", round, {"update": torch.full((3,), update)}, numbers)


def answers(effects: list[Effect]) -> dict[Rank, Message]:
    sends = [each for each in effects if isinstance(each, Send)]
    return {each.receiver: each.message for each in sends if each.message.kind == "params"}


def trained(state: CommitterState) -> Trained:
    return Trained(
        params=state.params + 1,
        before=state.params,
        num_samples=1,
        num_steps=1,
        seconds=1.0,
        loss=0.0,
    )


ASP_OF_3 = ASP(num_workers=3, num_rounds=20)


def test_copy_cannot_count_more_commits_of_a_worker_than_it_says_it_has_sent() -> None:
    state = restarted(ASP_OF_3)
    hear(ASP_OF_3, state, 1, copy(2**52, 2**52, 2**52, number=2**52))
    hear(ASP_OF_3, state, 2, copy(4, 5, 6, number=5, params=OLDER))
    hear(ASP_OF_3, state, 3, copy(4, 5, 6, number=7, params=OLDER))
    assert not state.is_new
    assert state.num_commits[2] == 5
    assert state.num_commits[3] == 7
    # The next commit of an honest worker is merged, and not taken for one that is known.
    before = state.params
    assert 2 in answers(hear(ASP_OF_3, state, 2, commit(6)))
    assert not torch.equal(state.params, before)


def test_no_commit_has_a_number_that_answers_may_not_count() -> None:
    schema = ASP_OF_3.schema(MODEL)
    most = 2**52
    counts = torch.tensor([most] * 3)
    numbers = {"number": 1}
    assert schema["copy"].bad_values({"params": MODEL, "counts": counts}, numbers) is None
    beyond = {"params": MODEL, "counts": counts + 1}
    assert schema["copy"].bad_values(beyond, numbers) is not None
    numbers = {"number": most, "num_steps": 1, "num_trained": 3, "version": 3 * most}
    assert schema["commit"].bad_values({"update": MODEL}, numbers) is None
    numbers["number"] += 1
    assert schema["commit"].bad_values({"update": MODEL}, numbers) is not None


def test_false_count_of_a_lost_worker_leaves_numbers_for_its_commits() -> None:
    state = restarted(ASP_OF_3, 3)
    hear(ASP_OF_3, state, 2, copy(0, 0, 2**52, number=0))
    hear(ASP_OF_3, state, 1, copy(0, 0, 0, number=0))
    number = state.num_commits[3]
    ASP_OF_3.handle(state, WorkerJoined(3), 1.0)
    for each in (number + 1, number + 2):
        effects = hear(ASP_OF_3, state, 3, commit(each))
        told = answers(effects)[3]
        assert ASP_OF_3.schema(MODEL)["params"].bad_values(told.payload) is None
        assert told.payload["counts"].tolist() == [0, 0, each]


def test_commit_with_more_than_its_sender_can_have_sent_is_dropped() -> None:
    state = ASP_OF_3.init(0, MODEL)
    assert isinstance(state, ServerState)
    assert answers(hear(ASP_OF_3, state, 1, commit(2**52))) == {}
    assert state.num_commits == {1: 0, 2: 0, 3: 0}
    assert 1 in answers(hear(ASP_OF_3, state, 1, commit(1)))


@pytest.mark.parametrize("kind", ["commit", "pull", "copy"])
def test_worker_ignores_what_only_servers_get(kind: str) -> None:
    adacomm = ADACOMM(num_workers=3, num_rounds=20)
    worker = adacomm.init(1, MODEL)
    assert isinstance(worker, CommitterState)
    assert adacomm.handle(worker, Received(0, replace(commit(1), kind=kind)), 0.0) == []


@pytest.mark.parametrize("is_known_before", [True, False])
def test_commit_in_the_shown_model_has_ended_its_round(is_known_before: bool) -> None:
    """The worker may have shown its model before the answer of the earlier server came."""
    state = restarted(ASP_OF_3)
    hear(ASP_OF_3, state, 1, copy(5, 5, 5, number=6, params=OLDER, round=5))
    if is_known_before:
        hear(ASP_OF_3, state, 1, commit(6, round=5))
    for rank in (2, 3):
        hear(ASP_OF_3, state, rank, copy(6, 6, 6, number=6, round=6))
    if not is_known_before:
        hear(ASP_OF_3, state, 1, commit(6, round=5))
    assert state.rounds == {1: 6, 2: 6, 3: 6}
    # An early commit that comes again says nothing new.
    hear(ASP_OF_3, state, 1, commit(3, round=2))
    assert state.rounds[1] == 6


def test_pull_shows_no_model_so_the_server_waits_for_one_that_is_merely_lost() -> None:
    state = restarted(ASP_OF_3, 3)
    for rank in (1, 2):
        assert not answers(hear(ASP_OF_3, state, rank, Message("pull", 0)))
    assert state.is_new
    ASP_OF_3.handle(state, WorkerJoined(3), 12.0)
    effects = hear(ASP_OF_3, state, 3, copy(4, 5, 6, number=6, round=6))
    assert torch.equal(state.params, NEWER)
    assert answers(effects).keys() == {1, 2}


def test_server_goes_on_with_its_first_model_once_all_workers_have_restarted() -> None:
    state = restarted(ASP_OF_3)
    effects = [hear(ASP_OF_3, state, rank, Message("pull", 0)) for rank in (1, 2, 3)]
    assert answers(effects[2]).keys() == {1, 2, 3}
    assert torch.equal(state.params, MODEL)


def test_server_without_a_model_waits_for_one_until_its_patience_is_over() -> None:
    state = restarted(ASP_OF_3, 3)
    for rank in (1, 2):
        hear(ASP_OF_3, state, rank, Message("pull", 0))
    effects = ASP_OF_3.handle(state, TimerFired("patience"), 610.0)
    assert answers(effects).keys() == {1, 2}
    assert not any(isinstance(each, Finish) for each in effects)


def test_worker_that_has_restarted_has_nothing_to_show() -> None:
    state = ASP_OF_3.init(1, MODEL)
    ASP_OF_3.handle(state, Started(has_rejoined=True), 0.0)
    (send,) = hear(ASP_OF_3, state, 0, Message("show", 0))
    assert isinstance(send, Send)
    assert send.message.kind == "pull"


def test_server_asks_again_for_a_commit_that_was_open_in_a_report() -> None:
    """An answer of an earlier server may end that worker, which then sends no commit."""
    algorithm = ASP(num_workers=2, num_rounds=6, resend_after=1.0)
    state = restarted(algorithm)
    hear(algorithm, state, 1, copy(4, 5, number=4, params=OLDER, round=4))
    hear(algorithm, state, 2, copy(3, 5, number=6, params=OLDER, round=5))
    assert not state.is_new
    sent = [
        (each.receiver, each.message.kind)
        for each in algorithm.handle(state, TimerFired("resend"), 12.0)
        if isinstance(each, Send)
    ]
    assert sent == [(2, "show")]
    hear(algorithm, state, 2, copy(4, 6, number=6, round=6))
    assert state.rounds == {1: 4, 2: 6}
    assert not algorithm.handle(state, TimerFired("resend"), 13.0)


def test_server_asks_no_more_once_the_open_commit_has_come() -> None:
    algorithm = ASP(num_workers=2, num_rounds=8, resend_after=1.0)
    state = restarted(algorithm)
    hear(algorithm, state, 1, copy(4, 5, number=4, params=OLDER, round=4))
    hear(algorithm, state, 2, copy(3, 5, number=6, params=OLDER, round=5))
    assert answers(hear(algorithm, state, 2, commit(6, round=5))).keys() == {2}
    assert not algorithm.handle(state, TimerFired("resend"), 12.0)


def test_worker_that_an_earlier_server_has_ended_says_so_to_one_that_does_not_know() -> None:
    """It restarts with the server, and gets the answer that its earlier life waited for."""
    algorithm = ASP(num_workers=2, num_rounds=6)
    server, worker = restarted(algorithm), algorithm.init(1, MODEL)
    algorithm.handle(worker, Started(has_rejoined=True), 0.0)
    last = {"params": NEWER, "counts": torch.tensor([6, 4])}
    assert hear(algorithm, worker, 0, Message("params", 6, last)) == [Finish()]
    hear(algorithm, server, 1, Message("pull", 0))
    answer = answers(hear(algorithm, server, 2, copy(3, 5, number=5, params=OLDER, round=5)))[1]
    (report, finish) = hear(algorithm, worker, 0, answer)
    assert finish == Finish()
    assert isinstance(report, Send)
    hear(algorithm, server, 1, report.message)
    assert server.rounds == {1: 6, 2: 5}
    # What is not less than it knows needs no report.
    assert hear(algorithm, worker, 0, Message("params", 6, last)) == [Finish()]


def test_worker_that_restarts_with_the_server_goes_on_in_the_round_of_the_others() -> None:
    algorithm = BSP(num_workers=3, num_rounds=20)
    state = restarted(algorithm)
    hear(algorithm, state, 3, Message("pull", 0))
    hear(algorithm, state, 1, copy(7, 7, 7, number=7, round=7))
    effects = hear(algorithm, state, 2, copy(7, 7, 7, number=7, round=8))
    assert answers(effects)[3].round == 7
    assert state.rounds == {1: 7, 2: 8, 3: 7}


def test_round_of_one_that_has_not_shown_its_model_holds_nobody_back() -> None:
    algorithm = BSP(num_workers=3, num_rounds=20)
    state = restarted(algorithm)
    hear(algorithm, state, 1, copy(7, 7, 7, number=7, round=7))
    algorithm.handle(state, WorkerLost(3), 12.0)
    algorithm.handle(state, WorkerJoined(3, has_restarted=True), 12.0)
    hear(algorithm, state, 3, Message("pull", 0))
    assert state.rounds[3] == 7, "worker 2 is in no known round"


SEARCHING = ADSP(num_workers=2, num_rounds=50, window=6.0, min_interval=1.0)


def test_adsp_begins_no_window_before_it_knows_its_model() -> None:
    state = SEARCHING.init(0, MODEL)
    effects = SEARCHING.handle(state, Started(has_rejoined=True), 10.0)
    assert not any(isinstance(each, Evaluate) for each in effects)
    hear(SEARCHING, state, 1, copy(3, 3, number=3, round=3))
    effects = hear(SEARCHING, state, 2, copy(3, 3, number=3, round=3))
    (look,) = (each for each in effects if isinstance(each, Evaluate))
    assert torch.equal(look.params, NEWER)
    assert any(isinstance(each, SetTimer) and each.name == "window" for each in effects)


def test_adsp_goes_on_with_the_search_that_its_workers_remember() -> None:
    first = SEARCHING.init(0, MODEL)
    assert isinstance(first, SearchingServerState)
    SEARCHING.handle(first, Started(), 0.0)
    search = first.search
    search.rate, search.best_rate, search.best_reward = 4, 3, -0.25
    search.is_searching, first.num_windows = False, 7
    worker = SEARCHING.init(1, MODEL)
    assert isinstance(worker, CommitterState)
    SEARCHING.handle(worker, Started(), 0.0)
    assert isinstance(worker, TimedCommitterState)
    worker.is_due = True
    effects = SEARCHING.handle(worker, trained(worker), 1.0)
    (sent,) = (each.message for each in effects if isinstance(each, Send))
    hear(SEARCHING, worker, 0, answers(hear(SEARCHING, first, 1, sent))[1])
    (shown,) = hear(SEARCHING, worker, 0, Message("show", 0))
    assert isinstance(shown, Send)
    spec = SEARCHING.schema(MODEL)["copy"]
    assert spec.mismatch(shown.message.payload, shown.message.numbers) is None
    assert spec.bad_values(shown.message.payload, shown.message.numbers) is None

    second = restarted(SEARCHING, 2)
    hear(SEARCHING, second, 1, shown.message)
    assert isinstance(second, SearchingServerState)
    assert (second.rate, second.search.best_rate, second.search.best_reward) == (4, 3, -0.25)
    assert not second.search.is_searching
    assert second.num_windows == 7


def test_adacomm_goes_on_with_the_steps_and_the_first_loss_that_its_workers_remember() -> None:
    algorithm = ADACOMM(num_workers=2, num_rounds=50, tau=16, window=6.0)
    state = restarted(algorithm, 2)
    memory = {"local_steps": 5, "first_loss": 8.0}
    effects = hear(algorithm, state, 1, copy(3, 3, number=3, round=3, memory=memory))
    assert isinstance(state, ADACOMMServerState)
    assert (state.tau, state.first_loss) == (5, 8.0)
    assert SetTimer("window", 17.0) in effects


def test_commit_of_a_former_life_does_not_swallow_the_first_of_the_new_one() -> None:
    algorithm = BSP(num_workers=2, num_rounds=5)
    state = algorithm.init(0, MODEL)
    algorithm.handle(state, Started(), 0.0)
    hear(algorithm, state, 1, commit(1, update=100.0))
    algorithm.handle(state, WorkerLost(1), 1.0)
    algorithm.handle(state, WorkerJoined(1, has_restarted=True), 1.0)
    assert 1 in answers(hear(algorithm, state, 1, Message("pull", 0)))
    hear(algorithm, state, 1, commit(1, update=3.0))
    hear(algorithm, state, 2, commit(1, update=1.0))
    assert state.params.tolist() == [2.0] * 3


def test_commit_from_before_a_barrier_that_closed_without_it_is_answered_and_not_added() -> (
    None
):
    algorithm = BSP(num_workers=2, num_rounds=5)
    state = algorithm.init(0, MODEL)
    algorithm.handle(state, Started(), 0.0)
    hear(algorithm, state, 2, commit(1, update=1.0))
    assert 2 in answers(algorithm.handle(state, WorkerLost(1), 1.0))
    algorithm.handle(state, WorkerJoined(1), 2.0)
    hear(algorithm, state, 1, commit(1, update=100.0))
    both = answers(hear(algorithm, state, 2, commit(2, round=1, update=1.0, version=1)))
    assert both.keys() == {1, 2}
    assert both[1].payload["params"].tolist() == [2.0] * 3
    assert both[1].payload["counts"].tolist() == [1, 2]
    hear(algorithm, state, 1, commit(2, round=1, update=3.0, version=3))
    hear(algorithm, state, 2, commit(3, round=2, update=1.0, version=3))
    assert state.params.tolist() == [4.0] * 3


def test_worker_that_a_restarted_server_believed_to_be_new_may_still_show_its_model() -> None:
    algorithm = BSP(num_workers=1, num_rounds=1)
    state = restarted(algorithm)
    hear(algorithm, state, 1, Message("pull", 0))
    assert not state.is_new
    # Meanwhile an answer of the former life has reached it, and it has finished.
    assert Finish() in hear(algorithm, state, 1, copy(1, number=1, round=1))


def test_commit_that_was_dropped_because_of_a_lie_is_asked_for_again() -> None:
    algorithm = BSP(num_workers=2, num_rounds=5)
    server, worker = algorithm.init(0, MODEL), algorithm.init(1, MODEL)
    for state in (server, worker):
        algorithm.handle(state, Started(), 0.0)
    assert isinstance(worker, CommitterState)
    (sent,) = algorithm.handle(worker, trained(worker), 1.0)
    assert isinstance(sent, Send)
    hear(algorithm, server, 1, sent.message)
    algorithm.handle(server, WorkerLost(1, has_lied=True), 2.0)
    asked = algorithm.handle(server, WorkerJoined(1), 3.0)
    (again,) = (each for each in asked if isinstance(each, Send))
    (repeated,) = hear(algorithm, worker, 0, again.message)
    assert isinstance(repeated, Send)
    assert repeated.message is sent.message
    # Once asked for, it is not asked for a second time.
    events: list[Event] = [WorkerLost(1), WorkerJoined(1)]
    effects = [each for event in events for each in algorithm.handle(server, event, 4.0)]
    assert not any(isinstance(each, Send) for each in effects)


def test_model_that_a_liar_has_shown_is_forgotten() -> None:
    state = restarted(ASP_OF_3)
    hear(ASP_OF_3, state, 1, copy(9, 9, 9, number=9, params=OLDER))
    ASP_OF_3.handle(state, WorkerLost(1, has_lied=True), 11.0)
    hear(ASP_OF_3, state, 2, copy(4, 5, 6, number=5))
    hear(ASP_OF_3, state, 3, copy(4, 5, 6, number=6))
    assert torch.equal(state.params, NEWER)
    assert state.num_commits == {1: 4, 2: 5, 3: 6}


def test_adacomm_may_begin_with_any_number_of_steps() -> None:
    algorithm = ADACOMM(num_workers=2, num_rounds=5, tau=10**6 + 1)
    numbers = algorithm.settings(algorithm.init(0, MODEL), 1)  # type: ignore[arg-type]
    payload = {"params": MODEL, "counts": torch.tensor([0, 0])}
    assert algorithm.schema(MODEL)["params"].bad_values(payload, numbers) is None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_loss_that_is_no_number_leaves_the_steps_of_adacomm_alone(loss: float) -> None:
    algorithm = ADACOMM(num_workers=2, num_rounds=5, tau=16)
    state = algorithm.init(0, MODEL)
    assert isinstance(state, ADACOMMServerState)
    algorithm.handle(state, Evaluated(loss), 0.0)
    algorithm.handle(state, Evaluated(8.0), 1.0)
    algorithm.handle(state, Evaluated(loss), 2.0)
    assert (state.tau, state.first_loss) == (16, 8.0)


def test_two_others_know_better_than_a_worker_that_goes_on_from_a_checkpoint() -> None:
    state = restarted(ASP_OF_3)
    hear(ASP_OF_3, state, 1, copy(4, 5, 6, number=4))
    hear(ASP_OF_3, state, 2, copy(2, 2, 2, number=3, params=OLDER))
    hear(ASP_OF_3, state, 3, copy(4, 5, 6, number=7))
    assert state.num_commits == {1: 4, 2: 5, 3: 6}
