"""One rank of a parameter server whose workers can take the server's place, event by event."""

from __future__ import annotations

import pytest
import torch
from tests.algorithms import with_settings

from edgegossip.algorithms.server.adsp import ADSP, SearchingServerState
from edgegossip.algorithms.server.methods import ASP
from edgegossip.algorithms.wrappers.standby.standby import Standby, StandbyState
from edgegossip.contract.protocol import (
    Effect,
    Evaluate,
    Evaluated,
    Finish,
    Message,
    Note,
    Payload,
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
NEWER = torch.ones(3)
FIVE = Standby(inner=ASP(num_workers=4, num_rounds=50))


def started(rank: Rank, algorithm: Standby = FIVE, has_rejoined: bool = False) -> StandbyState:
    state = algorithm.init(rank, MODEL)
    algorithm.handle(state, Started(has_rejoined=has_rejoined), 0.0)
    assert isinstance(state, StandbyState)
    return state


def hear(
    state: StandbyState,
    sender: Rank,
    kind: str,
    payload: Payload | None = None,
    algorithm: Standby = FIVE,
    **numbers: float,
) -> list[Effect]:
    message = Message(kind, 0, payload or {}, numbers)
    return algorithm.handle(state, Received(sender, message), 5.0)


def elected(rank: Rank = 1, algorithm: Standby = FIVE) -> StandbyState:
    """A worker that serves, because rank 0 is lost."""
    state = started(rank, algorithm)
    algorithm.handle(state, WorkerLost(0), 1.0)
    algorithm.handle(state, TimerFired("election"), 1.5)
    term = state.election.stands_for
    for voter in (2, 3):
        hear(state, voter, "vote", algorithm=algorithm, stands_for=term, term=0)
    return state


def sent(effects: list[Effect]) -> list[tuple[Rank, str]]:
    return [(each.receiver, each.message.kind) for each in effects if isinstance(each, Send)]


def commit(state: StandbyState, sender: Rank, term: int) -> list[Effect]:
    """The first commit of a worker arrives."""
    update = {"update": NEWER}
    return hear(
        state, sender, "commit", update, number=1, num_steps=1, num_trained=3, term=term
    )


def shown(state: StandbyState, algorithm: Standby = FIVE) -> None:
    """Let all others show that they have no newer model."""
    counts = {"counts": torch.tensor([0, 0, 0, 0])}
    term = state.election.term
    for rank in (2, 3, 4):
        hear(state, rank, "copy", counts, algorithm, number=0, as_of=0, term=term)


def test_every_message_says_its_senders_term() -> None:
    state = elected()
    effects = FIVE.handle(state, WorkerJoined(0), 6.0)
    assert {each.message.numbers["term"] for each in effects if isinstance(each, Send)} == {
        state.election.term
    }


def test_it_is_on_record_who_was_elected() -> None:
    state = started(1)
    FIVE.handle(state, WorkerLost(0), 1.0)
    FIVE.handle(state, TimerFired("election"), 1.5)
    numbers = {"stands_for": state.election.stands_for, "term": 0}
    ballot = Message("vote", 0, numbers=numbers)
    effects = [FIVE.handle(state, Received(voter, ballot), 2.0) for voter in (2, 3)][1]
    (note,) = (each for each in effects if isinstance(each, Note))
    assert (note.kind, note.numbers) == ("serves", {"term": state.election.term})


def test_what_is_of_an_older_term_is_not_heard_and_answered_with_the_present_one() -> None:
    state = elected()
    shown(state)
    assert state.server is not None
    before = state.server.params
    effects = commit(state, 2, term=0)
    assert sent(effects) == [(2, "lead")]
    assert state.server.params is before
    assert state.server.num_commits[2] == 0


def test_worker_goes_over_to_a_server_of_a_higher_term_with_what_has_no_answer() -> None:
    state = started(2)
    assert state.worker is not None
    event = Trained(
        params=NEWER, before=MODEL, num_samples=1, num_steps=1, seconds=1.0, loss=0.0
    )
    assert sent(FIVE.handle(state, event, 1.0)) == [(0, "commit")]
    effects = hear(state, 1, "lead", term=6)
    assert (1, "commit") in sent(effects)


def test_commit_to_a_new_server_is_repeated_too_where_messages_can_be_lost() -> None:
    lossy = with_settings(FIVE, resend_after=2.0)
    state = started(2, lossy)
    event = Trained(
        params=NEWER, before=MODEL, num_samples=1, num_steps=1, seconds=1.0, loss=0.0
    )
    lossy.handle(state, event, 1.0)
    effects = hear(state, 1, "lead", algorithm=lossy, term=6)
    assert SetTimer("resend", 9.0) in effects, "at 5 s, and it is the second try"
    again = lossy.handle(state, TimerFired("resend"), 9.0)
    assert sent(again) == [(1, "commit")]


def test_model_of_a_server_that_has_been_replaced_is_not_taken() -> None:
    state = started(2)
    hear(state, 1, "lead", term=6)
    assert state.worker is not None
    state.worker.is_pulling = True
    model = {"params": NEWER, "counts": torch.tensor([1, 1, 1, 1])}
    hear(state, 0, "params", model, term=0)
    assert state.worker.is_pulling
    hear(state, 3, "params", model, term=6)
    assert state.worker.is_pulling, "nor that of one that does not serve"
    hear(state, 1, "params", model, term=6)
    assert not state.worker.is_pulling


def test_worker_that_was_never_answered_shows_the_model_of_the_start_as_the_oldest() -> None:
    state = started(2)
    hear(state, 1, "lead", term=6)
    (copy,) = hear(state, 1, "show", term=6, as_of=0, num_commits=0)
    assert isinstance(copy, Send)
    assert copy.message.numbers == {"number": 0, "as_of": 0, "term": 6}
    assert torch.equal(copy.message.payload["params"], MODEL)


def test_only_worker_that_is_left_serves_as_soon_as_the_restarted_server_votes_for_it() -> None:
    algorithm = Standby(inner=ADSP(num_workers=2, num_rounds=50))
    state = started(1, algorithm)
    model = {"params": NEWER, "counts": torch.tensor([0, 3])}
    hear(state, 0, "params", model, algorithm, term=0)
    algorithm.handle(state, WorkerLost(2), 1.0)
    algorithm.handle(state, WorkerJoined(0, has_restarted=True), 1.0)
    algorithm.handle(state, TimerFired("election"), 1.5)
    stands_for = state.election.stands_for
    effects = hear(state, 0, "vote", algorithm=algorithm, stands_for=stands_for, term=0)
    assert state.is_evaluated
    assert torch.equal(state.estimate, NEWER)
    (window,) = (e for e in effects if isinstance(e, SetTimer) and e.name == "serving window")
    assert 5.0 < window.at < float("inf")


def test_server_that_hears_of_a_higher_term_stops_all_that_it_has_set_going() -> None:
    algorithm = Standby(inner=ADSP(num_workers=4, num_rounds=50))
    state = started(0, algorithm)
    assert state.is_evaluated
    effects = hear(state, 2, "lead", algorithm=algorithm, term=7)
    assert state.server is None
    assert not state.is_evaluated
    stopped = {e.name for e in effects if isinstance(e, SetTimer) and e.at == float("inf")}
    assert "serving window" in stopped
    assert any(isinstance(each, Finish) for each in effects)


def test_evaluation_for_a_server_that_has_stepped_down_is_not_for_a_later_one() -> None:
    algorithm = Standby(inner=ADSP(num_workers=4, num_rounds=50))
    state = elected(1, algorithm)
    shown(state, algorithm)
    assert state.num_asked == 1
    hear(state, 2, "lead", algorithm=algorithm, term=state.election.term + 1)
    algorithm.handle(state, WorkerLost(2), 6.0)
    algorithm.handle(state, TimerFired("election"), 7.0)
    for voter in (3, 4):
        stands_for, term = state.election.stands_for, state.election.term
        hear(state, voter, "vote", algorithm=algorithm, stands_for=stands_for, term=term)
    counts = {"counts": torch.tensor([0, 0, 0, 0])}
    effects: list[Effect] = []
    for rank in (3, 4):
        term = state.election.term
        effects += hear(state, rank, "copy", counts, algorithm, number=0, as_of=0, term=term)
    assert any(isinstance(each, Evaluate) for each in effects)
    server = state.server
    assert isinstance(server, SearchingServerState)
    algorithm.handle(state, Evaluated(1e9), 8.0)
    assert server.search.looks == []
    algorithm.handle(state, Evaluated(3.0), 9.0)
    assert [loss for _, loss in server.search.looks] == [3.0]


def test_worker_that_serves_has_its_answer_when_another_one_has_the_model() -> None:
    state = elected()
    shown(state)
    assert state.worker is not None
    event = Trained(
        params=NEWER, before=MODEL, num_samples=1, num_steps=1, seconds=1.0, loss=0.0
    )
    state.worker.is_training = True
    ((keeper, kind),) = sent(FIVE.handle(state, event, 6.0))
    assert kind == "keep"
    assert state.worker.commit is not None
    other = next(rank for rank in (2, 3, 4) if rank != keeper)
    hear(state, other, "kept", num_commits=1, term=state.election.term)
    hear(state, keeper, "kept", num_commits=0, term=state.election.term)
    assert state.worker.commit is not None
    hear(state, keeper, "kept", num_commits=1, term=state.election.term)
    assert state.worker.commit is None
    assert state.worker.num_commits == 1


def test_worker_that_serves_waits_for_nobody_who_is_lost() -> None:
    state = elected()
    shown(state)
    assert state.worker is not None
    event = Trained(
        params=NEWER, before=MODEL, num_samples=1, num_steps=1, seconds=1.0, loss=0.0
    )
    state.worker.is_training = True
    ((keeper, _),) = sent(FIVE.handle(state, event, 6.0))
    FIVE.handle(state, WorkerLost(keeper), 7.0)
    assert state.worker.commit is None


def test_server_reminds_one_that_joins_late_where_messages_can_be_lost() -> None:
    lossy = with_settings(FIVE, resend_after=2.0)
    state = elected(algorithm=lossy)
    effects = lossy.handle(state, WorkerJoined(3), 7.0)
    assert SetTimer("remind", 9.0) in effects
    again = lossy.handle(state, TimerFired("remind"), 9.0)
    assert (3, "lead") in sent(again)
    assert SetTimer("remind", 11.0) in again


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_comes_back_with_nothing_does_not_serve_before_it_is_elected(
    rank: Rank,
) -> None:
    state = started(rank, has_rejoined=True)
    assert not state.is_evaluated
    hear(state, 2, "lead", term=7)
    assert state.election.leader == 2


def test_one_that_others_take_for_the_server_though_it_has_restarted_says_so() -> None:
    state = started(2, has_rejoined=True)
    effects = commit(state, 3, term=7)
    assert (3, "resign") in sent(effects)
    follower = started(3)
    hear(follower, 2, "lead", term=7)
    hear(follower, 2, "resign", term=7)
    assert follower.election.misses_leader


def test_schema_has_each_kind_of_message_and_its_term() -> None:
    schema = Standby(inner=ADSP(num_workers=4, num_rounds=50)).schema(MODEL)
    assert all("term" in spec.numbers for spec in schema.values())
    assert {"stand", "vote", "promised", "lead", "resign", "keep", "kept"} < schema.keys()
    assert "params" not in schema["copy"].tensors


@pytest.mark.parametrize("kind", ["stand", "promised", "lead"])
def test_term_that_no_election_can_have_reached_is_ignored(kind: str) -> None:
    state = started(1)
    FIVE.handle(state, WorkerLost(0), 1.0)
    huge = 2**53 - 5  # of worker 2
    numbers = {"lead": {"term": huge}}.get(kind, {"term": 0, "stands_for": huge})
    if kind == "stand":
        numbers |= {"as_of": 0, "num_commits": 0}
    assert FIVE.handle(state, Received(2, Message(kind, 0, {}, numbers)), 5.0) == []
    effects = FIVE.handle(state, TimerFired("election"), 5.5)
    (asked, *_) = (each.message for each in effects if isinstance(each, Send))
    assert FIVE.schema(MODEL)["stand"].bad_values({}, asked.numbers) is None
    assert asked.numbers["stands_for"] < 10


def test_rank_without_a_worker_shows_no_model() -> None:
    state = started(0)
    hear(state, 1, "lead", term=6)
    model = {"params": NEWER, "counts": torch.tensor([1, 0, 0, 0])}
    hear(state, 1, "keep", model, term=6)
    assert hear(state, 1, "show", term=6, as_of=0, num_commits=0) == []


def test_commit_of_a_rank_that_does_not_train_is_ignored() -> None:
    state = elected()
    shown(state)
    effects = commit(state, 0, term=state.election.term)
    assert all(each.receiver != 0 for each in effects if isinstance(each, Send))


def test_rank_that_knows_no_server_takes_no_model() -> None:
    state = started(1, has_rejoined=True)
    model = {"params": NEWER, "counts": torch.tensor([1, 0, 0, 0])}
    hear(state, 4, "params", model, term=-1)
    assert state.copy is None
