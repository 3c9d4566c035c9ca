"""Links that lead to sessions that are over: given up, and called anew."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.link_events import Session
from tests.tiers import thorough
from tests.transports import Recorder

from edgegossip.contract.protocol import Rank
from edgegossip.net.address import Address
from edgegossip.net.zenoh.links import DeadLinks, Links, new_session_id
from edgegossip.net.zenoh.session import open_session, session_settings
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.launch import free_ports

LEASE = 0.2
ENDS = ("tcp/127.0.0.1:40000", "tcp/127.0.0.1:7447")


class Followed:
    """Links of a session that the test makes, on a clock that it sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.links = Links()
        self.dead = DeadLinks(self.links, patience=10.0)
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.begin()

    def begin(self) -> None:
        self.session = Session()
        self.dead.start_over()
        self.links.follow(self.session)  # type: ignore[arg-type]

    def found(self, at: float, absent: list[Rank]) -> Rank | None:
        self.now = at
        return self.dead.find(absent)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Followed:
    return Followed(monkeypatch)


def test_a_link_is_dead_when_its_worker_is_absent_for_too_long(links: Followed) -> None:
    links.session.open(new_session_id(3), ENDS)
    assert links.found(0.0, [3]) is None
    assert links.found(9.0, [3]) is None
    assert links.found(11.0, [3]) == 3


def test_a_worker_that_was_seen_meanwhile_has_its_whole_time_again(links: Followed) -> None:
    links.session.open(new_session_id(3), ENDS)
    assert links.found(0.0, [3]) is None
    assert links.found(9.0, []) is None
    assert links.found(18.0, [3]) is None
    assert links.found(27.0, [3]) is None
    assert links.found(29.0, [3]) == 3


def test_a_link_that_is_closed_and_one_with_a_router_are_not_dead(links: Followed) -> None:
    own = new_session_id(3)
    links.session.open(own, ENDS)
    links.session.open("a" * 32, ENDS)
    links.found(0.0, [3])
    links.session.close(own, ENDS)
    assert links.found(99.0, [0, 1, 2, 3]) is None


def test_the_end_of_one_of_two_links_to_a_process_is_told() -> None:
    links, session, ended = Links(), Session(), list[int]()
    links.follow(session, ended.append)  # type: ignore[arg-type]
    zid = new_session_id(3, 17)
    for session_id, ends in ((zid, ENDS), (zid, ENDS[::-1]), ("a" * 32, ENDS)):
        session.open(session_id, ends)
    session.close("a" * 32, ENDS)  # a router
    assert ended == []
    session.close(zid, ENDS)
    assert ended == [17]
    session.close(zid, ENDS[::-1])  # after the last one, the process is lost
    assert ended == [17]


def test_one_that_stays_mute_is_given_twice_as_long_each_time(links: Followed) -> None:
    links.session.open(new_session_id(3), ENDS)
    times = [0.0, 11.0, 22.0, 31.0, 32.0, 71.0, 72.0, 73.0]
    found = []
    for now in times:
        if links.found(now, [3]) is not None:
            found.append(now)
            links.begin()
            links.session.open(new_session_id(3), ENDS)
            links.dead.find([3])
    assert found == [11.0, 32.0, 73.0]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr("edgegossip.net.zenoh.session._WATCH", 0.02)
    with ExitStack() as stack:
        yield stack


@thorough
def test_a_worker_that_has_reached_nobody_calls_again(opened: ExitStack) -> None:
    endpoint, own = (f"tcp/127.0.0.1:{port}" for port in free_ports(2))
    # All that is left of worker 0's last session.
    address = Address(listen=(endpoint,))
    settings = session_settings(address, LEASE, is_secure=False) | {"id": new_session_id(0)}
    rest = open_session(settings, address, 2)
    opened.callback(rest.close)
    callers: queue.SimpleQueue[str] = queue.SimpleQueue()
    rest.info.declare_link_events_listener(
        lambda event: callers.put(str(event.link.zid)), history=True
    )
    caller = ZenohTransport(
        run="test",
        rank=1,
        num_workers=2,
        address=Address(listen=(own,), connect=(endpoint,)),
        lease=LEASE,
    )
    opened.callback(caller.close)
    caller.open(Recorder())
    seen = {callers.get(timeout=10)}
    while len(seen) == 1:
        seen.add(callers.get(timeout=10))
    assert len(seen) == 2
