"""Certificates that are revoked, or renewed, between real sessions on loopback."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.certificate_folders import give, put, tell_revoked
from tests.certified_machines import Machines, exchange, is_refused, meet, wait_for_renewals
from tests.small_runs import small_run
from tests.tiers import thorough
from tests.worker_threads import Crew
from tests.zenoh_workers import NUM_WORKERS, Worker, wait_until

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.protocol import Rank
from edgegossip.contract.topology import ring
from edgegossip.net.identity.certificates import issue, issued, load_certificate, make_authority
from edgegossip.net.identity.revocation import revoke
from edgegossip.net.identity.tls import TLS
from edgegossip.real.worker import WorkerSettings
from edgegossip.sim.platform import Platform

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
    assert caplog.text.count("this one is worker-1 until") == 2


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
