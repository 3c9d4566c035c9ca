"""Work goes where a learner lives, and learners live where they are done soonest."""

from __future__ import annotations

import pytest
import torch

from edgegossip.contract.protocol import Steps, Train
from edgegossip.integrations.ray.learners_desk import Reply
from edgegossip.integrations.ray.placement import Job, Placement, Seat
from edgegossip.integrations.ray.twin import Origin, Twin
from edgegossip.recipes.rehearsal import Rehearsal

REQUEST = Train(torch.zeros(1), Steps(1))


class World:
    """A placement with seats of known speeds, in virtual time.

    Args:
        speeds: Samples per second of each seat.
        making_seconds: How long it takes to make a learner.
    """

    def __init__(self, *speeds: float, making_seconds: float = 0.0) -> None:
        self.placement = Placement()
        self.speeds = speeds
        self.making_seconds = making_seconds
        self.seats = [Seat(f"seat {n}") for n in range(len(speeds))]
        self.free_at = [0.0] * len(speeds)
        for seat in self.seats:
            self.placement.open(seat)

    def twins(self, number: int) -> list[Twin]:
        return [Twin(Rehearsal(100), Origin(None, rank, 0)) for rank in range(number)]

    def round(self, twins: list[Twin]) -> float:
        """Have each train once; says how long all took."""
        start = max(self.free_at)
        self.free_at = [start] * len(self.seats)
        for twin in twins:
            twin.cost(REQUEST)
            self.placement.put(twin, REQUEST, 0.0)
        left = len(twins)
        while left:
            n = min(range(len(self.seats)), key=lambda k: self.free_at[k])
            jobs = self.take(n)
            left -= len(jobs)
            if not jobs:  # nothing is worth it here: look again when another is free
                later = [at for at in self.free_at if at > self.free_at[n]]
                self.free_at[n] = min(later)
        return max(self.free_at) - start

    def take(self, n: int) -> list[Job]:
        """Let a seat do what it is given, to the end."""
        seat = self.seats[n]
        with self.placement._lock:
            jobs = self.placement._parcel(seat)
        replies = []
        for job in jobs:
            is_new = job.twin.seat is not seat
            job.twin.move(seat)
            seconds = job.cost / self.speeds[n]
            making = self.making_seconds if is_new else None
            replies.append(Reply(seconds=seconds, making_seconds=making))
            self.free_at[n] += seconds + (making or 0.0)
        self.placement.finish(seat, jobs, replies)
        return jobs


@pytest.mark.parametrize("speeds", [(1000.0, 1000.0), (3000.0, 1000.0), (100.0, 500.0, 200.0)])
def test_seats_are_used_by_their_speed(speeds: tuple[float, ...]) -> None:
    world = World(*speeds)
    twins = world.twins(60)
    seconds = [world.round(twins) for _ in range(4)]
    ideal = 60 * 100 / sum(speeds)
    longest_job = 100 / min(speeds)
    assert max(seconds) < ideal + longest_job
    homes = [sum(twin.seat is seat for twin in twins) for seat in world.seats]
    for number, speed in zip(homes, speeds, strict=True):
        assert abs(number - 60 * speed / sum(speeds)) < 4


def test_learners_leave_a_seat_that_has_become_slow() -> None:
    world = World(1000.0, 1000.0)
    twins = world.twins(40)
    world.round(twins)
    world.speeds = (1000.0, 250.0)
    seconds = [world.round(twins) for _ in range(6)]
    assert seconds[-1] < 1.25 * 40 * 100 / 1250


def test_a_learner_that_takes_long_to_make_stays() -> None:
    world = World(1000.0, 900.0, making_seconds=50.0)
    twins = world.twins(10)
    world.round(twins)
    homes = [twin.seat for twin in twins]
    world.round(twins)
    assert [twin.seat for twin in twins] == homes


def test_a_learner_that_moves_is_forgotten_where_it_was() -> None:
    world = World(1.0, 1.0)
    (twin,) = world.twins(1)
    first, second = world.seats
    twin.move(first)
    twin.move(second)
    assert [*first.forgotten] == [twin.serial]
    assert not second.forgotten
    del twin
    assert len(second.forgotten) == 1


def test_small_pieces_travel_together_and_large_ones_alone() -> None:
    world = World(1e6, 1000.0)
    for seat, speed in zip(world.seats, world.speeds, strict=True):
        seat.seconds_per_cost = 1 / speed
    for twin in world.twins(40):
        twin.cost(REQUEST)
        world.placement.put(twin, REQUEST, 0.0)
    assert len(world.take(1)) == 1
    assert len(world.take(0)) == 39


def test_what_a_lost_seat_had_to_do_goes_first_elsewhere() -> None:
    world = World(1000.0, 1000.0)
    twins = world.twins(4)
    for twin in twins[:2]:
        twin.move(world.seats[0])
    for twin in twins:
        twin.cost(REQUEST)
        world.placement.put(twin, REQUEST, 0.0)
    under_way = world.placement.take(world.seats[0])
    assert [job.twin for job in under_way] == twins[:1]
    world.placement.lose(world.seats[0], under_way)
    taken = [world.take(1)[0].twin for _ in range(4)]
    assert taken == twins


def test_work_that_costs_nothing_can_be_waited_for() -> None:
    world = World(1000.0)
    twin = Twin(Rehearsal(0), Origin(None, 0, 0))
    world.placement.put(twin, REQUEST, 0.0)
    assert len(world.placement.take(world.seats[0])) == 1
    assert world.placement.take(world.seats[0]) == []  # and does not wait for more
