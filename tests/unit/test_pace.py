"""How the work of long stretches of training is spread over time."""

from __future__ import annotations

import pytest
from tests.counted import Counted

from edgegossip.machine.contention import Contention
from edgegossip.machine.counters import Usage
from edgegossip.machine.monitor import LoadHistory, TrainingHistory


def half_speed(contention: Contention) -> float:
    return 1 + contention.cores


def history_of(*cores: float) -> LoadHistory:
    """Make readings once a second, with these shares between them."""
    counted = Counted(num_cores=1)
    history = LoadHistory(counted, counted.clock)
    for share in cores:
        counted.pass_by(1.0, machine=Usage(share))
        history.read()
    return history


def test_more_is_done_while_others_use_less() -> None:
    progress, history = TrainingHistory(), history_of(0.0, 0.0, 1.0, 1.0)
    progress.add(0.0, 4.0, 30.0)
    assert list(progress.take(history, half_speed)) == [(0.0, 4.0)]
    assert progress.work(0.0, 2.0) == pytest.approx(20.0)
    assert progress.work(2.0, 4.0) == pytest.approx(10.0)
    assert progress.work(1.5, 2.5) == pytest.approx(7.5)


def test_without_a_profile_work_is_even() -> None:
    progress, history = TrainingHistory(), history_of(0.0, 1.0)
    progress.add(0.0, 2.0, 30.0)
    progress.take(history, lambda _: 1.0)
    assert progress.work(0.0, 1.0) == pytest.approx(15.0)


def test_nothing_is_done_in_pauses() -> None:
    progress, history = TrainingHistory(), history_of(0.0, 0.0, 0.0)
    progress.add(0.0, 1.0, 10.0)
    progress.add(2.0, 3.0, 20.0)
    assert list(progress.take(history, half_speed)) == [(0.0, 1.0), (2.0, 3.0)]
    assert progress.work(0.5, 2.5) == pytest.approx(15.0)


def test_short_steps_are_joined_to_pieces() -> None:
    progress, history = TrainingHistory(), history_of(0.0, 0.0)
    for step in range(200):
        progress.add(step * 0.01, step * 0.01 + 0.009, 1.0)
    spans = list(progress.take(history, half_speed))
    assert 5 <= len(spans) <= 8
    assert progress.work(0.0, 2.0) == pytest.approx(200.0)


def test_what_was_taken_is_not_taken_again() -> None:
    progress, history = TrainingHistory(), history_of(0.0)
    progress.add(0.0, 1.0, 1.0)
    assert len(list(progress.take(history, half_speed))) == 1
    assert list(progress.take(history, half_speed)) == []


def test_who_never_asks_does_not_pay() -> None:
    progress, history = TrainingHistory(), history_of(0.0)
    for step in range(10_000):
        progress.add(float(step), step + 0.5, 1.0)
    assert len(list(progress.take(history, half_speed))) == 256
