"""One worker's claim about the run counts only if another confirms it, or is absent."""

from __future__ import annotations

import pytest
from tests.unit.test_peers import OTHER, OWN, status

from edgegossip.contract.protocol import WorkerJoined, WorkerLost
from edgegossip.net.host.peers import Peers
from edgegossip.net.host.status import Phase, WorkerStatus


def make_peers(*statuses: WorkerStatus | None) -> Peers:
    """Worker 0, which can reach the others; they have said how they are, or nothing yet."""
    peers = Peers(0, 1 + len(statuses), OWN)
    for rank, each in enumerate(statuses, start=1):
        peers.appeared(rank, incarnation=1)
        if each is not None:
            peers.told(rank, each, clock=100.0)
    return peers


def counted(**changes: object) -> WorkerStatus:
    return status(**{"sent": (0,) * 4, "received": (0,) * 4} | changes)


WAITING = counted()
RUNNING = counted(phase=Phase.RUNNING, elapsed=30.0)
LYING = counted(phase=Phase.RUNNING, elapsed=1e9)


def test_one_that_says_that_the_run_is_old_makes_nobody_begin_late() -> None:
    peers = make_peers(LYING, WAITING, WAITING)
    assert peers.began_at is None
    assert not peers.must_rejoin
    assert peers.begin() == [WorkerLost(1)]  # it has begun without this worker, as it says


def test_of_two_that_say_when_the_run_began_the_younger_is_believed() -> None:
    peers = make_peers(LYING, RUNNING, WAITING)
    assert peers.must_rejoin
    assert peers.began_at == pytest.approx(70.0)


def test_those_who_have_not_spoken_yet_confirm_nothing() -> None:
    assert make_peers(LYING, None, None).began_at is None


def test_the_only_one_that_is_there_is_believed() -> None:
    peers = make_peers(RUNNING)
    assert peers.must_rejoin
    assert peers.began_at == pytest.approx(70.0)


def test_one_that_says_that_it_was_resumed_makes_nobody_rejoin() -> None:
    assert not make_peers(counted(is_resumed=True), WAITING, WAITING).must_rejoin
    assert make_peers(counted(is_resumed=True), counted(is_resumed=True), WAITING).must_rejoin


def test_one_that_rejoins_waits_for_no_help_of_those_who_wait_themselves() -> None:
    peers = make_peers(RUNNING, RUNNING, WAITING)
    assert peers.begin(has_rejoined=True) == [WorkerLost(3)]


def test_a_message_that_was_lost_is_known_by_the_next_or_by_two_statuses() -> None:
    told = counted(phase=Phase.RUNNING, begun_with=OWN, elapsed=31.0, sent=(1, 0, 0, 0))
    peers = make_peers(RUNNING, RUNNING, RUNNING)
    peers.begin(has_rejoined=True)
    peers.told(1, told, clock=101.0)
    assert peers.lacking == []  # one that is resumed says so before it sends again
    peers.told(1, told, clock=102.0)
    assert peers.lacking == [1]
    peers[1].received = 1  # it was sent again
    assert peers.lacking == []
    peers[2].has_lost_some = True
    assert peers.lacking == [2]
    assert peers.lose(2) == [WorkerLost(2)]
    assert peers.lacking == []


def test_one_that_is_found_is_not_given_up_for_what_was_lost_before() -> None:
    told = counted(phase=Phase.RUNNING, begun_with=OWN, sent=(9, 0, 0, 0))
    peers = make_peers(RUNNING, RUNNING, RUNNING)
    peers.begin(has_rejoined=True)
    for clock in (101.0, 102.0):
        peers.told(1, told, clock)
    peers.lose(1)
    peers[1].has_lost_some = True  # by what came over the next link before it was found
    assert [type(event) for event in peers.find(1)] == [WorkerJoined]
    assert peers.lacking == []


def test_what_was_sent_to_an_earlier_life_is_not_missed() -> None:
    told = counted(phase=Phase.RUNNING, begun_with=OTHER, sent=(9, 0, 0, 0))
    peers = make_peers(told, RUNNING, RUNNING)
    peers.begin(has_rejoined=True)
    for clock in (101.0, 102.0, 103.0):
        peers.told(1, told, clock)
    assert peers.lacking == []


def test_one_that_claims_to_be_born_again_and_again_is_not_welcomed_each_time() -> None:
    peers = make_peers(WAITING, WAITING, WAITING)
    peers.begin()
    for life in (OTHER, 1000):  # it rejoins
        peers.told(1, counted(phase=Phase.RUNNING, life=life), clock=101.0)
    assert peers[1].known_life == 1000
    assert peers.told(1, counted(phase=Phase.RUNNING, life=1001), clock=102.0) == []
    peers.disappeared(1, 1, clock=103.0)
    peers.appeared(1, incarnation=2)  # another process
    assert peers.told(1, counted(phase=Phase.RUNNING, life=1001), clock=104.0) != []


def test_one_that_is_refused_is_not_asked() -> None:
    peers = make_peers(RUNNING, None)
    assert not peers.must_rejoin  # the second may confirm it, or not
    peers[2].refuse()
    assert peers.must_rejoin
    peers.appeared(2, incarnation=2)
    assert not peers.must_rejoin
