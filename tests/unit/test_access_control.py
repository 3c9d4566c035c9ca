"""Zenoh passes some messages between real sessions on loopback, and drops others."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import zenoh
from tests.zenoh_workers import NUM_WORKERS, RUN, Worker, wait_until

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank
from edgegossip.net.identity.access import known_holders
from edgegossip.net.identity.certificates import issue, make_authority
from edgegossip.net.identity.tls import TLS
from edgegossip.net.zenoh.links import report_strangers
from edgegossip.net.zenoh.probe import probe
from edgegossip.real.launch import free_ports

OTHER_SETTINGS = (
    f"a sign of life in run 'feed', whose recipe or --name differs from this run, {RUN!r}"
)
NO_WORKERS = shutil.ignore_patterns("worker*")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of four workers of one authority."""
    folder = tmp_path_factory.mktemp("certs")
    make_authority(folder)
    issue(folder, range(NUM_WORKERS + 1))
    return folder


@pytest.fixture
def pair(folder: Path, opened: ExitStack) -> tuple[Worker, Worker]:
    """Workers 0 and 1, which see each other."""
    first = Worker(folder, 0)
    opened.callback(first.session.close)
    second = Worker(folder, 1, first.endpoint)
    opened.callback(second.session.close)
    wait_until(lambda: first.sees(1) and second.sees(0))
    return first, second


def is_undisturbed(first: Worker, second: Worker) -> bool:
    """Whether the two still exchange."""
    first.send(1, b"still")
    second.send(0, b"here")
    wait_until(lambda: ("/data/1/0", b"still") in second.received)
    wait_until(lambda: ("/data/0/1", b"here") in first.received)
    return True


@pytest.fixture
def impostor(pair: tuple[Worker, Worker], folder: Path, opened: ExitStack) -> Worker:
    """Worker 2, which keeps no rules, linked to both."""
    impostor = Worker(folder, 2, *(worker.endpoint for worker in pair), is_careful=False)
    opened.callback(impostor.session.close)
    wait_until(lambda: pair[0].sees(2) and pair[1].sees(2) and impostor.sees(0, 1))
    return impostor


FORGED = ["0/1", "*/1", "**/1", "**", "0/*", "0/**", "0/$*1", "*/$*2", "0/1$*"]


@pytest.mark.parametrize("keys", FORGED)
def test_what_is_sent_in_anothers_name_is_dropped(
    pair: tuple[Worker, Worker], impostor: Worker, keys: str
) -> None:
    impostor.session.put(f"{impostor.prefix}/data/{keys}", b"forged")
    impostor.session.delete(f"{impostor.prefix}/data/{keys}")
    impostor.session.declare_publisher(f"{impostor.prefix}/data/{keys}").put(b"forged")
    impostor.send(0, b"own")  # arrives after the forged ones
    wait_until(lambda: ("/data/0/2", b"own") in pair[0].received)
    assert pair[0].received == [("/data/0/2", b"own")]
    assert is_undisturbed(*pair)


def test_a_worker_may_delete_nothing(pair: tuple[Worker, Worker], impostor: Worker) -> None:
    impostor.session.delete(f"{impostor.prefix}/data/0/2")
    impostor.send(0, b"own")
    wait_until(lambda: pair[0].received)
    assert pair[0].received == [("/data/0/2", b"own")]


def test_nobody_is_alive_in_anothers_name(
    pair: tuple[Worker, Worker], impostor: Worker
) -> None:
    liveliness = impostor.session.liveliness()
    keys = ["1/8", "*/8", "**", "1/*", "$*1/8"]
    tokens = [liveliness.declare_token(f"{impostor.prefix}/alive/{key}") for key in keys]
    own = liveliness.declare_token(f"{impostor.prefix}/alive/2/8")
    for worker in pair:
        wait_until(lambda worker=worker: "/alive/2/8" in worker.alive)  # type: ignore[misc]
        assert {*worker.alive} == {"/alive/0/7", "/alive/1/7", "/alive/2/7", "/alive/2/8"}
        worker.alive.clear()
    for token in (*tokens, own):
        token.undeclare()  # type: ignore[no-untyped-call]
    for worker in pair:
        wait_until(lambda worker=worker: worker.alive)  # type: ignore[misc]
        assert worker.alive == ["/alive/2/8"]  # is gone; nobody else is
    assert is_undisturbed(*pair)


def test_nobody_reads_what_is_for_others(pair: tuple[Worker, Worker], impostor: Worker) -> None:
    for keys in ("**", f"{impostor.prefix}/**", f"{impostor.prefix}/data/1/*"):
        impostor.watch(keys)
    assert is_undisturbed(*pair)
    for worker in pair:
        worker.send(2, b"yours")
    wait_until(lambda: len({*impostor.received}) == 2)
    assert {*impostor.received} == {("/data/2/0", b"yours"), ("/data/2/1", b"yours")}


def test_it_does_not_matter_who_connects_to_whom(folder: Path, opened: ExitStack) -> None:
    impostor = Worker(folder, 2, is_careful=False)
    opened.callback(impostor.session.close)
    worker = Worker(folder, 0, impostor.endpoint)
    opened.callback(worker.session.close)
    wait_until(lambda: worker.sees(2) and impostor.sees(0))
    impostor.watch("**")
    impostor.send(0, b"forged", sender=1)
    impostor.send(0, b"own")
    worker.send(1, b"secret")
    worker.send(2, b"yours")
    wait_until(lambda: worker.received and ("/data/2/0", b"yours") in impostor.received)
    assert worker.received == [("/data/0/2", b"own")]
    assert ("/data/1/0", b"secret") not in impostor.received


@pytest.mark.slow
@pytest.mark.parametrize("is_calling", [False, True], ids=["called", "calling"])
def test_nobody_joins_the_link_of_another_by_its_id(
    folder: Path, opened: ExitStack, is_calling: bool
) -> None:
    if is_calling:
        second = Worker(folder, 1)
        first = Worker(folder, 0, second.endpoint)
    else:
        first = Worker(folder, 0)
        second = Worker(folder, 1, first.endpoint)
    opened.callback(first.session.close)
    opened.callback(second.session.close)
    wait_until(lambda: first.sees(1) and second.sees(0))
    zenoh_id = second.session.zid()
    impostor = Worker(folder, 2, first.endpoint, is_careful=False, zenoh_id=zenoh_id)
    opened.callback(impostor.session.close)
    time.sleep(0.2)  # there is no sign of a link that is not there
    impostor.send(0, b"forged", sender=1)
    assert [link.auth_identifier for link in first.session.info.links()] == ["worker-1"]
    assert is_undisturbed(first, second)
    assert first.received == [("/data/0/1", b"here")]


@pytest.mark.slow
def test_links_close_when_a_certificate_expires(
    folder: Path, tmp_path: Path, opened: ExitStack
) -> None:
    shutil.copytree(folder, tmp_path, ignore=NO_WORKERS, dirs_exist_ok=True)
    begin = datetime.now(UTC) - timedelta(days=1) + timedelta(seconds=3)
    issue(tmp_path, [1], days=1, begin=begin)
    first = Worker(folder, 0)
    opened.callback(first.session.close)
    second = Worker(tmp_path, 1, first.endpoint)
    opened.callback(second.session.close)
    wait_until(lambda: first.sees(1))
    first.alive.clear()
    wait_until(lambda: "/alive/1/7" in first.alive)
    wait_until(lambda: first.session.info.links() == [])


@pytest.mark.parametrize(
    ("rank", "run", "report"),
    [
        (2, "feed", (2, OTHER_SETTINGS)),
        (3, RUN, (None, "a link from 'worker-3', which is not one of the 3 workers")),
    ],
    ids=["another run", "a rank beyond"],
)
def test_strangers_with_a_good_certificate_are_reported_once_and_have_no_part(
    pair: tuple[Worker, Worker],
    folder: Path,
    opened: ExitStack,
    rank: Rank,
    run: str,
    report: tuple[Rank | None, str],
) -> None:
    reports: list[tuple[Rank | None, str]] = []
    report_strangers(
        pair[0].session,
        RUN,
        NUM_WORKERS,
        known_holders(NUM_WORKERS, [RUN]),
        lambda rank, reason: reports.append((rank, reason)),
    )
    stranger = Worker(folder, rank, pair[0].endpoint, run=run, is_careful=False)
    opened.callback(stranger.session.close)
    wait_until(lambda: reports)
    stranger.watch("**")
    stranger.send(0, b"in the own run")
    stranger.session.put(f"edgegossip/{RUN}/data/0/1", b"forged")
    stranger.session.put(f"edgegossip/{RUN}/data/0/3", b"of a rank beyond")
    assert is_undisturbed(*pair)
    assert pair[0].received == [("/data/0/1", b"here")]
    assert {*pair[0].alive} == {"/alive/0/7", "/alive/1/7"}
    assert not {b"still", b"here"} & {payload for _, payload in stranger.received}
    assert reports == [report]


# Refused before there is a link.


LISTENER = """
import json, sys, zenoh
from pathlib import Path
from edgegossip.net.zenoh.links import log_refused_connections
from edgegossip.net.identity.access import zenoh_security
from edgegossip.net.identity.tls import TLS
folder, port = Path(sys.argv[1]), sys.argv[2]
log_refused_connections()
config = zenoh.Config()
settings = zenoh_security(TLS.from_folder(folder, 0).check(0), "r", 3) | {
    "mode": "peer", "scouting/multicast/enabled": False,
    "listen/endpoints": ["tls/127.0.0.1:" + port],
}
for key, value in settings.items():
    config.insert_json5(key, json.dumps(value))
with zenoh.open(config):
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def listener(folder: Path) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A session of worker 0 in a process of its own, since zenoh's log belongs to that."""
    port = free_ports(1)[0]
    command = [sys.executable, "-c", LISTENER, str(folder), str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield port, process
        process.kill()


@pytest.mark.slow
def test_a_worker_without_a_good_certificate_is_refused_and_logged(
    folder: Path, tmp_path: Path, listener: tuple[int, subprocess.Popen[str]]
) -> None:
    port, process = listener
    endpoint = f"tls/127.0.0.1:{port}"
    make_authority(tmp_path / "wrong")
    issue(tmp_path / "wrong", [1])
    for name, begin in (("expired", -20), ("early", 20)):
        shutil.copytree(folder, tmp_path / name, ignore=NO_WORKERS)
        issue(tmp_path / name, [1], days=9, begin=datetime.now(UTC) + timedelta(days=begin))
    wrong = TLS.from_folder(tmp_path / "wrong", 1)
    deceived = TLS(folder / "ca.pem", wrong.certificate, wrong.key)
    with pytest.raises(NetworkError, match="its certificate is refused"):
        probe(endpoint, wrong)
    for tls in (
        deceived,
        TLS.from_folder(tmp_path / "expired", 1),
        TLS.from_folder(tmp_path / "early", 1),
    ):
        with pytest.raises(NetworkError, match="it rejects our certificate"):
            probe(endpoint, tls)
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.sendall(b"hello, I am a plain zenoh")
        assert plain.recv(1)[0] == 21  # a TLS alert
    assert probe(endpoint, TLS.from_folder(folder, 1)).name == "worker-0"
    said, _ = process.communicate("")
    for message in (
        "received fatal alert: UnknownCA",
        "invalid peer certificate: UnknownIssuer",
        "certificate expired",
        "certificate not valid yet",
        "InvalidContentType",
    ):
        assert message in said


@pytest.mark.slow
def test_a_worker_links_to_no_listener_of_another_authority_or_without_tls(
    folder: Path, tmp_path: Path, opened: ExitStack
) -> None:
    make_authority(tmp_path)
    issue(tmp_path, [1])
    other = Worker(tmp_path, 1)
    opened.callback(other.session.close)
    port = free_ports(1)[0]
    config = zenoh.Config()
    config.insert_json5("listen/endpoints", f'["tcp/127.0.0.1:{port}"]')
    config.insert_json5("scouting/multicast/enabled", "false")
    opened.callback(zenoh.open(config).close)
    worker = Worker(folder, 0, other.endpoint, f"tcp/127.0.0.1:{port}")
    opened.callback(worker.session.close)
    time.sleep(0.3)  # there is no sign of a link that is not there
    assert worker.session.info.links() == []
    late = Worker(folder, 2, worker.endpoint)
    opened.callback(late.session.close)
    wait_until(lambda: worker.sees(2) and late.sees(0))
