"""Machines with certificates of one authority, and workers on them that see each other."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.certificate_folders import give, tell_revoked
from tests.transports import Recorder, What
from tests.zenoh_workers import NUM_WORKERS, RUN, wait_until

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.net.address import Address
from edgegossip.net.identity.certificates import issue, make_authority
from edgegossip.net.identity.revocation import revoke
from edgegossip.net.identity.tls import TLS
from edgegossip.net.transport import Incarnation
from edgegossip.net.zenoh.probe import probe
from edgegossip.net.zenoh.router import Router
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.launch import free_ports

LEASE = 2.0
"""Sessions that are opened anew at once may miss each other, for two of these."""
REFUSED = "it rejects our certificate"
_serials = itertools.count()


class Member:
    """A worker's open transport, and who is there according to it."""

    def __init__(self, rank: Rank, transport: ZenohTransport) -> None:
        self.rank = rank
        self.transport = transport
        self.events = Recorder()
        self.here: set[Rank] = set()
        transport.open(self.events)

    def settle(self, *ranks: Rank) -> None:
        """Wait until `ranks` are there, and no others."""
        while not self.events.is_empty or self.here != {*ranks}:
            self.note(self.events.next())

    def note(self, event: What) -> None:
        kind, rank, what = event
        if kind == "refused":
            assert "a sign of life in run" in what
        elif kind not in ("received", "interrupted"):
            (self.here.add if kind == "appeared" else self.here.remove)(rank)

    def hears(self, frame: What, seconds: Seconds) -> bool:
        """Whether it is told of `frame` before nothing has happened for so long."""
        try:
            while (event := self.events.next(seconds)) != frame:
                self.note(event)
        except queue.Empty:
            return False
        return True


class Machines:
    """Machines with certificates of one authority, and transports on them.

    Args:
        folder: Empty; for the folders of all.
        opened: Closes the transports in the end.
    """

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.authority = folder / "authority"
        self.endpoints = [f"tls/127.0.0.1:{port}" for port in free_ports(NUM_WORKERS)]
        self._folder = folder
        self._opened = opened
        make_authority(self.authority)
        issue(self.authority, [*range(NUM_WORKERS), None])

    def folder(self, rank: Rank | None) -> Path:
        folder = self._folder / str(rank)
        return folder if folder.exists() else give(self.authority, folder, rank)

    def transport(
        self,
        rank: Rank,
        connect: Sequence[Rank] | str | None = None,
        run: str = RUN,
        banned: Sequence[int] = (),
        folder: Path | None = None,
        incarnation: Incarnation | None = None,
    ) -> ZenohTransport:
        """Worker `rank`'s, which calls those of lower rank, or given ones, or a router."""
        if isinstance(connect, str):
            address = Address(connect=(connect,))
        else:
            called = range(rank) if connect is None else connect
            address = Address(
                listen=(self.endpoints[rank],),
                connect=tuple(self.endpoints[other] for other in called),
            )
        transport = ZenohTransport(
            run=run,
            rank=rank,
            num_workers=NUM_WORKERS,
            address=address,
            incarnation=100 + rank if incarnation is None else incarnation,
            security=TLS.from_folder(folder or self.folder(rank), rank, banned),
            lease=LEASE,
        )
        self._opened.callback(transport.close)
        return transport

    def open(self, rank: Rank, *where: Any, **how: Any) -> Member:  # noqa: ANN401
        """As `transport`, which it opens."""
        return Member(rank, self.transport(rank, *where, **how))

    def open_all(self, connect: str | None = None) -> list[Member]:
        members = [self.open(rank, connect) for rank in range(NUM_WORKERS)]
        meet(*members)
        return members

    def router(self, run_names: Sequence[str] = ()) -> str:
        endpoint = f"tls/127.0.0.1:{free_ports(1)[0]}"
        self._opened.enter_context(
            Router(
                Address(listen=(endpoint,)),
                num_workers=NUM_WORKERS,
                security=TLS.from_folder(self.folder(None), None),
                run_names=run_names,
            )
        )
        return endpoint

    def revoke(self, *ranks: Rank, tell: Sequence[Rank | None] = ()) -> None:
        """Revoke all certificates of `ranks`, and give the list to the machines of `tell`."""
        revoke(self.authority, ranks)
        tell_revoked(self.authority, *(self.folder(rank) for rank in tell))


def meet(*members: Member) -> None:
    """Wait until all of `members` see each other, and nobody else."""
    for member in members:
        member.settle(*(other.rank for other in members if other is not member))


def exchange(a: Member, b: Member) -> None:
    """Send both ways, and wait until it has arrived.

    Of sessions that are opened anew at about the same time, one may see the other's old one for
    a moment: what it sends then is lost.
    """
    for sender, receiver in ((a, b), (b, a)):
        hello = f"hello {next(_serials)}".encode()
        for _ in range(20):
            sender.transport.send(receiver.rank, [hello])
            if receiver.hears(("received", sender.rank, hello), seconds=0.5):
                break
        else:
            raise AssertionError(f"worker {receiver.rank} hears nothing of {sender.rank}")


def wait_for_renewals(caplog: pytest.LogCaptureFixture, number: int) -> None:
    """Wait until so many sessions have been opened anew, all in all."""
    wait_until(lambda: sum("have changed" in each for each in caplog.messages) == number, 30)


def is_refused(endpoint: str, folder: Path, rank: Rank) -> bool:
    """Whether a listener refuses the certificate in `folder`."""
    with pytest.raises(NetworkError, match=REFUSED):
        probe(endpoint, TLS.from_folder(folder, rank))
    return True
