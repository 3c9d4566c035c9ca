"""`edgegossip doctor`."""

from __future__ import annotations

import importlib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from edgegossip.cli import doctor_command as doctor
from edgegossip.cli.doctor_command import doctor_command
from edgegossip.contract.errors import NetworkError, UsageError
from edgegossip.net.identity.certificates import issue, make_authority
from edgegossip.net.identity.tls import TLS
from edgegossip.net.zenoh.probe import probe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an authority and the files of workers 0 and 1."""
    make_authority(tmp_path)
    issue(tmp_path, [0, 1])
    return tmp_path


@pytest.fixture
def port() -> Iterator[int]:
    """A port where somebody listens, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def tls_port(folder: Path) -> Iterator[int]:
    """A port where worker 0 answers in TLS and asks for a certificate."""
    tls = TLS.from_folder(folder, 0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.certificate, tls.key)
    context.verify_mode = ssl.CERT_REQUIRED

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with suppress(OSError), context.wrap_socket(connection, server_side=True) as e:
                    e.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=[listener], daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a Redis runs on this machine does not matter, and loopback is quick."""
    monkeypatch.setattr("edgegossip.net.zenoh.probe._VERDICT_SECONDS", 0.05)
    monkeypatch.setattr(doctor, "_LOCAL_REDIS", "redis://127.0.0.1:1")


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """State and detail by what was looked at; continued lines are left out."""
    printed = capsys.readouterr().out.splitlines()
    rows = [line for line in printed if not line.startswith("  ")]
    found = {}
    for row in rows:
        state = next(s for s in ("ok", "none", "missing", "failed") if f" {s} " in row)
        what, detail = row.split(f" {state} ", 1)
        found[what.strip()] = state, detail.strip()
    return found


def test_the_machine_is_described_and_nothing_has_to_be_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor_command([]) == 0
    found = lines(capsys)
    for what in ("Python", "torch", "eclipse-zenoh", "cryptography", "cores", "torch threads"):
        assert found[what][0] == "ok"
    assert {"memory", "GPU", "Redis", "psutil"} <= found.keys()


def test_it_works_without_what_it_looks_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_module(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert doctor_command([]) == 0
    found = lines(capsys)
    assert found["eclipse-zenoh"][0] == "missing"
    assert "pip install eclipse-zenoh" in found["eclipse-zenoh"][1]
    for what in ("torch", "cryptography", "psutil"):
        assert found[what][0] == "missing"
    for what in ("memory", "Redis"):  # nothing needs them
        assert found[what][0] == "none"
    assert doctor_command(["--redis", "redis://x"]) == 1  # asked for, and cannot be tried


def test_files_and_reachable_workers_are_ok(
    folder: Path, port: int, tls_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoints = [f"tls/127.0.0.1:{tls_port}", f"tcp/127.0.0.1:{port}"]
    arguments = ["--tls", str(folder), "--rank", "1", "--connect", *endpoints]
    assert doctor_command(arguments) == 0
    found = lines(capsys)
    assert found["TLS"][0] == "ok"
    assert found[endpoints[0]][1].startswith("TLS with worker-0, ")
    assert found[endpoints[1]][1].startswith("reachable, ")


def test_what_was_asked_for_and_fails_is_said_with_advice_in_the_exit_code(
    folder: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"tcp/127.0.0.1:{listener.getsockname()[1]}"
    for arguments, what, advice in [
        (["--tls", str(folder), "--rank", "7"], "TLS", ""),
        (["--connect", closed], closed, "is the worker running?"),
        (
            ["--connect", "pi.local"],
            "pi.local",
            "an endpoint is tcp/HOST:PORT or tls/HOST:PORT",
        ),
        (["--redis", "redis://127.0.0.1:1"], "Redis", "redis://127.0.0.1:1"),
    ]:
        assert doctor_command(arguments) == 1
        state, detail = lines(capsys)[what]
        assert state == "failed"
        assert advice in detail
    assert doctor_command(["--connect", f"tcp/127.0.0.1:{port}", closed]) == 1


def test_without_files_an_encrypted_endpoint_is_only_connected_to(
    tls_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = f"tls/127.0.0.1:{tls_port}"
    assert doctor_command(["--connect", endpoint]) == 0
    assert "to try TLS too: --tls FOLDER and --rank R" in lines(capsys)[endpoint][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tls certs", r"--tls FOLDER and --rank R \(or --router\) go together"),
        ("--rank 0", "go together"),
        ("--router", "go together"),
        ("--tls certs --rank 0 --router", "choose one of --rank R and --router"),
    ],
)
def test_folder_and_rank_go_together(arguments: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        doctor_command(arguments.split())


def test_a_routers_files_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a long name would not fit on a line
    make_authority(tmp_path)
    command = ["--tls", ".", "--router"]
    assert doctor_command(command) == 1
    assert "router.pem is missing" in " ".join(lines(capsys)["TLS"])
    issue(tmp_path, [None])
    assert doctor_command(command) == 0
    assert "router.pem is edgegossip-router's until" in " ".join(lines(capsys)["TLS"])


# Probes.


def test_a_probe_says_who_refuses_whom(folder: Path, tls_port: int, tmp_path: Path) -> None:
    endpoint = f"tls/127.0.0.1:{tls_port}"
    make_authority(tmp_path / "other")
    issue(tmp_path / "other", [1])
    other = TLS.from_folder(tmp_path / "other", 1)
    with pytest.raises(NetworkError, match="its certificate is refused"):
        probe(endpoint, other)
    with pytest.raises(NetworkError, match="it rejects our certificate"):
        probe(endpoint, TLS(folder / "ca.pem", other.certificate, other.key))


def test_a_probe_of_a_listener_without_tls_does_not_wait_for_ever(
    folder: Path, port: int
) -> None:
    with pytest.raises(NetworkError, match="no answer to the TLS handshake"):
        probe(f"tls/127.0.0.1:{port}", TLS.from_folder(folder, 1), patience=0.05)


def test_options_behind_an_endpoint_are_not_looked_at(port: int) -> None:
    reached = probe(f"tcp/127.0.0.1:{port}?prio=1#iface=eth0")
    assert reached.name is None
    with pytest.raises(ValueError, match=r"connect has 'tcp/127\.0\.0\.1'; an endpoint"):
        probe("tcp/127.0.0.1?prio=1")
