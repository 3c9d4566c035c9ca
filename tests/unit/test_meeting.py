"""How many workers a run needs, to begin and to go on, and what is said of those who lack."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from tests.algorithms import NUM_WORKERS
from tests.hosts import EPOCHS, make_host
from tests.parity import SETTINGS

from edgegossip.contract.errors import NetworkError
from edgegossip.net.host.host import Host
from edgegossip.net.host.status import Phase
from edgegossip.net.memory import MemoryNetwork


def host_with(*here: int, **settings: Any) -> Host[Any]:  # noqa: ANN401
    """Worker 0, which some of the others have told that they wait too."""
    host = make_host(EPOCHS, 0, MemoryNetwork(), settings=replace(SETTINGS, **settings))
    for rank in here:
        status = replace(host.peers.status_for(rank, Phase.WAITING, 0.0), life=rank)
        host.peers.appeared(rank, rank)
        host.peers.told(rank, status, 0.0)
    return host


def test_a_run_begins_only_with_as_many_as_it_needs() -> None:
    host_with(1, 2, min_to_begin=3).meeting.conclude()
    with pytest.raises(NetworkError, match=r"3 of the 4 workers .*; workers 3, 4 cannot be"):
        host_with(1, 2, min_to_begin=4).meeting.conclude()


def test_those_who_have_come_to_their_end_count_as_here() -> None:
    host_with(1, min_to_begin=5, ended=(2, 3, 4)).meeting.conclude()
    with pytest.raises(NetworkError, match="worker 1 cannot be reached"):
        host_with(min_to_begin=5, ended=(2, 3, 4)).meeting.conclude()


def test_workers_that_may_have_finished_are_named_as_an_option() -> None:
    with pytest.raises(
        NetworkError, match=r"name those that have finished \(--ended 2 4\), or"
    ):
        host_with(1, 3, min_to_begin=4).meeting.conclude()
    with pytest.raises(NetworkError, match=r"\(--ended 1 2 3 4\)"):
        host_with(min_to_begin=5, ended=(4, 2, 3)).meeting.conclude()


def test_a_run_that_begins_without_some_names_them_and_the_possible_reasons(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host_with(1, 2).meeting.conclude()
    [message] = caplog.messages
    assert message.startswith(
        "beginning without workers 3, 4: absent, not linked to this worker"
    )


def test_a_run_of_fewer_than_it_needs_begins_with_all() -> None:
    host_with(1, 2, 3, 4, min_to_begin=NUM_WORKERS + 1).meeting.conclude()


def test_too_few_for_a_while_end_a_run_and_too_few_for_a_moment_do_not() -> None:
    host = host_with(1, 2, 3, 4, min_workers=4, meet_seconds=10.0)
    meeting, peers = host.meeting, host.peers
    peers.begin()
    peers.lose(1)
    assert not meeting.has_too_few(0.0)  # four are left
    peers.lose(2)
    assert not meeting.has_too_few(5.0)
    assert meeting.ends_at == 15.0
    assert not meeting.has_too_few(14.9)
    peers.find(2)
    assert not meeting.has_too_few(20.0)
    peers.lose(3)
    assert not meeting.has_too_few(21.0)
    assert meeting.shortage is None
    assert meeting.has_too_few(31.0)
    assert meeting.shortage is not None
    assert "fewer than 4 workers were left for 10 s: workers 1, 3 cannot" in meeting.shortage


def test_a_worker_that_waits_says_for_whom_and_whom_it_calls(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = property(lambda self: ("tcp/10.0.0.7:7447",))
    monkeypatch.setattr("edgegossip.net.memory.MemoryTransport.calls", calls)
    caplog.set_level("INFO", "edgegossip.net")
    meeting = host_with(1, 3).meeting
    meeting.start(0.0)
    for now in itertools.chain(range(33), [33.0]):
        meeting.check(float(now))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["waiting for workers 2, 4, calling tcp/10.0.0.7:7447"] * 2
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
