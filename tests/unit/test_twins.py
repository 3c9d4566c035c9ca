"""Two processes of one rank: the one that came later ends, and the first goes on."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import zenoh
from tests.algorithms import NUM_WORKERS
from tests.hosts import EPOCHS, Slow, make_host
from tests.tiers import thorough
from tests.transports import Recorder
from tests.zenoh_workers import wait_until

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.address import Address
from edgegossip.net.transport import TWIN
from edgegossip.net.zenoh.links import Links, new_session_id
from edgegossip.net.zenoh.peer import ZenohPeer
from edgegossip.net.zenoh.pieces import split
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.net.zenoh.twins import Claim, Twins
from edgegossip.real.launch import free_ports

RANK = 2


class Process:
    """A process of `RANK` whose tokens reach the other when the test says so."""

    def __init__(self, incarnation: int, age: Seconds) -> None:
        self.incarnation = incarnation
        self.now = 0.0
        self.claims: list[str] = []
        self.ends: list[tuple[Rank, str]] = []
        refused = lambda rank, reason: self.ends.append((rank, reason))  # noqa: E731
        self.twins = Twins(RANK, incarnation, refused, lambda: self.now)
        self.twins.enter(self.claims.append)
        self.now = age

    def saw(self, other: Process) -> None:
        self.twins.saw(other.incarnation)
        wait_until(lambda: self.claims)

    def heard(self, other: Process) -> None:
        for text in other.claims:
            claim = Claim.parse(text)
            assert claim is not None
            self.twins.heard(claim)


ORDERS = [*itertools.permutations(["old sees", "young sees", "old hears", "young hears"])]


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_the_younger_ends_and_the_older_does_not(
    order: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    old, young = Process(7, age=40.0), Process(3, age=0.1)
    for step in order * 2:  # a claim that has not been made yet is heard later
        who, does = step.split()
        one, other = (old, young) if who == "old" else (young, old)
        (one.saw if does == "sees" else one.heard)(other)
    assert young.ends == [(RANK, TWIN)]
    assert old.ends == []
    assert caplog.text.count("another process is worker 2 too; it was started later") == 1


def test_of_two_of_one_age_exactly_one_ends() -> None:
    one, other = Process(3, age=1.0), Process(7, age=1.0)
    one.saw(other)
    other.saw(one)
    one.heard(other)
    other.heard(one)
    assert [*one.ends, *other.ends] == [(RANK, TWIN)]


def test_a_token_that_is_left_of_a_former_process_ends_nobody() -> None:
    former, young = Process(7, age=40.0), Process(3, age=0.1)
    even_before = Process(9, age=50.0)
    former.saw(even_before)
    young.saw(former)
    young.heard(former)  # what it claimed against its own predecessor
    assert young.ends == []


def test_a_process_that_leaves_makes_room_for_its_successor() -> None:
    former, young = Process(7, age=40.0), Process(3, age=0.1)
    former.twins.leave()
    young.saw(former)
    former.twins.saw(young.incarnation)
    former.heard(young)
    young.heard(former)
    assert (former.claims, former.ends, young.ends) == ([], [], [])


@pytest.mark.parametrize("text", ["", "7", "7-3", "7-3-x", "-7-3-1", "7-3-1-1", "7-3-1 "])
def test_other_texts_are_no_claims(text: str) -> None:
    assert Claim.parse(text) is None


# As another worker sees them.


def told(
    *claims: Claim, settle: Seconds = 60.0, held: bytes = b""
) -> tuple[ZenohPeer, Recorder]:
    """Let process 7 and then 3 appear; return what the listener is told after the first."""
    events = Recorder()
    peer = ZenohPeer(RANK, events, 1000, Links(), settle)
    peer.publisher = cast("zenoh.Publisher", None)
    peer.appear(7)
    assert events.next() == ("appeared", RANK, 7)
    peer.appear(3)
    for claim in claims:
        peer.heard(claim)
    if held:
        [piece] = split(0, [held])
        peer.take(piece, new_session_id(RANK, 3))
    return peer, events


OLD, YOUNG = Claim(7, 3, 40_000), Claim(3, 7, 100)


def test_while_an_older_process_may_claim_the_rank_it_keeps_it() -> None:
    for claims in ((), (OLD,), (OLD, YOUNG), (YOUNG, OLD)):
        _, events = told(*claims)
        assert events.is_empty


def test_after_a_while_the_younger_process_speaks_and_nothing_that_it_sent_is_lost() -> None:
    _, events = told(settle=0.05, held=b"hello")
    assert events.take(3) == [
        ("disappeared", RANK, 7),
        ("appeared", RANK, 3),
        ("received", RANK, b"hello"),
    ]


def test_a_process_that_has_to_end_is_not_heard_even_after_a_while() -> None:
    _, events = told(OLD, YOUNG, settle=0.01, held=b"hello")
    time.sleep(0.05)
    assert events.is_empty


def test_a_claim_that_comes_late_gives_the_rank_back() -> None:
    peer, events = told(settle=0.01)
    events.take(2)
    peer.heard(YOUNG)
    peer.heard(OLD)
    assert events.take(2) == [("disappeared", RANK, 3), ("appeared", RANK, 7)]


# Over zenoh.


class Sessions:
    """Transports of one machine, any number of each rank."""

    def __init__(self) -> None:
        self.endpoint = f"tcp/127.0.0.1:{free_ports(1)[0]}"
        self.opened: list[ZenohTransport] = []

    def transport(self, rank: Rank) -> ZenohTransport:
        listen = self.endpoint if rank == 0 else "tcp/127.0.0.1:0"
        connect = () if rank == 0 else (self.endpoint,)
        address = Address(listen=(listen,), connect=connect)
        transport = ZenohTransport(
            run="twins", rank=rank, num_workers=NUM_WORKERS, address=address
        )
        self.opened.append(transport)
        return transport


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    sessions = Sessions()
    yield sessions
    for transport in sessions.opened:
        transport.close()


def test_over_zenoh_the_later_process_is_told_to_end(sessions: Sessions) -> None:
    events = [Recorder() for _ in range(3)]
    others, first, second = (sessions.transport(rank) for rank in (0, RANK, RANK))
    others.open(events[0])
    first.open(events[1])
    events[1].until(("appeared", 0, others.incarnation))
    events[0].until(("appeared", RANK, first.incarnation))
    first._twins._began -= 60.0  # a head start of milliseconds decides nothing
    second.open(events[2])
    assert events[2].until(("refused", RANK, TWIN))
    second.close()
    others.send(RANK, [b"hello"])
    assert events[1].next() == ("received", 0, b"hello")
    assert events[0].is_empty  # the others have never turned to it


@thorough
def test_the_second_process_of_a_worker_fails_and_the_run_ends_as_without_it(
    sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    network: Any = sessions
    algorithm = replace(EPOCHS, num_rounds=150)
    hosts = [
        make_host(algorithm, rank, network, Slow(rank, 0.01)) for rank in range(NUM_WORKERS)
    ]
    reasons: dict[int, str] = {}

    def run(rank: Rank) -> None:
        reasons[rank] = hosts[rank].run()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_WORKERS)]
    for thread in threads:
        thread.start()
    wait_until(lambda: hosts[RANK].state.round >= 10, 20)
    twin = make_host(algorithm, RANK, network)
    with pytest.raises(NetworkError, match="another process is worker 2, and was in the run"):
        twin.run()
    assert hosts[RANK].state.round < 150
    for thread in threads:
        thread.join(60)
    assert reasons == dict.fromkeys(range(NUM_WORKERS), "finished")
    assert [host.state.round for host in hosts] == [150] * NUM_WORKERS
    assert "another process is worker 2 too" in caplog.text
    assert "started again" not in caplog.text
