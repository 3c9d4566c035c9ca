"""Abilities of the in-memory network alone: to be cut, mended, and to lose a worker at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.transports import InMemory

from edgegossip.contract.errors import NetworkError


@pytest.fixture
def network() -> Iterator[InMemory]:
    network = InMemory()
    yield network
    network.close()


def test_a_cut_parts_two_and_nobody_else(network: InMemory) -> None:
    a, b, c = network.open_all()
    network.network.cut(0, 1)
    assert a.events.next() == ("disappeared", 1, 101)
    assert b.events.next() == ("disappeared", 0, 100)
    a.send(1, b"lost")
    b.send(2, b"hello")
    assert c.events.next() == ("received", 1, b"hello")
    assert b.events.is_empty


def test_after_mending_the_same_processes_meet_again(network: InMemory) -> None:
    a, b, _ = network.open_all()
    network.network.cut(0, 1)
    network.network.cut(1, 0)
    network.network.mend(1, 0)
    network.network.mend(1, 0)
    assert a.events.take(2) == [("disappeared", 1, 101), ("appeared", 1, 101)]
    a.send(1, b"hello")
    assert b.events.take(3)[2] == ("received", 0, b"hello")
    assert a.events.is_empty


def test_a_killed_worker_hears_nothing_and_is_heard_no_more(network: InMemory) -> None:
    a, b, _ = network.open_all()
    network.network.kill(1)
    a.send(1, b"lost")
    b.send(0, b"lost")
    assert a.events.next() == ("disappeared", 1, 101)
    b.transport.close()
    assert a.events.is_empty
    assert b.events.is_empty
    network.open(1, incarnation=7)
    assert a.events.next() == ("appeared", 1, 7)


def test_whoever_comes_while_the_way_is_cut_appears_when_it_is_mended(
    network: InMemory,
) -> None:
    network.network.cut(0, 1)
    a, b = network.open(0), network.open(1)
    assert a.events.is_empty
    network.network.mend(0, 1)
    assert a.events.next() == ("appeared", 1, 101)
    assert b.events.next() == ("appeared", 0, 100)


def test_a_rank_is_taken_once(network: InMemory) -> None:
    network.open(0)
    with pytest.raises(NetworkError, match="rank 0 is taken"):
        network.network.transport(0).open(network.open(1).events)


def test_every_transport_of_a_rank_has_another_incarnation(network: InMemory) -> None:
    first, second = (network.network.transport(0).incarnation for _ in range(2))
    assert first != second
