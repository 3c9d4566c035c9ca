"""Options for a worker's connection to the others. Importing this module imports torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import tyro

from edgegossip.contract.protocol import Seconds
from edgegossip.net.address import Address
from edgegossip.net.zenoh.session import LEASE
from edgegossip.real.join import Connection


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Options for the connection of one worker.

    Args:
        listen: Endpoint at which other workers reach this one, e.g. tls/0.0.0.0:7447; port 0
            chooses a free port. With --tls, a worker may leave it out only behind a router.
        connect: Endpoint of another worker or a router, e.g. tls/server:7447.
        multicast: Also look for workers on the local network.
        tls: Folder with ca.pem and this rank's certificate; see `edgegossip certs`. Changes to
            these files and to revoked.pem take effect at once.
        ban: Serial number of a further certificate to reject; repeatable.
        insecure: Allow plain links beyond this machine; anybody can then read messages and
            join.
        lease: Seconds after which a link is closed if it is silent or cannot send a piece of
            256 kB; slow links need more.
    """

    listen: tuple[str, ...] = ()
    connect: tuple[str, ...] = ()
    multicast: bool = False
    tls: Path | None = None
    ban: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    insecure: bool = False
    lease: Seconds = LEASE

    def connection(self) -> Connection:
        """The connection.

        Raises:
            ValueError: If an option is malformed, or there is no way to any other worker.
        """
        return Connection(
            address=Address(listen=self.listen, connect=self.connect, multicast=self.multicast),
            tls=self.tls,
            ban=self.ban,
            insecure=self.insecure,
            lease=self.lease,
        )

    def of_the_connection(self) -> list[str]:
        """The options of the connection that differ from their defaults."""
        ours = fields(ConnectionOptions)
        return [f"--{each.name}" for each in ours if getattr(self, each.name) != each.default]
