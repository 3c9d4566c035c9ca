"""Which bytes a worker sends and receives beyond its machine, so that its monitor may know."""

from __future__ import annotations

from typing import Any

import pytest
from tests.link_events import Session
from tests.transports import OverZenoh

from edgegossip.net.zenoh import links as reach_module
from edgegossip.net.zenoh.links import Links

AWAY = ("tcp/10.0.0.1:40000", "tcp/10.0.0.2:7447")
LOOPBACK = ("tcp/127.0.0.1:40000", "tcp/127.0.0.1:7447")
OWN_ADDRESS = ("tls/[fd00::1]:40000", "tls/[fd00::1]:7447")


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def reach(session: Session) -> Links:
    reach = Links()
    reach.follow(session)  # type: ignore[arg-type]
    return reach


@pytest.mark.parametrize(
    ("ends", "leaves"), [(AWAY, True), (LOOPBACK, False), (OWN_ADDRESS, False)], ids=str
)
def test_only_links_between_two_machines_leave_one(
    session: Session, reach: Links, ends: tuple[str, str], leaves: bool
) -> None:
    session.open("a", ends)
    assert reach.leave_machine("a") is leaves


def test_each_peer_is_known_by_its_own_link(session: Session, reach: Links) -> None:
    session.open("here", LOOPBACK)
    session.open("there", AWAY)
    assert not reach.leave_machine("here")
    assert reach.leave_machine("there")


def test_whoever_has_no_link_is_reached_by_one_that_leaves_if_there_is_any(
    session: Session, reach: Links
) -> None:
    assert not reach.leave_machine(None)
    session.open("here", LOOPBACK)
    assert not reach.leave_machine("behind a router")
    session.open("there", AWAY)
    assert reach.leave_machine("behind a router")
    assert reach.leave_machine(None)


def test_links_that_are_closed_count_no_more(session: Session, reach: Links) -> None:
    session.open("a", AWAY)
    session.open("a", (AWAY[1], AWAY[0]))
    session.close("a", AWAY)
    assert reach.leave_machine("a")
    session.close("a", (AWAY[1], AWAY[0]))
    session.close("a", AWAY)
    assert not reach.leave_machine("a")


@pytest.fixture
def network() -> Any:  # noqa: ANN401
    network = OverZenoh(2)
    yield network
    network.close()


@pytest.mark.parametrize("leaves", [False, True])
def test_what_leaves_the_machine_is_counted_at_both_ends(
    network: OverZenoh, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(reach_module, "_is_within", lambda *_: not leaves)
    a, b = network.open_all()
    for sender, receiver in ((0, 1), (1, 0)):
        (a, b)[sender].send(receiver, bytes(300_000))
        assert (a, b)[receiver].events.next()[0] == "received"
    sent, received = (each.network_bytes for each in network.opened)  # type: ignore[attr-defined]
    assert sent == received
    # The headers of pieces, whose number depends on the path, are less than a hundredth.
    assert 2 * 300_000 * leaves <= sent <= 2 * 303_000 * leaves


def test_a_transport_that_is_not_open_has_carried_nothing(network: OverZenoh) -> None:
    assert network.transport(0, 100).network_bytes == 0  # type: ignore[attr-defined]
