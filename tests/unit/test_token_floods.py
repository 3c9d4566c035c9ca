"""Signs of life without end: they cost the others little."""

from __future__ import annotations

import threading
from typing import cast

import pytest
import zenoh
from tests.transports import OverZenoh, Recorder, What
from tests.unit.test_zenoh_transport import stranger

from edgegossip.net.zenoh.links import Links
from edgegossip.net.zenoh.peer import ZenohPeer
from edgegossip.net.zenoh.twins import Claim


class _Silent:
    """A publisher that nobody hears."""

    id = None

    def put(self, *what: object, **how: object) -> None: ...


REFUSED = ("refused", 1, "more signs of life than any honest worker gives")
BURST = 64


def drain(events: Recorder) -> list[What]:
    found = []
    while not events.is_empty:
        found.append(events.next())
    return found


def test_of_many_processes_of_one_rank_few_are_reported_and_none_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zenoh.SourceInfo", lambda *parts: parts)
    events, num_threads = Recorder(), threading.active_count()
    peer = ZenohPeer(1, events, 1000, Links(), settle=0.0)
    peer.publisher = cast("zenoh.Publisher", _Silent())
    for incarnation in range(5000):
        peer.appear(incarnation)
        peer.disappear(incarnation)
    told = drain(events)
    assert BURST <= sum(kind == "appeared" for kind, *_ in told) < 2 * BURST
    assert told.count(REFUSED) > 5000 - 2 * BURST
    assert peer.incarnation is None
    assert threading.active_count() < num_threads + BURST


def test_claims_count_as_signs_of_life() -> None:
    events = Recorder()
    peer = ZenohPeer(1, events, 1000, Links(), settle=0.0)
    for number in range(5000):
        peer.heard(Claim(number, number + 1, 7))
    told = drain(events)
    assert {*told} == {REFUSED}
    assert len(told) > 5000 - 2 * BURST


def test_a_flood_over_zenoh_is_limited_and_disturbs_no_other_worker() -> None:
    network = OverZenoh()
    a, _, c = network.open_all()
    try:
        with stranger(connect=network.endpoints[0]) as session:
            keys = [f"edgegossip/test/alive/1/{number}" for number in range(500)]
            tokens = [session.liveliness().declare_token(key) for key in keys]
            assert a.events.until(REFUSED)
            c.send(0, b"hello")
            told = a.events.until(("received", 2, b"hello"))
            assert sum(kind == "appeared" for kind, *_ in told) < 2 * BURST
            del tokens
    finally:
        network.close()
