"""A worker's view of its peers: when it begins, rejoins, counts and may leave."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from edgegossip.contract.protocol import Message, WorkerJoined, WorkerLost
from edgegossip.net.host.peers import PLACEHOLDER, Peers, SentLog
from edgegossip.net.host.status import Phase, WorkerStatus

OWN, OTHER, OLD, NEW = 100, 200, 300, 400


def status(**changes: Any) -> WorkerStatus:  # noqa: ANN401
    values: dict[str, Any] = {
        "phase": Phase.WAITING,
        "life": OTHER,
        "begun_with": 0,
        "elapsed": 0.0,
        "silence": 0.0,
        "is_resumed": False,
        "oldest": 1,
        "kept": 0,
        "sent": (0, 0),
        "received": (0, 0),
    }
    values |= changes
    # By default nothing waits.
    return WorkerStatus(**{"left": values["sent"][0], **values})


def make_peers(**changes: Any) -> Peers:  # noqa: ANN401
    """Worker 0 of two, which worker 1 has told how it is."""
    peers = Peers(0, 2, OWN, max_log_bytes=2200)
    peers.appeared(1, incarnation=1)
    peers.told(1, status(**changes), 0.0)
    return peers


def test_a_status_that_a_later_one_has_overtaken_changes_nothing() -> None:
    peers = make_peers(phase=Phase.RUNNING, elapsed=5.0)
    finished = status(phase=Phase.FINISHED, elapsed=6.0)
    peers.told(1, finished, 0.0)
    peers.told(1, status(phase=Phase.RUNNING, elapsed=5.5), 0.0)
    assert peers[1].status is finished
    peers.appeared(1, incarnation=2)  # another process counts its own time
    peers.told(1, status(phase=Phase.RUNNING, elapsed=0.5), 0.0)
    assert peers[1].status is not finished


def test_all_are_here_once_each_has_said_how_it_is() -> None:
    peers = Peers(0, 2, OWN)
    peers.appeared(1, incarnation=1)
    assert not peers.are_all_here
    peers.told(1, status(), 0.0)
    assert peers.are_all_here
    peers.disappeared(1, 1, 0.0)
    assert not peers.are_all_here


def test_the_first_to_begin_makes_nobody_rejoin() -> None:
    assert not make_peers(phase=Phase.RUNNING, begun_with=OWN).must_rejoin


def test_who_comes_when_others_have_begun_without_it_rejoins() -> None:
    for begun_with in (0, OLD):
        assert make_peers(phase=Phase.RUNNING, begun_with=begun_with).must_rejoin
    assert make_peers(phase=Phase.FINISHED).must_rejoin


def test_who_starts_with_nothing_among_resumed_workers_rejoins() -> None:
    assert make_peers(is_resumed=True).must_rejoin


def test_a_resumed_worker_rejoins_if_what_it_lacks_is_not_kept_any_more() -> None:
    for oldest, must_rejoin in ((3, False), (4, False), (5, True)):
        peers = resumed(received=3)
        peers.told(1, status(is_resumed=True, oldest=oldest), 0.0)
        assert peers.must_rejoin == must_rejoin


def test_a_resumed_worker_rejoins_if_what_it_lacks_was_passed_over_before_it_begins() -> None:
    peers = resumed(received=3)
    peers[1].has_lost_some = True  # message 6 came after message 3
    peers[1].heard(6, 0.0)
    peers.told(1, status(is_resumed=True, oldest=6), 0.0)
    assert peers.must_rejoin


def resumed(received: int, *, takes_repeats: bool = False) -> Peers:
    earlier = make_peers()
    earlier.begin()
    earlier[1].received = received
    peers = Peers(0, 2, OLD, takes_repeats=takes_repeats)
    peers.load_state_dict(earlier.state_dict())
    peers.appeared(1, incarnation=7)
    return peers


def test_who_rejoins_counts_anew_what_it_sends_and_receives() -> None:
    peers = resumed(received=3)
    peers.told(1, status(phase=Phase.RUNNING), 0.0)
    assert peers.must_rejoin
    peers.live_anew(NEW)
    assert (peers.life, peers[1].sent, peers[1].received) == (NEW, 0, 0)
    assert peers.begin(has_rejoined=True) == []


def test_who_rejoins_is_told_anew_who_is_lost() -> None:
    earlier = make_peers()
    earlier.begin()
    earlier.lose(1)
    peers = Peers(0, 2, OLD)
    peers.load_state_dict(earlier.state_dict())
    peers.live_anew(NEW)
    assert peers.begin() == [WorkerLost(1)]


def test_a_resumed_worker_goes_on_with_its_life_and_with_those_who_do_too() -> None:
    peers = resumed(received=3)
    assert peers.life == OWN
    peers.told(1, status(is_resumed=True), 0.0)
    assert peers.begin() == []


@pytest.mark.parametrize("takes_repeats", [False, True])
def test_what_may_be_said_otherwise_after_a_checkpoint_is_not_dropped_as_known(
    takes_repeats: bool,
) -> None:
    peers = resumed(received=3, takes_repeats=takes_repeats)
    peers.told(1, status(is_resumed=True, received=(5, 0)), 0.0)
    peers.begin()
    assert peers[1].sent == (5 if takes_repeats else 0)


def test_a_resumed_worker_begins_without_those_who_begin_anew() -> None:
    peers = resumed(received=3)
    peers.told(1, status(life=OLD), 0.0)
    assert peers.begin() == [WorkerLost(1)]
    joined = peers.told(1, status(life=OLD, phase=Phase.RUNNING), 0.0)
    assert joined == [WorkerJoined(1, has_restarted=True)]


def test_those_who_are_missing_at_the_beginning_are_lost() -> None:
    peers = Peers(0, 3, OWN)
    peers.appeared(1, incarnation=1)
    peers.told(1, status(sent=(0, 0, 0), received=(0, 0, 0)), 0.0)
    assert peers.begin() == [WorkerLost(2)]
    assert peers.active == [1]


def test_those_who_have_ended_before_are_lost_and_not_waited_for() -> None:
    peers = Peers(0, 3, OWN, ended=(2,))
    assert peers.missing == [1]
    peers.appeared(1, incarnation=1)
    peers.told(1, status(sent=(0, 0, 0), received=(0, 0, 0)), 0.0)
    assert peers.are_all_here
    assert peers.begin() == [WorkerLost(2)]


def test_a_cut_and_a_restart_are_told_apart() -> None:
    peers = make_peers()
    peers.begin()
    assert peers.disappeared(1, 1, 0.0) == [WorkerLost(1)]
    peers.appeared(1, incarnation=1)
    running = status(phase=Phase.RUNNING, begun_with=OWN)
    assert peers.told(1, running, 0.0) == [WorkerJoined(1, has_restarted=False)]
    assert peers.told(1, running, 0.0) == []
    again = status(phase=Phase.RUNNING, begun_with=OWN, life=OLD)
    assert peers.told(1, again, 0.0) == [WorkerLost(1), WorkerJoined(1, has_restarted=True)]


def test_who_restarts_before_it_was_missed_joins_when_it_has_begun() -> None:
    peers = make_peers()
    peers.begin()
    peers.appeared(1, incarnation=2)
    assert peers.disappeared(1, 1, 0.0) == []
    assert peers.told(1, status(life=OLD), 0.0) == []


def test_who_has_restarted_is_numbered_anew() -> None:
    peers = make_peers()
    peers.begin()
    peers[1].sent, peers[1].received = 5, 7
    peers.told(1, status(life=OLD), 0.0)
    assert (peers[1].sent, peers[1].received) == (0, 0)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_who_returns_to_a_former_life_is_numbered_where_it_was(is_resumed: bool) -> None:
    """Its newest checkpoint may be from that life, and it sends again what came after it."""
    peers = make_peers()
    peers.begin()
    peers[1].sent, peers[1].received = 5, 7
    peers.appeared(1, incarnation=2)
    peers.told(1, status(life=OLD), 0.0)
    peers[1].sent, peers[1].received = 2, 3
    if is_resumed:
        kept, peers = peers, Peers(0, 2, NEW)
        peers.load_state_dict(kept.state_dict())
    peers.appeared(1, incarnation=3)
    peers.told(1, status(life=OTHER), 0.0)
    assert (peers[1].sent, peers[1].received) == (5, 7)
    assert peers.status_for(1, Phase.RUNNING, 0.0).oldest == 6  # nothing is kept for it
    peers.appeared(1, incarnation=4)
    peers.told(1, status(life=OLD), 0.0)
    assert (peers[1].sent, peers[1].received) == (2, 3)


def test_numbers_of_former_lives_are_of_this_worker_s_own_life() -> None:
    peers = make_peers()
    peers[1].received = 7
    peers.appeared(1, incarnation=2)
    peers.told(1, status(life=OLD), 0.0)
    peers.live_anew(NEW)
    peers.appeared(1, incarnation=3)
    peers.told(1, status(life=OTHER), 0.0)
    assert peers[1].received == 0


def test_a_worker_that_is_restarted_for_ever_takes_little_memory() -> None:
    peers = make_peers()
    for incarnation in range(2, 100):
        peers.appeared(1, incarnation)
        peers.told(1, status(life=incarnation), 0.0)
    assert len(peers[1].former) == 16


def test_messages_are_kept_until_their_receiver_has_them_in_a_checkpoint() -> None:
    peers = make_peers()
    for number in (1, 2, 3):
        peers[1].log.add(number, Message("m", 0, {"x": torch.zeros(10)}))
    assert [number for number, _ in peers[1].log.entries] == [2, 3]  # of a kilobyte each
    assert peers.status_for(1, Phase.RUNNING, 0.0).oldest == 2
    # This is about an earlier life of this worker, whose messages had other numbers.
    peers.told(1, status(kept=3, begun_with=OLD), 0.0)
    assert [number for number, _ in peers[1].log.entries] == [2, 3]
    peers.told(1, status(kept=2, begun_with=OWN), 0.0)
    assert [number for number, _ in peers[1].log.entries] == [3]


def test_what_was_received_is_kept_once_the_checkpoint_lies_on_the_disk() -> None:
    peers = make_peers()
    peers[1].received = 3
    peers.state_dict()
    assert peers.status_for(1, Phase.RUNNING, 0.0).kept == 0  # the disk may be full
    peers.note_kept()
    assert peers.status_for(1, Phase.RUNNING, 0.0).kept == 3


def test_nothing_is_under_way_when_all_counts_agree() -> None:
    peers = make_peers()
    peers.begin()
    peers[1].sent, peers[1].received = 4, 9
    for sent, received, is_nothing_under_way in ((9, 4, True), (9, 3, False), (10, 4, False)):
        finished = status(phase=Phase.FINISHED, sent=(sent, 0), received=(received, 0))
        peers.told(1, finished, 0.0)
        assert peers.is_nothing_under_way == is_nothing_under_way
    assert not peers.unfinished
    peers.lose(1)
    assert peers.is_nothing_under_way


def test_the_run_began_when_most_say_that_it_did() -> None:
    peers = Peers(0, 4, OWN)
    assert peers.began_at is None
    for rank, elapsed in ((1, 2.0), (2, 2.5), (3, 1e9)):
        counts = {"sent": (0, 0, 0, 0), "received": (0, 0, 0, 0)}
        peers.appeared(rank, incarnation=1)
        peers.told(rank, status(phase=Phase.RUNNING, elapsed=elapsed, **counts), 10.0)
    assert peers.began_at == 7.5


def test_who_leaves_politely_is_missed_only_after_a_while() -> None:
    peers = make_peers()
    peers.begin()
    peers.told(1, status(phase=Phase.LEAVING), 0.0)
    assert peers.disappeared(1, 1, 5.0) == []
    assert peers.due_at == 8.0
    assert peers.overdue(7.9) == []
    assert peers.overdue(8.0) == [WorkerLost(1)]
    assert peers.overdue(9.0) == []


def test_small_messages_count_as_the_memory_that_they_take() -> None:
    log = SentLog(max_bytes=10_000)
    for number in range(100):
        log.add(number, Message("declined", 0, {}))
    assert [number for number, _ in log.entries] == list(range(91, 100))
    log.forget(99)
    assert log.num_bytes == 0


def test_a_resumed_worker_goes_on_counting_where_one_that_it_had_lost_is() -> None:
    earlier = make_peers()
    earlier.begin()
    earlier.lose(1)
    peers = Peers(0, 2, OLD)
    peers.load_state_dict(earlier.state_dict())
    peers.appeared(1, incarnation=7)
    peers.told(1, status(is_resumed=True, received=(5, 0)), 0.0)
    assert peers.begin() == [WorkerJoined(1)]
    assert peers[1].sent == 5  # found after the checkpoint, and sent five messages


def test_a_resumed_worker_goes_on_counting_where_one_is_that_has_lost_it() -> None:
    # Worker 1 has lost it and tells it things anew; so worker 2 does not get the same again.
    for hears_before_it_begins in (True, False):
        earlier = make_three()
        earlier.begin()
        peers = make_three(earlier.state_dict())
        lost = status(phase=Phase.RUNNING, begun_with=0, sent=(0,) * 3, received=(0,) * 3)
        if hears_before_it_begins:
            peers.told(1, lost, 0.0)
        assert not peers.must_rejoin
        assert peers.begin() == []
        if not hears_before_it_begins:
            assert peers[2].sent == 0
            peers.told(1, lost, 0.0)
        assert peers[2].sent == 5


def make_three(state: dict[str, Any] | None = None) -> Peers:
    """Worker 0 of three, from which worker 2 has five messages."""
    peers = Peers(0, 3, OWN)
    if state is not None:
        peers.load_state_dict(state)
    for rank in (1, 2):
        peers.appeared(rank, incarnation=1)
        waiting = status(sent=(0,) * 3, received=(5 * (rank == 2), 0, 0))
        peers.told(rank, waiting, 0.0)
    return peers


STUCK = status(phase=Phase.RUNNING, begun_with=OWN, sent=(1, 0))
"""Its only message was rejected, and it waits for an answer."""


def make_started() -> Peers:
    peers = make_peers()
    peers.begin()
    return peers


@pytest.mark.parametrize("says_more", [True, False])
def test_each_return_without_a_missing_message_is_delayed_for_longer(says_more: bool) -> None:
    peers, delays = make_started(), []
    for start in range(0, 1000, 100):
        peers.lose(1)
        events = peers.told(1, STUCK, start)
        if not events:
            at = peers.due_at
            assert peers.overdue(at - 0.1) == []
            if says_more:
                assert peers.told(1, STUCK, at - 0.1) == []
            events = peers.told(1, STUCK, at) if says_more else peers.overdue(at)
            delays.append(at - start)
        assert events == [WorkerJoined(1)]
        assert peers.due_at == math.inf
    assert delays == [3.0, 9.0, 21.0, 45.0, 45.0, 45.0, 45.0, 45.0, 45.0]


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.FINISHED])
def test_after_a_lie_even_the_first_return_is_delayed(phase: Phase) -> None:
    peers = make_started()
    assert peers.lied(1) == [WorkerLost(1, has_lied=True)]
    assert peers.told(1, replace(STUCK, phase=phase), 1.0) == []
    assert peers.due_at == 4.0


def test_statuses_of_a_worker_that_is_there_delay_no_return() -> None:
    peers = make_started()
    for clock in range(3):
        peers.told(1, STUCK, float(clock))
    peers.lose(1)
    assert peers.told(1, STUCK, 3.0) == [WorkerJoined(1)]
    peers.lose(1)
    assert peers.told(1, STUCK, 4.0) == []
    assert peers.due_at == 7.0


def test_a_worker_that_returns_soon_is_not_missing_and_may_still_need_this_one() -> None:
    peers = make_started()
    peers.lied(1)
    assert (peers.lost, peers.unfinished) == ([1], [])
    peers.told(1, STUCK, 1.0)
    assert (peers.lost, peers.unfinished) == ([], [1])
    peers.told(1, replace(STUCK, phase=Phase.FINISHED), 2.0)
    assert peers.unfinished == []


def make_delayed() -> Peers:
    peers = make_started()
    peers[1].num_returns = 5
    peers.lose(1)
    assert peers.told(1, STUCK, 1.0) == []
    return peers


def test_a_message_ends_the_delay() -> None:
    peers = make_delayed()
    peers[1].heard(2, 2.0)
    assert peers.find(1) == [WorkerJoined(1)]
    peers.lose(1)
    assert peers.told(1, replace(STUCK, sent=(3, 0)), 3.0) == [WorkerJoined(1)]


def test_a_new_process_returns_without_delay() -> None:
    peers = make_delayed()
    peers.appeared(1, incarnation=2)
    assert peers.told(1, STUCK, 2.0) == [WorkerJoined(1)]


@pytest.mark.parametrize(
    "changes", [{"begun_with": 0}, {"sent": (0, 0), "left": 0}, {"life": NEW}]
)
def test_only_a_worker_that_waits_for_an_answer_returns_with_delay(
    changes: dict[str, Any],
) -> None:
    # After a cut, both have lost each other; they resend what they can.
    peers = make_delayed()
    assert WorkerJoined(1) in [
        replace(event, has_restarted=False) if isinstance(event, WorkerJoined) else event
        for event in peers.told(1, replace(STUCK, **changes), 2.0)
    ]
    assert peers.due_at == math.inf


def test_a_worker_that_cannot_be_reached_does_not_return() -> None:
    peers = make_delayed()
    at = peers.due_at
    peers.disappeared(1, 1, 2.0)
    assert peers.overdue(at) == []
    assert peers.due_at == math.inf
    assert (peers.lost, peers.unfinished) == ([1], [])


@pytest.mark.parametrize("is_told", [True, False])
def test_a_link_that_is_down_when_a_return_is_due_does_not_delay_it_anew(is_told: bool) -> None:
    peers = make_delayed()
    at = peers.due_at
    peers.disappeared(1, 1, at - 0.1)
    assert peers.overdue(at) == []
    peers.appeared(1, incarnation=1)
    back = peers.told(1, STUCK, at + 0.1) if is_told else peers.overdue(at + 0.1)
    assert back == [WorkerJoined(1)]


def test_a_log_frees_the_memory_of_what_is_replaced() -> None:
    log = SentLog(max_bytes=10**6)
    model = Message("params", 0, {"params": torch.zeros(100)})
    for number in range(1, 4):
        log.add(number, model)
    log.replace(2, PLACEHOLDER)
    assert [message.kind for _, message in log.entries] == [
        "params",
        PLACEHOLDER.kind,
        "params",
    ]
    log.forget(3)
    assert log.num_bytes == 0
    log.replace(2, PLACEHOLDER)  # no longer there
    assert not log.entries
