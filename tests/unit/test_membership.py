"""Workers are told about each other's arrival and loss."""

from __future__ import annotations

from edgegossip.contract.protocol import Rank, WorkerJoined, WorkerLost
from edgegossip.sim.fault import Partition
from edgegossip.sim.membership import Membership, Notice


def members(num_workers: int, *partitions: Partition) -> Membership:
    return Membership(is_online=[True] * num_workers, partitions=partitions)


def said(notices: list[Notice]) -> list[tuple[Rank, str, Rank]]:
    return [(told, type(event).__name__, event.rank) for told, event in notices]


def test_everybody_is_told_once_that_a_worker_is_lost() -> None:
    membership = members(3)
    membership.crash(1, 0.0)
    assert said(list(membership.detect(0.0))) == [(0, "WorkerLost", 1), (2, "WorkerLost", 1)]
    assert list(membership.detect(1.0)) == []


def test_the_lost_are_told_nothing() -> None:
    membership = members(3)
    membership.crash(0, 0.0)
    membership.crash(1, 0.0)
    assert said(list(membership.detect(0.0))) == [(2, "WorkerLost", 0), (2, "WorkerLost", 1)]


def test_a_worker_that_comes_back_learns_who_is_lost_and_the_others_that_it_joined() -> None:
    membership = members(4)
    membership.crash(0, 0.0)
    membership.crash(1, 0.0)
    list(membership.detect(0.0))
    notices = list(membership.recover(1, now=5.0))
    assert said([n for n in notices if n[0] == 1]) == [(1, "WorkerLost", 0)]
    assert said([n for n in notices if n[0] != 1]) == [
        (2, "WorkerJoined", 1),
        (3, "WorkerJoined", 1),
    ]
    assert list(membership.heal(6.0)) == []


def test_a_worker_back_before_anyone_noticed_was_lost_all_the_same() -> None:
    membership = members(2)
    membership.crash(0, 0.0)
    notices = list(membership.recover(0, now=0.1))
    assert said(notices) == [(1, "WorkerLost", 0), (1, "WorkerJoined", 0)]
    assert list(membership.detect(1.0)) == []


def test_both_sides_of_a_partition_lose_each_other_and_meet_again() -> None:
    membership = members(3, Partition(start=1.0, end=3.0, group=(0,)))
    assert list(membership.detect(0.9)) == []
    lost = [(0, "WorkerLost", 1), (0, "WorkerLost", 2), (1, "WorkerLost", 0)]
    assert said(list(membership.detect(2.0))) == [*lost, (2, "WorkerLost", 0)]
    assert list(membership.heal(2.9)) == []
    joined = [(told, "WorkerJoined", rank) for told, _, rank in [*lost, (2, "", 0)]]
    assert said(list(membership.heal(3.0))) == joined


def test_who_crashes_behind_a_partition_stays_lost_when_it_ends() -> None:
    membership = members(2, Partition(start=0.0, end=1.0, group=(0,)))
    list(membership.detect(0.0))
    membership.crash(0, 0.0)
    assert list(membership.heal(1.0)) == []
    assert (1, WorkerLost(0)) not in list(membership.detect(1.0))


def test_a_worker_that_comes_back_behind_a_partition_is_met_when_that_ends() -> None:
    membership = members(2, Partition(start=0.0, end=2.0, group=(0,)))
    membership.crash(0, 0.0)
    list(membership.detect(0.5))
    assert not [n for n in membership.recover(0, now=1.0) if isinstance(n[1], WorkerJoined)]
    assert {(told, rank) for told, _, rank in said(list(membership.heal(2.0)))} == {
        (0, 1),
        (1, 0),
    }


def test_what_a_worker_believed_is_gone_when_it_crashes() -> None:
    membership = members(3)
    membership.crash(2, 0.0)
    list(membership.detect(0.0))
    membership.crash(0, 0.0)
    assert said(list(membership.recover(0, now=1.0)))[0] == (0, "WorkerLost", 2)


def test_two_partitions_separate_wherever_one_does() -> None:
    first = Partition(start=0.0, end=2.0, group=(0,))
    second = Partition(start=1.0, end=3.0, group=(1,))
    membership = members(3, first, second)
    separated = [membership.are_separated(0, 2, now) for now in (0.0, 1.0, 2.0)]
    assert separated == [True, True, False]
    assert membership.are_separated(0, 1, 2.5)


def test_each_is_noticed_only_when_it_was_away_for_long_enough() -> None:
    membership = members(3, Partition(start=0.5, end=9.0, group=(2,)))
    membership.crash(0, 0.0)
    membership.crash(1, 0.9)
    assert said(list(membership.changes(1.0, lasting=1.0))) == [(2, "WorkerLost", 0)]
    assert said(list(membership.changes(1.9, lasting=1.0))) == [(2, "WorkerLost", 1)]


def test_partitions_that_follow_each_other_are_one() -> None:
    first = Partition(start=0.0, end=2.5, group=(0,))
    membership = members(3, first, Partition(start=2.5, end=5.0, group=(0, 1)))
    assert said(list(membership.changes(2.6, lasting=2.6))) == [
        (0, "WorkerLost", 2),
        (2, "WorkerLost", 0),
    ]


def test_a_partition_is_noticed_only_when_it_has_lasted_long_enough() -> None:
    membership = members(3, Partition(start=0.5, end=9.0, group=(2,)))
    membership.crash(0, 0.0)
    assert (1, "WorkerLost", 2) not in said(list(membership.changes(1.0, lasting=1.0)))
    assert said(list(membership.changes(1.5, lasting=1.0))) == [
        (1, "WorkerLost", 2),
        (2, "WorkerLost", 1),
    ]
