"""Whom a worker gives up, and when."""

from __future__ import annotations

import math

import pytest

from edgegossip.net.host.timing import Patience


def after_a_round(seconds: float) -> Patience:
    patience = Patience(factor=3.0, slack=1.0, first=600.0)
    patience.worked(seconds)
    patience.next_round(0.0)
    return patience


def test_a_round_in_which_nobody_waited_teaches_the_deadline_too() -> None:
    assert Patience(first=600.0).deadline == 600.0
    assert after_a_round(2.0).deadline == 7.0


def test_short_waits_of_a_round_do_not_push_long_ones_out_of_memory() -> None:
    patience = after_a_round(2.0)
    for moment in range(100):
        patience.watch(True, moment)
        patience.watch(False, moment + 0.001)
        patience.worked(0.01)
    patience.next_round(100.0)
    assert patience.deadline == 7.0


def test_all_that_a_round_trains_counts_together() -> None:
    patience = after_a_round(0.0)
    for _ in range(4):
        patience.worked(1.0)
    assert patience.deadline == 13.0


def test_nobody_is_given_up_before_the_silence_that_another_asks_for() -> None:
    slow, fast = after_a_round(20.0), after_a_round(1.0)
    slow.trains = True
    assert 61.0 <= slow.asks <= 2 * 61.0
    assert fast.deadline == 4.0
    fast.asked = slow.asks
    assert fast.deadline == slow.asks
    fast.asked = math.inf
    assert fast.deadline == 3600.0


def test_one_asks_for_a_long_silence_during_its_first_training_only() -> None:
    patience = Patience(first=600.0)
    patience.next_round(0.0)
    assert patience.asks < 20.0  # a server does not train
    patience.trains = True
    patience.next_round(1.0)  # a round may end while the training goes on
    assert patience.asks >= 600.0
    patience.worked(2.0)
    assert patience.asks < 20.0


def test_one_that_says_how_it_is_is_given_up_much_later() -> None:
    patience = after_a_round(2.0)
    patience.watch(True, 100.0)
    assert not patience.is_over(heard_at=99.0, spoke_at=0.0, now=106.9)
    assert patience.is_over(heard_at=99.0, spoke_at=0.0, now=107.0)
    assert not patience.is_over(heard_at=103.0, spoke_at=0.0, now=109.9)
    assert not patience.is_over(heard_at=99.0, spoke_at=120.0, now=120.9)
    assert patience.is_over(heard_at=99.0, spoke_at=120.9, now=121.0)


def test_a_wait_that_was_given_up_teaches_nothing() -> None:
    patience = after_a_round(2.0)
    patience.watch(True, 100.0)
    assert patience.is_over(0.0, 0.0, 107.0)
    patience.watch(False, 107.0)
    patience.next_round(107.0)
    assert patience.deadline == 7.0


def test_who_waits_looks_about_four_times_in_slack() -> None:
    patience = Patience(slack=1.0)
    assert patience.check_at == math.inf
    patience.watch(True, 5.0)
    assert patience.check_at == pytest.approx(5.25)
    patience.watch(False, 5.2)
    assert patience.check_at == math.inf


def test_an_idle_worker_with_a_timer_announces_itself_and_does_not_wait() -> None:
    patience = Patience(slack=1.0)
    patience.watch(True, 5.0, has_timer=True)
    assert (patience.check_at, patience.is_waiting) == (5.25, False)
    patience.watch(True, 6.0)  # the timer has fired
    assert (patience.check_at, patience.is_waiting) == (6.25, True)
    patience.watch(True, 7.0, has_timer=True)
    patience.watch(False, 7.5)
    assert (patience.check_at, patience.is_waiting) == (math.inf, False)
    assert patience.total_waited(8.0) == 1.0


@pytest.mark.parametrize("wrong", [{"factor": 0.5}, {"slack": 0.0}, {"first": 0.0}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="factor"):
        Patience(**wrong)


def test_a_neighbor_that_is_always_just_in_time_stretches_no_deadline_for_ever() -> None:
    patience, now = after_a_round(2.0), 0.0
    for _ in range(20):
        patience.watch(True, now)
        now += patience.deadline - 0.1
        patience.watch(False, now)
        patience.next_round(now)
    assert patience.deadline == 600.0
    patience.worked(1000.0)  # its own training is no lie
    assert patience.deadline == 3001.0


def test_one_that_sends_what_is_of_no_use_is_given_up_in_the_end() -> None:
    patience = after_a_round(2.0)  # a deadline of 7 s
    patience.watch(True, 0.0)
    assert not patience.is_over(heard_at=20.0, spoke_at=20.0, now=20.5)
    assert patience.is_over(heard_at=20.9, spoke_at=20.9, now=21.0)


def test_one_that_never_trains_waits_anew_in_each_round() -> None:
    patience = Patience(factor=3.0, slack=1.0, first=600.0)
    patience.watch(True, 0.0)
    for now in range(2, 2000, 2):
        patience.watch(True, now)  # it has answered, and waits on
        patience.next_round(now)
        assert not patience.is_over(heard_at=now, spoke_at=now, now=now + 1.0)
    assert patience.deadline == 7.0
    assert patience.is_over(heard_at=1998.0, spoke_at=1998.0, now=2005.0)
