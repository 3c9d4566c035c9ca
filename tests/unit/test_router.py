"""Workers that cannot call each other, joined by routers with certificates."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.tiers import thorough
from tests.transports import End, Recorder
from tests.unit.test_zenoh_transport import check_exchange
from tests.zenoh_workers import NUM_WORKERS, RUN, Worker, wait_until

from edgegossip.cli.router_command import router_command
from edgegossip.contract.errors import NetworkError
from edgegossip.net.address import Address
from edgegossip.net.identity.certificates import issue, make_authority
from edgegossip.net.identity.tls import TLS
from edgegossip.net.zenoh.router import Router
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.launch import free_ports


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of three workers and of routers."""
    folder = tmp_path_factory.mktemp("certs")
    make_authority(folder)
    issue(folder, [*range(NUM_WORKERS), None])
    return folder


def router(
    folder: Path, opened: ExitStack, *connect: str, num_workers: int = NUM_WORKERS
) -> str:
    endpoint = f"tls/127.0.0.1:{free_ports(1)[0]}"
    address = Address(listen=(endpoint,), connect=connect)
    security = TLS.from_folder(folder, None)
    opened.enter_context(Router(address, num_workers=num_workers, security=security))
    return endpoint


def client(folder: Path, opened: ExitStack, rank: int, endpoint: str) -> End:
    return worker(folder, opened, rank, Address(connect=(endpoint,)))


def worker(folder: Path, opened: ExitStack, rank: int, address: Address) -> End:
    transport = ZenohTransport(
        run=RUN,
        rank=rank,
        num_workers=NUM_WORKERS,
        address=address,
        incarnation=100 + rank,
        security=TLS.from_folder(folder, rank),
    )
    end = End(transport, Recorder())
    transport.open(end.events)
    opened.callback(transport.close)
    return end


@thorough
@pytest.mark.parametrize("num_routers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_meet_behind_routers(
    folder: Path, opened: ExitStack, num_routers: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = last = router(folder, opened)
    if num_routers == 2:
        last = router(folder, opened, first)
    check_exchange(client(folder, opened, 0, first), client(folder, opened, 1, last))
    assert caplog.messages == []


@pytest.mark.slow
def test_workers_that_do_not_listen_use_a_second_router_while_the_first_is_lost(
    folder: Path, opened: ExitStack
) -> None:
    last = router(folder, opened)
    with ExitStack() as first:
        address = Address(connect=(router(folder, first, last), last))
        a, b = (worker(folder, opened, rank, address) for rank in (0, 1))
        assert a.events.next() == ("appeared", 1, 101)
        assert b.events.next() == ("appeared", 0, 100)
        a.send(1, b"once")
        assert b.events.next() == ("received", 0, b"once")
    a.events.until(("appeared", 1, 101))
    b.events.until(("appeared", 0, 100))
    a.send(1, b"again")
    b.events.until(("received", 0, b"again"))


def test_a_worker_that_calls_a_worker_is_warned_that_it_reaches_no_other(
    folder: Path, opened: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"tls/127.0.0.1:{free_ports(1)[0]}"
    worker(folder, opened, 0, Address(listen=(endpoint,)))
    client(folder, opened, 1, endpoint)
    wait_until(lambda: caplog.messages)
    [message] = caplog.messages
    assert message.startswith("this worker reaches only worker 0, because it does not listen")


def test_zenoh_says_who_gets_no_link_and_nothing_when_workers_leave(
    folder: Path, opened: ExitStack, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_ports(1)[0]
    first = worker(folder, opened, 0, Address(listen=(f"tls/127.0.0.1:{port}",)))
    with ExitStack() as leaving:
        others = [client(folder, leaving, rank, f"tls/127.0.0.1:{port}") for rank in (1, 2)]
        first.events.next(), first.events.next()
        assert [each.events.next() for each in others] == [("appeared", 0, 100)] * 2
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.sendall(b"no TLS")
    printed: list[str] = []

    def log() -> str:
        printed.append(capfd.readouterr().out)
        return "".join(printed)

    wait_until(lambda: "zenoh_link_tls" in log())
    assert "Unknown" not in log()  # of declarations that access control dropped


@thorough
def test_behind_a_router_too_nobody_speaks_or_listens_for_another(
    folder: Path, opened: ExitStack
) -> None:
    endpoint = router(folder, opened)
    a, b = client(folder, opened, 0, endpoint), client(folder, opened, 1, endpoint)
    a.events.next(), b.events.next()
    impostor = Worker(folder, 2, endpoint, is_careful=False)
    opened.callback(impostor.session.close)
    assert a.events.next() == b.events.next() == ("appeared", 2, 7)
    wait_until(lambda: {"/alive/0/100", "/alive/1/101"} <= {*impostor.alive})
    impostor.watch("**")
    # Of a rank that may not, so `a` would complain of a piece that is none.
    for keys in ("0/1", "*/1", "0/*", "**"):
        impostor.session.put(f"{impostor.prefix}/data/{keys}", b"forged")
    impostor.session.liveliness().declare_token(f"{impostor.prefix}/alive/1/9")
    impostor.send(0, b"garbage")
    assert a.events.next() == ("refused", 2, "no piece of a frame")
    a.send(1, b"secret")
    assert b.events.next() == ("received", 0, b"secret")
    a.send(2, b"yours")
    wait_until(lambda: "/data/2/0" in dict(impostor.received))
    assert "/data/1/0" not in dict(impostor.received)


@thorough
def test_a_router_says_whom_it_has_no_place_for(
    folder: Path, opened: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = router(folder, opened, num_workers=2)
    client(folder, opened, 2, endpoint)
    wait_until(lambda: caplog.messages)
    assert caplog.messages == [
        "not forwarding: a link from 'worker-2', which is not one of the 2 workers"
    ]


@pytest.mark.slow
def test_a_workers_certificate_makes_no_router(folder: Path, opened: ExitStack) -> None:
    impostor = Worker(folder, 2, is_careful=False, mode="router")
    opened.callback(impostor.session.close)
    endpoint = impostor.endpoint
    a = client(folder, opened, 0, endpoint)
    client(folder, opened, 1, endpoint)
    # It could say anything of worker 1, if it were believed.
    wait_until(lambda: "/alive/1/101" in impostor.alive)
    token = impostor.session.liveliness().declare_token(f"{impostor.prefix}/alive/2/8")
    told = a.events.until(("appeared", 2, 8))
    assert {rank for _, rank, _ in told} == {2}
    del token


@pytest.mark.slow
def test_the_command_routes_until_it_is_stopped(folder: Path, opened: ExitStack) -> None:
    endpoint = f"tls/127.0.0.1:{free_ports(1)[0]}"
    command = ["-m", "edgegossip", "router", "--listen", endpoint]
    process = opened.enter_context(
        subprocess.Popen(
            [sys.executable, *command, "--tls", str(folder)], stdout=subprocess.PIPE, text=True
        )
    )
    opened.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == f"router: listening at {endpoint}; Ctrl+C ends it\n"
    a = client(folder, opened, 0, endpoint)
    client(folder, opened, 1, endpoint)
    assert a.events.next() == ("appeared", 1, 101)
    process.terminate()
    assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "tcp/0.0.0.0:7447"], "reaches beyond this machine"),
        (["--listen", "tls/0.0.0.0:7447", "--tls", "."], r"issue --router\) and copy it"),
        (["--listen", "7447"], "an endpoint is tcp/HOST:PORT"),
    ],
    ids=["plain", "no certificate", "no endpoint"],
)
def test_the_command_refuses_what_would_not_be_safe(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((NetworkError, ValueError), match=message):
        router_command(options)


@pytest.mark.parametrize(
    ("address", "num_workers", "error", "message"),
    [
        (Address(connect=("tcp/127.0.0.1:1",)), 4, ValueError, "a router must listen"),
        (Address(listen=("tcp/127.0.0.1:0",)), 0, ValueError, "num_workers must be at least 1"),
        (Address(listen=("tcp/192.0.2.1:1",)), 4, NetworkError, "cannot listen at tcp/192"),
    ],
    ids=["nowhere", "nobody", "elsewhere"],
)
def test_bad_arguments_are_refused(
    address: Address, num_workers: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Router(address, num_workers=num_workers)
