"""Features of zenoh alone: strangers, addresses, routers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest
import zenoh
from tests.tiers import thorough
from tests.transports import End, InLocalNetwork, OverZenoh, Recorder

from edgegossip.contract.errors import NetworkError
from edgegossip.net.address import Address
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.launch import free_ports


@pytest.fixture
def network() -> Iterator[OverZenoh]:
    network = OverZenoh()
    yield network
    network.close()


def stranger(mode: str = "peer", **endpoints: str) -> zenoh.Session:
    """A session that is none of ours."""
    config = zenoh.Config()
    config.insert_json5("mode", json.dumps(mode))
    config.insert_json5("scouting/multicast/enabled", "false")
    config.insert_json5("open/return_conditions/connect_scouted", "false")
    for name in ("listen", "connect"):
        given = [endpoints[name]] if name in endpoints else []
        config.insert_json5(f"{name}/endpoints", json.dumps(given))
    return zenoh.open(config)


@pytest.mark.parametrize(
    ("key", "payload", "rank", "reason"),
    [
        ("data/0/1", b"garbage", 1, "no piece of a frame"),
        ("data/0/1", b"0" * 100, 1, "a piece without those before it"),
        ("data/0/1", bytes([1] * 8 + [0] * 32), 1, "a piece that does not fit its frame"),
        ("data/0/7", b"garbage", None, "a piece from no other worker of the run"),
        ("data/0/0", b"garbage", None, "a piece from no other worker of the run"),
        ("data/*/1", b"garbage", None, "a piece from no other worker of the run"),
        ("data/0/*", b"garbage", None, "a piece from no other worker of the run"),
        ("data/0/one", b"garbage", None, "a piece from no other worker of the run"),
    ],
    ids=str,
)
def test_garbage_is_refused_and_harms_nobody(
    network: OverZenoh, key: str, payload: bytes, rank: int | None, reason: str
) -> None:
    a, b, _ = network.open_all()
    with stranger(connect=network.endpoints[0]) as session:
        publisher = session.declare_publisher(f"edgegossip/test/{key}")
        while not publisher.matching_status.matching:  # type: ignore[attr-defined]
            time.sleep(0.001)
        publisher.put(payload)
        assert a.events.next() == ("refused", rank, reason)
    b.send(0, b"hello")
    assert a.events.next() == ("received", 1, b"hello")


def test_nothing_at_all_is_harmless(network: OverZenoh) -> None:
    a, b, _ = network.open_all()
    with stranger(connect=network.endpoints[0]) as session:
        publisher = session.declare_publisher("edgegossip/test/data/0/1")
        while not publisher.matching_status.matching:  # type: ignore[attr-defined]
            time.sleep(0.001)
        publisher.delete()
        publisher.put(b"")
    b.send(0, b"hello")
    assert a.events.next() == ("received", 1, b"hello")
    b.transport.close()
    assert a.events.next() == ("disappeared", 1, 101)


@pytest.mark.parametrize("token", ["9/7", "one/7", "1/seven", "-1/7", "²/7"])
def test_tokens_of_nobody_are_refused(network: OverZenoh, token: str) -> None:
    a, b, _ = network.open_all()
    with stranger(connect=network.endpoints[0]) as session:
        declared = session.liveliness().declare_token(f"edgegossip/test/alive/{token}")
        reason = "a sign of life from no other worker of the run"
        assert a.events.next() == ("refused", None, reason)
        declared.undeclare()  # type: ignore[no-untyped-call]
    b.send(0, b"hello")
    assert a.events.until(("received", 1, b"hello"))


@thorough
def test_the_youngest_process_speaks_for_a_rank_and_gives_it_back(network: OverZenoh) -> None:
    a, b, _ = network.open_all()
    with stranger(connect=network.endpoints[0]) as session:
        token = session.liveliness().declare_token("edgegossip/test/alive/1/7")
        assert a.events.take(2) == [("disappeared", 1, 101), ("appeared", 1, 7)]
        assert b.events.is_empty
        token.undeclare()  # type: ignore[no-untyped-call]
        assert a.events.take(2) == [("disappeared", 1, 7), ("appeared", 1, 101)]
    a.send(1, b"hello")
    assert b.events.until(("received", 0, b"hello"))


@thorough
def test_what_is_left_of_a_process_ends_unnoticed_once_it_has_a_successor(
    network: OverZenoh,
) -> None:
    a, _, _ = network.open_all()
    with stranger(connect=network.endpoints[0]) as session:
        token = session.liveliness().declare_token("edgegossip/test/alive/1/7")
        a.events.take(2)
        network.opened[1].close()
        token.undeclare()  # type: ignore[no-untyped-call]
        assert a.events.next() == ("disappeared", 1, 7)


def test_workers_of_another_run_are_named_and_have_no_part(network: OverZenoh) -> None:
    a, b, _ = network.open_all()
    other = ZenohTransport(
        run="another",
        rank=1,
        num_workers=3,
        address=Address(listen=("tcp/127.0.0.1:0",), connect=(network.endpoints[0],)),
    )
    events = Recorder()
    other.open(events)
    other.send(0, [b"wrong run"])
    what = "a sign of life in run {!r}, whose recipe or --name differs from this run, {!r}"
    assert a.events.next() == ("refused", 1, what.format("another", "test"))
    refused = {events.next() for _ in range(3)}
    assert refused == {("refused", rank, what.format("test", "another")) for rank in range(3)}
    b.send(0, b"hello")
    assert a.events.next() == ("received", 1, b"hello")
    other.close()
    assert a.events.is_empty
    assert events.is_empty


def test_it_is_enough_to_know_one(network: OverZenoh) -> None:
    a, b = network.open(0), network.open(1)
    a.events.next(), b.events.next()
    address = Address(listen=("tcp/127.0.0.1:0",), connect=(network.endpoints[0],))
    c = open_at(network, 2, address)
    assert sorted(c.events.take(2)) == [("appeared", 0, 100), ("appeared", 1, 101)]
    assert a.events.next() == b.events.next() == ("appeared", 2, 102)
    c.send(1, b"hello")
    assert b.events.next() == ("received", 2, b"hello")


def test_one_that_is_called_may_start_later(network: OverZenoh) -> None:
    b = network.open(1)
    a = network.open(0)
    assert b.events.next() == ("appeared", 0, 100)
    assert a.events.next() == ("appeared", 1, 101)


def open_at(network: OverZenoh, rank: int, address: Address) -> End:
    transport = ZenohTransport(
        run="test", rank=rank, num_workers=3, address=address, incarnation=100 + rank
    )
    end = End(transport, Recorder())
    network.opened.append(transport)
    transport.open(end.events)
    return end


def check_exchange(a: End, b: End) -> None:
    """`a` is of rank 0, `b` of rank 1, and they see nobody else."""
    assert a.events.next() == ("appeared", 1, 101)
    assert b.events.next() == ("appeared", 0, 100)
    a.send(1, bytes(1_000_000))
    b.send(0, b"hello")
    assert b.events.next() == ("received", 0, bytes(1_000_000))
    assert a.events.next() == ("received", 1, b"hello")
    a.transport.close()
    assert b.events.next() == ("disappeared", 0, 100)


@pytest.mark.slow
def test_a_router_joins_those_who_cannot_be_called(network: OverZenoh) -> None:
    router = f"tcp/127.0.0.1:{free_ports(1)[0]}"
    with stranger("router", listen=router):
        ends = [open_at(network, rank, Address(connect=(router,))) for rank in range(2)]
        check_exchange(*ends)
        network.close()


@pytest.mark.slow
def test_routers_join_networks(network: OverZenoh) -> None:
    routers = [f"tcp/127.0.0.1:{port}" for port in free_ports(2)]
    with (
        stranger("router", listen=routers[0]),
        stranger("router", listen=routers[1], connect=routers[0]),
    ):
        ends = [
            open_at(
                network, rank, Address(listen=("tcp/127.0.0.1:0",), connect=(routers[rank],))
            )
            for rank in range(2)
        ]
        check_exchange(*ends)
        network.close()


def test_a_worker_brings_others_to_one_that_cannot_be_called(network: OverZenoh) -> None:
    a, b = network.open(0), network.open(1)
    a.events.next(), b.events.next()
    c = open_at(network, 2, Address(connect=(network.endpoints[1],)))
    assert a.events.next() == ("appeared", 2, 102)
    assert sorted(c.events.take(2)) == [("appeared", 0, 100), ("appeared", 1, 101)]
    a.send(2, b"hello")
    c.send(0, b"hello")
    assert c.events.next() == ("received", 0, b"hello")
    assert a.events.next() == ("received", 2, b"hello")
    b.transport.close()


def test_an_address_that_is_taken_or_not_of_this_machine_is_an_error(
    network: OverZenoh,
) -> None:
    network.open(0)
    for endpoint in (network.endpoints[0], "tcp/192.0.2.1:7447"):
        transport = ZenohTransport(
            run="test",
            rank=1,
            num_workers=3,
            address=Address(listen=(endpoint,)),
            insecure=True,
        )
        with pytest.raises(NetworkError, match=f"cannot listen at {endpoint}"):
            transport.open(Recorder())
        transport.close()


@pytest.mark.parametrize("run", ["", "a/b", "*", "a b", "$*"])
def test_names_of_runs_are_plain(run: str) -> None:
    with pytest.raises(ValueError, match="run may have letters"):
        ZenohTransport(run=run, rank=0, num_workers=1, address=Address(multicast=True))


def test_beyond_this_machine_it_needs_certificates_or_to_be_told() -> None:
    with pytest.raises(NetworkError, match="reaches beyond this machine"):
        ZenohTransport(run="test", rank=0, num_workers=1, address=Address(multicast=True))


def test_ranks_are_of_the_run() -> None:
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.2, got 3"):
        ZenohTransport(run="test", rank=3, num_workers=3, address=Address(multicast=True))


def carries_multicast() -> bool:
    """Whether what this machine sends to a group comes back to those of it who listen."""
    group = socket.inet_aton("224.0.0.224") + socket.inet_aton("0.0.0.0")
    with socket.socket(type=socket.SOCK_DGRAM) as ours:
        ours.bind(("", 0))
        ours.settimeout(0.5)
        try:
            ours.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
            ours.sendto(b"heard", ("224.0.0.224", ours.getsockname()[1]))
            return ours.recv(5) == b"heard"
        except OSError:
            return False


def test_workers_find_each_other_in_the_local_network() -> None:
    if not carries_multicast():
        pytest.skip("no network here carries multicast")
    network = InLocalNetwork(2)
    try:
        a, b = network.open_all()
        b.send(0, b"hello")
        assert a.events.next() == ("received", 1, b"hello")
    finally:
        network.close()
