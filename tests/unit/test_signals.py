"""Signals ask to stop; the second insists, but for that of a terminal that is closed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from edgegossip.runs.process import on_stop_signal


@pytest.fixture(autouse=True)
def _heard_hang_ups() -> Iterator[None]:
    """Whoever runs the tests may ignore SIGHUP, as nohup does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def told_of(*numbers: int) -> list[str]:
    told: list[str] = []
    with on_stop_signal(lambda: told.append("stop"), lambda: told.append("insist")):
        for number in numbers:
            signal.raise_signal(number)
    return told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_to_stop(number: int) -> None:
    before = signal.getsignal(number)
    assert told_of(number) == ["stop"]
    assert signal.getsignal(number) is before


def test_the_second_one_insists() -> None:
    assert told_of(signal.SIGHUP, signal.SIGTERM)[:2] == ["stop", "insist"]
    assert told_of(signal.SIGINT, signal.SIGINT)[:2] == ["stop", "insist"]


def test_a_terminal_that_hangs_up_twice_does_not_insist() -> None:
    assert told_of(signal.SIGHUP, signal.SIGHUP) == ["stop"]
    assert told_of(signal.SIGTERM, signal.SIGHUP) == ["stop"]


def test_under_nohup_a_hang_up_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert told_of(signal.SIGHUP) == []
    finally:
        signal.signal(signal.SIGHUP, before)
