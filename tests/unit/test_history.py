"""Others' use of a machine, from the counters of all processes and of ours."""

from __future__ import annotations

import pytest
from tests.counted import Counted

from edgegossip.machine.contention import Contention
from edgegossip.machine.counters import Usage
from edgegossip.machine.monitor import LoadHistory


def watched(counted: Counted) -> LoadHistory:
    return LoadHistory(counted, counted.clock)


def test_others_use_what_the_machine_does_less_what_we_do() -> None:
    counted = Counted(num_cores=2)
    history = watched(counted)
    counted.pass_by(1.0, machine=Usage(1.5, 1000, 500), own=Usage(0.9, 400, 500))
    history.read()
    found = history.mean_contention((0.0, 1.0))
    assert found.cores == pytest.approx(0.3)
    assert (found.network, found.disk) == (600, 0)


def test_means_hold_between_readings_and_over_several() -> None:
    counted = Counted(num_cores=1)
    history = watched(counted)
    for cores in (0.0, 1.0, 0.5):
        counted.pass_by(1.0, machine=Usage(cores))
        history.read()
    assert history.mean_contention((1.25, 1.75)) == Contention(1.0)
    assert history.mean_contention((0.5, 2.5)).cores == pytest.approx(1.25 / 2)
    assert history.readings(1.0, 3.0) == [2.0, 3.0]


def test_beyond_the_readings_the_nearest_count() -> None:
    counted = Counted(num_cores=1)
    history = watched(counted)
    assert history.mean_contention((5.0, 6.0)) == Contention()
    counted.pass_by(2.0, machine=Usage(1.0))
    history.read()
    assert history.mean_contention((-9.0, 9.0)).cores == pytest.approx(0.5)
    assert history.mean_contention((3.0, 4.0)).cores == pytest.approx(0.5)


def test_what_we_wrote_is_ours_when_the_disk_gets_it_later() -> None:
    counted = Counted()
    history = watched(counted)
    counted.pass_by(1.0, own=Usage(disk=100))
    history.read()
    counted.pass_by(1.0, machine=Usage(disk=60))
    history.read()
    counted.pass_by(1.0, machine=Usage(disk=60))
    history.read()
    assert history.mean_contention((0.0, 2.0)).disk == 0
    # What we owe is forgotten slowly, since some of it never gets to the disk.
    assert history.mean_contention((2.0, 3.0)).disk == pytest.approx(20, abs=10)


def test_what_never_reaches_the_disk_hides_others_only_for_a_while() -> None:
    counted = Counted()
    history = watched(counted)
    counted.pass_by(1.0, own=Usage(disk=1e6))
    for _ in range(120):
        counted.pass_by(1.0, machine=Usage(disk=1000))
        history.read()
    assert history.mean_contention((100.0, 121.0)).disk == pytest.approx(1000)


def test_noise_of_the_counts_leaves_the_mean_right() -> None:
    counted = Counted(num_cores=1)
    history = watched(counted)
    for number in range(40):
        ours = 0.5 if number % 2 else 0.7  # while the machine shows 0.65 of all each time
        counted.pass_by(1.0, machine=Usage(0.65), own=Usage(ours))
        history.read()
    assert history.mean_contention((0.0, 40.0)).cores == pytest.approx(0.05, abs=0.005)


def test_a_child_that_vanishes_from_our_count_costs_no_more_than_that_reading() -> None:
    counted = Counted(num_cores=1)
    history = watched(counted)
    counted.pass_by(1.0, machine=Usage(0.5), own=Usage(0.5))
    history.read()
    counted.pass_by(1.0, machine=Usage(0.5), own=Usage(-50.0))
    history.read()
    for _ in range(3):
        counted.pass_by(1.0, machine=Usage(0.5), own=Usage(0.5))
        history.read()
    assert history.mean_contention((2.0, 5.0)) == Contention()


def test_shares_stay_within_bounds_whatever_the_counters_say() -> None:
    counted = Counted(num_cores=2)
    history = watched(counted)
    counted.pass_by(1.0, machine=Usage(5.0))
    history.read()
    assert history.mean_contention((0.0, 1.0)).cores == 1.0


@pytest.mark.parametrize(
    ("outside", "inside", "expected"),
    [
        (0.0, 0.0, 0.0),
        (1.5, 0.0, 0.0),  # they leave us the half core of our quota
        (1.75, 0.0, 0.5),
        (0.0, 0.25, 0.5),  # who shares our quota takes from it
        (1.6, 0.25, 0.7),
    ],
)
def test_under_a_quota_counts_what_others_leave_of_it(
    outside: float, inside: float, expected: float
) -> None:
    counted = Counted(num_cores=2, quota=0.5, has_group=True)
    history = watched(counted)
    group = inside + 0.1
    counted.pass_by(1.0, machine=Usage(outside + group), own=Usage(0.1), group=group)
    history.read()
    assert history.mean_contention((0.0, 1.0)).cores == pytest.approx(expected)


def test_only_two_minutes_are_remembered() -> None:
    counted = Counted()
    history = watched(counted)
    for _ in range(1000):
        counted.pass_by(1.0)
        history.read()
    assert len(history.times) <= 245
    assert history.times[0] <= 1000 - 120


def test_a_clock_that_stands_still_is_no_reading() -> None:
    counted = Counted()
    history = watched(counted)
    history.read()
    assert history.times == [0.0]
