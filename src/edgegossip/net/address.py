"""Addresses: where a worker listens, and which peers it connects to."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

# IPv6 addresses are in brackets, link-local ones with the link's name: [fe80::1%eth0].
_ENDPOINT = re.compile(
    r"(?P<protocol>tcp|tls)/(?P<host>\[[0-9a-fA-F:.]+(%[\w.-]+)?\]|[\w.-]+):(?P<port>\d+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Endpoints at which a worker listens, and to which it connects.

    Each worker must be linked to a worker that other workers reach; workers learn the remaining
    addresses from each other. With certificates, a worker that does not listen reaches only the
    worker to which it connects, or all through a router. An endpoint is `tcp/HOST:PORT` or
    `tls/HOST:PORT`.

    Args:
        listen: Endpoints of this machine to listen at. Port 0 chooses a free port, which suits
            workers to which no other worker needs to connect.
        connect: Endpoints of other workers, or routers, to try until they answer.
        multicast: Whether to also look for workers on the local network.

    Raises:
        ValueError: If an endpoint is malformed, or if neither an endpoint nor multicast is
            given.

    >>> Address(listen=("tcp/127.0.0.1:7447",)).is_loopback
    True
    >>> Address(listen=("7447",))
    Traceback (most recent call last):
        ...
    ValueError: listen has '7447'; an endpoint is tcp/HOST:PORT or tls/HOST:PORT, such as \
'tcp/192.168.0.7:7447'
    """

    listen: tuple[str, ...] = ()
    connect: tuple[str, ...] = ()
    multicast: bool = False

    def __post_init__(self) -> None:
        if not (self.listen or self.connect or self.multicast):
            raise ValueError(
                "no way to any other worker; give an endpoint to listen at (--listen), one to "
                "connect to (--connect), or --multicast"
            )
        for endpoint in self.listen:
            parse("listen", endpoint, lowest_port=0)
        for endpoint in self.connect:
            parse("connect", endpoint)

    @property
    def is_loopback(self) -> bool:
        """Whether all endpoints are within this machine, regardless of `multicast`."""
        return all(is_loopback(endpoint) for endpoint in (*self.listen, *self.connect))


def parse(name: str, endpoint: str, lowest_port: int = 1) -> tuple[str, str, int]:
    """Split an endpoint into protocol, host and port; errors name the setting `name`.

    Raises:
        ValueError: If `endpoint` is malformed.

    >>> parse("connect", "tls/[::1]:7447")
    ('tls', '::1', 7447)
    """
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        raise ValueError(
            f"{name} has {endpoint!r}; an endpoint is tcp/HOST:PORT or tls/HOST:PORT, such as "
            "'tcp/192.168.0.7:7447'"
        )
    host, port = match["host"], int(match["port"])
    if not lowest_port <= port < 2**16:
        raise ValueError(f"{name} has {endpoint!r}; its port must be in {lowest_port}..65535")
    # The pattern knows only the characters of an IPv6 address, not its form.
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise ValueError(
                f"{name} has {endpoint!r}; {host[1:-1]!r} is not an IPv6 address"
            ) from None
    return match["protocol"], host.strip("[]"), port


def is_loopback(endpoint: str) -> bool:
    """Whether `endpoint` stays within this machine.

    >>> is_loopback("tcp/[::1]:7447"), is_loopback("tcp/10.0.0.1:7447")
    (True, False)
    """
    host = endpoint.split("/", 1)[1].rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may lead anywhere
