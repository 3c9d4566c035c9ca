"""Where workers listen and whom they call."""

from __future__ import annotations

import pytest

from edgegossip.net.address import Address, parse


@pytest.mark.parametrize(
    ("endpoint", "is_loopback"),
    [
        ("tcp/127.0.0.1:7447", True),
        ("tcp/127.3.2.1:7447", True),
        ("tls/localhost:7447", True),
        ("tcp/[::1]:7447", True),
        ("tcp/0.0.0.0:7447", False),
        ("tcp/[::]:7447", False),
        ("tls/192.168.0.7:7447", False),
        ("tls/worker-3.example.org:7447", False),
        ("tcp/localhost.example.org:7447", False),
    ],
)
def test_only_loopback_is_loopback(endpoint: str, is_loopback: bool) -> None:
    assert Address(listen=(endpoint,)).is_loopback == is_loopback
    assert Address(connect=(endpoint,)).is_loopback == is_loopback


@pytest.mark.parametrize(
    ("endpoint", "parsed"),
    [
        ("tcp/10.0.0.3:7447", ("tcp", "10.0.0.3", 7447)),
        ("tls/pi.local:65535", ("tls", "pi.local", 65535)),
        ("tls/[fe80::1%eth0]:1", ("tls", "fe80::1%eth0", 1)),
    ],
)
def test_endpoints_are_taken_apart(endpoint: str, parsed: tuple[str, str, int]) -> None:
    assert parse("connect", endpoint) == parsed


def test_one_endpoint_elsewhere_is_enough_to_be_reachable() -> None:
    address = Address(listen=("tcp/127.0.0.1:7447", "tcp/10.0.0.7:7447"))
    assert not address.is_loopback


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "7447",
        "127.0.0.1:7447",
        "udp/127.0.0.1:7447",
        "tcp/127.0.0.1",
        "tcp/:7447",
        "tcp/::1:7447",
        "tcp/127.0.0.1:7447#iface=eth0",
        "tcp/127.0.0.1:7447\n",
        "tcp/a b:7447",
    ],
)
def test_what_is_no_endpoint_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"listen has .*; an endpoint is tcp/HOST:PORT or tls"):
        Address(listen=(endpoint,))
    with pytest.raises(ValueError, match=r"connect has .*; an endpoint is tcp/HOST:PORT"):
        Address(connect=(endpoint,))


def test_ports_have_16_bits_and_0_is_for_listening() -> None:
    Address(listen=("tcp/127.0.0.1:0",))
    with pytest.raises(ValueError, match=r"port must be in 1\.\.65535"):
        Address(connect=("tcp/127.0.0.1:0",))
    with pytest.raises(ValueError, match=r"port must be in 0\.\.65535"):
        Address(listen=("tcp/127.0.0.1:65536",))


def test_brackets_hold_ipv6() -> None:
    with pytest.raises(ValueError, match="'1:2' is not an IPv6 address"):
        Address(listen=("tcp/[1:2]:7447",))


def test_there_must_be_some_way_to_others() -> None:
    with pytest.raises(ValueError, match="no way to any other worker"):
        Address()
    assert Address(multicast=True).is_loopback
