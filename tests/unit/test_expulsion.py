"""Certificates that are revoked, new, or of another run, between real sessions on loopback."""

from __future__ import annotations

import itertools
import json
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.certificate_folders import give, put, tell_revoked
from tests.small_runs import small_run
from tests.tiers import thorough
from tests.transports import Recorder, What, free_ports
from tests.worker_threads import Crew
from tests.zenoh_workers import NUM_WORKERS, RUN, Worker, wait_until

from edgegossip.algorithms.gossip import Gossip
from edgegossip.core.errors import NetworkError
from edgegossip.core.protocol import Rank, Seconds
from edgegossip.core.topology import ring
from edgegossip.deploy.worker import WorkerSettings
from edgegossip.net.address import Address
from edgegossip.net.certificates import issue, issued, load_certificate, make_authority
from edgegossip.net.probe import probe
from edgegossip.net.revocation import revoke
from edgegossip.net.router import Router
from edgegossip.net.tls import TLS
from edgegossip.net.transport import Incarnation
from edgegossip.net.zenoh_transport import ZenohTransport
from edgegossip.sim.platform import Platform

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
        elif kind != "received":
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


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes all sessions in the end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def machines(tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """Three, whose workers look at their files fifty times in a second."""
    monkeypatch.setattr("edgegossip.net.renewal._LOOK", 0.02)
    return Machines(tmp_path, opened)


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


# Revoked.


def test_a_revoked_worker_is_out_and_the_others_exchange(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = machines.open_all()
    begin = time.monotonic()
    machines.revoke(2, tell=[0, 1])
    third.settle()
    assert time.monotonic() - begin < 5
    wait_for_renewals(caplog, 2)
    meet(first, second)
    exchange(first, second)
    # It has called all the time.
    assert third.events.is_empty


@thorough
def test_a_revoked_certificate_gets_no_link_whoever_calls(
    machines: Machines, opened: ExitStack
) -> None:
    machines.revoke(2, tell=[0, 1])
    old = machines.folder(2)
    called = Worker(old, 2, is_careful=False)
    opened.callback(called.session.close)
    machines.endpoints.append(called.endpoint)
    first = machines.open(0, connect=[3])
    calling = Worker(old, 2, machines.endpoints[0], is_careful=False)
    opened.callback(calling.session.close)
    assert is_refused(machines.endpoints[0], old, 2)
    # Later, and yet there is a link.
    second = machines.open(1)
    meet(first, second)
    exchange(first, second)
    assert called.session.info.links() == calling.session.info.links() == []


def test_a_certificate_in_the_place_of_a_revoked_one_is_good(
    machines: Machines, tmp_path: Path
) -> None:
    old = machines.folder(2)
    machines.revoke(2, tell=[0, 1])
    issue(machines.authority, [2], replace=True)
    new = give(machines.authority, tmp_path / "new", 2)
    first, second = machines.open(0), machines.open(1)
    third = machines.open(2, folder=new)
    meet(first, second, third)
    exchange(first, third)
    assert is_refused(machines.endpoints[0], old, 2)


@thorough
def test_who_has_not_the_list_yet_brings_nobody_back(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = machines.open_all()
    machines.revoke(2, tell=[0])
    wait_for_renewals(caplog, 1)
    # Worker 1 tells the others about each other.
    for member, others in ((first, [1]), (second, [0, 2]), (third, [1])):
        member.settle(*others)
    exchange(first, second)
    exchange(second, third)


@thorough
def test_one_without_the_authority_bans_a_certificate(machines: Machines) -> None:
    banned = load_certificate(machines.folder(2) / "worker-2.pem").serial_number
    first = machines.open(0, banned=[banned])
    assert is_refused(machines.endpoints[0], machines.folder(2), 2)
    second, third = machines.open(1), machines.open(2)
    for member, others in ((first, [1]), (second, [0, 2]), (third, [1])):
        member.settle(*others)
    exchange(first, second)


@pytest.mark.slow
def test_a_router_expels_too(machines: Machines, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = machines.router()
    first, second, third = machines.open_all(endpoint)
    machines.revoke(2, tell=[None])
    wait_for_renewals(caplog, 1)
    meet(first, second)
    third.settle()
    exchange(first, second)
    assert is_refused(endpoint, machines.folder(2), 2)


def test_a_damaged_list_lets_nobody_back_in(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    machines.revoke(2, tell=[0])
    first, second = machines.open(0), machines.open(1)
    meet(first, second)
    (machines.folder(0) / "revoked.pem").write_text("damaged")
    wait_until(lambda: "the earlier revocations stay in force" in caplog.text)
    assert is_refused(machines.endpoints[0], machines.folder(2), 2)
    exchange(first, second)


@thorough
def test_a_tls_session_from_before_is_not_taken_up_again(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    machines.open(0)
    host, _, port = machines.endpoints[0].removeprefix("tls/").rpartition(":")
    tls = TLS.from_folder(machines.folder(2), 2)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.certificate, tls.key)

    def call(session: ssl.SSLSession | None) -> tuple[bool | None, ssl.SSLSession | None]:
        plain = socket.create_connection((host, int(port)))
        with context.wrap_socket(plain, server_hostname=host, session=session) as encrypted:
            encrypted.settimeout(0.1)
            with suppress(TimeoutError):  # it is content
                encrypted.recv(1)
            return encrypted.session_reused, encrypted.session

    _, session = call(None)
    is_reused, session = call(session)
    assert is_reused
    machines.revoke(2, tell=[0])
    wait_for_renewals(caplog, 1)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_UNKNOWN"):
        call(session)


def sent_to(crew: Crew, rank: Rank) -> list[Rank]:
    """To whom worker `rank` has sent, one after another."""
    log = crew.folder(rank) / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    # The last one may be under way.
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [to for each in events if each["type"] == "sent" for to in each["receivers"]]


@pytest.mark.slow
def test_training_goes_on_without_the_revoked_and_with_the_renewed(
    machines: Machines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gossip = Gossip(topology=ring(NUM_WORKERS), num_rounds=10**6)
    platforms = (Platform(throughput=100.0),) * NUM_WORKERS
    experiment = replace(small_run(), algorithm=gossip, platforms=platforms)
    crew = Crew(tmp_path / "run")
    crew.network = machines  # type: ignore[assignment]
    settings = WorkerSettings(meet_seconds=20, max_seconds=3)
    crew.start(experiment, *range(NUM_WORKERS), settings=settings)
    wait_until(lambda: sent_to(crew, 2), 30)
    issue(machines.authority, [1], replace=True)
    give(machines.authority, machines.folder(1), 1)
    wait_for_renewals(caplog, 1)
    machines.revoke(2, tell=[0, 1])
    wait_for_renewals(caplog, 3)
    assert crew.join(*range(NUM_WORKERS)) == ["time limit"] * NUM_WORKERS
    assert {*sent_to(crew, 0)[-50:]} == {1}
    assert {*sent_to(crew, 1)[-50:]} == {0}
    assert {*sent_to(crew, 0)} == {1, 2}  # before


# New certificates.


@pytest.mark.slow
def test_a_new_certificate_is_shown_by_a_running_worker(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = machines.open_all()
    issue(machines.authority, [1], days=9, replace=True)
    give(machines.authority, machines.folder(1), 1)
    wait_for_renewals(caplog, 1)
    meet(first, second, third)
    exchange(first, second)
    exchange(second, third)
    assert second.transport.credentials is not None
    assert second.transport.credentials().identity.holder == issued(machines.authority)[-1]
    # The old one can be revoked now.
    revoke(machines.authority, serials=[issued(machines.authority)[1].serial_number])
    tell_revoked(machines.authority, *(machines.folder(rank) for rank in range(NUM_WORKERS)))
    wait_for_renewals(caplog, 4)
    meet(first, second, third)
    exchange(first, second)
    assert caplog.text.count("this is worker-1 until") == 2


@pytest.mark.slow
def test_a_new_authority_takes_over_in_three_steps(
    machines: Machines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = machines.open_all()
    new = tmp_path / "new"
    make_authority(new)
    issue(new, range(NUM_WORKERS))
    old_ca, new_ca = machines.authority / "ca.pem", new / "ca.pem"
    (tmp_path / "both").write_text(new_ca.read_text() + old_ca.read_text())
    renewals = 0
    for step in ("both", "certificates", "new only"):
        for rank in range(NUM_WORKERS):
            folder = machines.folder(rank)
            if step == "certificates":
                put(new / f"worker-{rank}-key.pem", folder / f"worker-{rank}-key.pem")
                put(new / f"worker-{rank}.pem", folder / f"worker-{rank}.pem")
            else:
                put(tmp_path / "both" if step == "both" else new_ca, folder / "ca.pem")
            # One after the other: all can talk to all at any time.
            renewals += 1
            wait_for_renewals(caplog, renewals)
            meet(first, second, third)
            exchange(first, second)
    issue(machines.authority, [2], replace=True)
    old = give(machines.authority, tmp_path / "old", 2)
    put(tmp_path / "both", old / "ca.pem")
    assert is_refused(machines.endpoints[0], old, 2)


@pytest.mark.slow
def test_a_frame_under_way_arrives_before_links_are_opened_anew(machines: Machines) -> None:
    first, second, _ = machines.open_all()
    issue(machines.authority, [1], replace=True)
    frame = bytes(50_000_000)
    sending = threading.Thread(target=second.transport.send, args=(0, [frame]))
    sending.start()
    give(machines.authority, machines.folder(1), 1)
    assert first.events.next() == ("received", 1, frame)
    assert first.events.take(2) == [("disappeared", 1, 101), ("appeared", 1, 101)]
    sending.join()


# Bound to a run.


def bind(machines: Machines, rank: Rank, run_name: str, folder: Path) -> Path:
    issue(machines.authority, [rank], run_name=run_name, replace=True)
    return give(machines.authority, folder, rank)


def test_a_certificate_of_a_run_is_good_in_it_beside_others(
    machines: Machines, tmp_path: Path
) -> None:
    bound = bind(machines, 1, "night", tmp_path / "bound")
    first = machines.open(0, run=f"night:{RUN}")
    second = machines.open(1, run=f"night:{RUN}", folder=bound)
    meet(first, second)
    exchange(first, second)


def test_a_certificate_of_another_run_gets_nothing_through(
    machines: Machines, opened: ExitStack, tmp_path: Path
) -> None:
    bound = bind(machines, 2, "night", tmp_path / "bound")
    run = f"day:{RUN}"
    with pytest.raises(NetworkError, match="valid only in runs named 'night'"):
        machines.open(2, run=run, folder=bound)
    first, second = machines.open(0, run=run), machines.open(1, run=run)
    meet(first, second)
    impostor = Worker(bound, 2, *machines.endpoints[:2], run=run, is_careful=False)
    opened.callback(impostor.session.close)
    for member in (first, second):
        kind, rank, reason = member.events.next()
        assert (kind, rank) == ("refused", None)
        assert reason == "a link from 'worker-2@night', which is valid only in other runs"
    impostor.watch("**")
    for sender in (1, 2):
        impostor.send(0, b"forged", sender=sender)
    first.transport.send(2, [b"secret"])
    exchange(first, second)
    exchange(first, second)
    assert {payload for _, payload in impostor.received} <= {b"forged"}  # its own
    assert {*impostor.alive} <= {"/alive/2/7"}


@pytest.mark.slow
@pytest.mark.parametrize(("known", "is_passed"), [(["night"], True), ([], False)])
def test_a_router_passes_a_bound_worker_on_only_where_it_is_told_the_run(
    machines: Machines,
    opened: ExitStack,
    tmp_path: Path,
    known: list[str],
    is_passed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint = machines.router(known)
    bound = bind(machines, 1, "night", tmp_path / "bound")
    first = machines.open(0, endpoint, f"night:{RUN}")
    second = machines.open(1, endpoint, f"night:{RUN}", folder=bound)
    if is_passed:
        meet(first, second)
        exchange(first, second)
    else:
        wait_until(lambda: "nothing passes: a link from 'worker-1@night'" in caplog.text)
    # In no other run, whatever it says.
    day = machines.open(2, endpoint, f"day:{RUN}")
    impostor = Worker(bound, 1, endpoint, run=f"day:{RUN}", is_careful=False)
    opened.callback(impostor.session.close)
    own = machines.open(0, endpoint, f"day:{RUN}")
    meet(day, own)
    impostor.watch("**")
    impostor.send(2, b"garbage")
    exchange(day, own)
    assert {payload for _, payload in impostor.received} <= {b"garbage"}  # its own
    assert 1 not in day.here


@pytest.mark.slow
def test_a_bound_router_serves_its_run_only(machines: Machines, tmp_path: Path) -> None:
    issue(machines.authority, [None], run_name="night", replace=True)
    give(machines.authority, machines.folder(None), None)
    message = "valid only in runs named 'night'; give --run night"
    with pytest.raises(NetworkError, match=message):
        machines.router()
    endpoint = machines.router(["night"])
    ends = [machines.open(rank, endpoint, f"night:{RUN}") for rank in range(2)]
    meet(*ends)
    exchange(*ends)
    first = machines.open(0, endpoint, f"day:{RUN}")
    kind, _, reason = first.events.next()
    assert kind == "refused"
    assert "edgegossip-router@night" in reason or "of this run" in reason
